"""New weights that a trainer's thread has asked for, in an update or a load, until it has heard what came of them.

Invariant: an update either does not happen or goes on to its end, whether or not anybody still waits for it. What has
become of it is one attribute each, set by one assignment: nothing can interrupt that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from april.core.versions import PolicyVersion
from april.driver.loop_thread import LoopThread, Reply, result_of
from april.driver.user_code import call_user_code, describe
from april.errors import RolloutError

Update = Callable[[Callable[[], Awaitable[None]] | None], Coroutine[Any, Any, PolicyVersion]]
"""Makes the update's coroutine, from the transfer that it is to await while the engines are paused."""


class UpdateCall:
    """See above; ``asked`` is what the trainer has asked for, ``update`` does it on the loop of ``thread``."""

    def __init__(
        self, thread: LoopThread, update: Update, transfer: Callable[[], Any] | None, asked: tuple[object, ...]
    ) -> None:
        self._thread = thread
        self._update = update
        self._transfer = transfer
        self._asked = asked
        self._asker: int | None = None
        """The thread that is about to hand over and waits for the end."""
        self._transferred = transfer is None
        self._void: BaseException | None = None
        """What has taken its caller out of it before it had handed over anything: it does not happen."""
        self._reply: Reply[PolicyVersion] | None = None
        self._ready = Reply[None]()
        """The engines are paused, or it has ended already."""
        self._handed_over: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- the trainer's thread

    def goes_on_for(self, asked: tuple[object, ...]) -> bool:
        """Whether this update, of which nobody has heard the end, is the one that is ``asked`` for now."""
        failed = self._reply is not None and self._reply.done() and self._reply.error() is not None
        return self._asked == asked and self._void is None and not failed

    def carry_out(self) -> PolicyVersion:
        """Begin it, hand over the weights, and wait for its end, as far as that is not done; returns the new version.

        Raises:
            RolloutError: it waits for the caller: a signal handler, in the middle of it.
        """
        if self._transferred or self._asker is not None:
            return self._join()
        try:
            self._asker = threading.get_ident()
            reply = self._begun()
            if self._transfer is not None:
                self._ready.wait()
                if not reply.done():
                    call_user_code(self._hand_over_here)
                    self._tell()
            reply.wait()
        except BaseException as error:
            # of the transfer, or of a signal handler, from anywhere above; or of another one, from here
            self._void = None if self._transferred else error
            try:
                self._tell()
            finally:
                self._tell()
            if self._void is not None and self._reply is not None:
                self._reply.wait()  # the engines go on with the version that they have
            raise
        finally:
            self._asker = None
        return result_of(reply)

    def _join(self) -> PolicyVersion:
        if not self._transferred and self._asker == threading.get_ident():
            raise RolloutError("a signal handler asks for the weight update in the middle of which it was called")
        reply = self._begun()
        self._tell()  # its caller may have had no time to
        reply.wait()
        return result_of(reply)

    def _hand_over_here(self) -> None:
        assert self._transfer is not None
        self._transfer()
        self._transferred = True

    def _begun(self) -> Reply[PolicyVersion]:
        return self._thread.call(self._begin)

    def _tell(self) -> None:
        self._thread.call_later(self._go_on)

    # ---------------------------------------------------------------- the loop

    def _begin(self) -> Reply[PolicyVersion]:
        """Once, however often an interrupted thread asks for it."""
        if self._reply is None:
            update = self._update(None if self._transfer is None else self._hand_over)
            self._reply = self._thread.follow(update, lambda _: self._ready.give(None))
        return self._reply

    async def _hand_over(self) -> None:
        self._handed_over = asyncio.get_running_loop().create_future()
        self._ready.give(None)
        self._go_on()
        await self._handed_over

    def _go_on(self) -> None:
        waits = self._handed_over
        if waits is None or waits.done():
            return
        if self._void is not None:
            waits.cancel(describe(self._void))
        elif self._transferred:
            waits.set_result(None)
