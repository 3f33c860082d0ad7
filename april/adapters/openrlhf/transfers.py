"""A transfer of weights that the asynchronous trainer makes in another process than the one that generates."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from april.daemon_pool import DaemonPool
from april.errors import RolloutError


class TransferElsewhere:
    """Begun by one call and ended by another, both from the process that writes the weights.

    Args:
        hand_over: ``hand_over(transfer)`` stops generation, calls ``transfer``, and goes on when it has returned.
    """

    def __init__(self, hand_over: Callable[[Callable[[], None]], Any]) -> None:
        self._hand_over = hand_over
        self._pool = DaemonPool("april-transfer")
        self._may_write: Future[None] = Future()
        self._written: Future[bool] = Future()
        self._ended: Future[Any] = Future()

    def begin(self) -> None:
        """Returns when weights may be written; raises what stands against it."""
        self._may_write, self._written = Future(), Future()
        self._ended = self._pool.submit(self._hand_over, self._transfer)
        wait((self._may_write, self._ended), return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    def end(self, *, written: bool) -> None:
        """All engines have the weights, or not; returns when generation goes on.

        Raises:
            RolloutError: they have not.
            EngineError: april could not go on with them.
        """
        self._written.set_result(written)
        self._ended.result()

    def _transfer(self) -> None:
        self._may_write.set_result(None)
        if not self._written.result():
            raise RolloutError("the trainer's transfer of weights broke off; its own error says why")
