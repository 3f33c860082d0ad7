"""The RolloutScheduler of rank 0: waits of its trainer end when the ranks do not go on together."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from april.config.settings import Config
from april.core.types import Prompt
from april.driver.loop_thread import LoopThread, Reply, Work, result_of
from april.errors import ConfigError, RankError, RolloutError
from april.processes.content import refuse_not_plain
from april.scheduler import RolloutScheduler

T = TypeVar("T")


class _RankLoop(LoopThread):
    """A background loop whose waits can be ended; nothing of what they wait for is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._waits: set[Reply[Any]] = set()
        self.looks = threading.local()
        """Its attribute ``on`` is there in a thread that only looks at something: that works to the end."""
        self._why: RankError | None = None

    def run(self, work: Work[T]) -> T:
        if hasattr(self.looks, "on"):
            return super().run(work)
        reply = self.submit(work)
        self._waits.add(reply)
        try:
            if self._why is not None:
                self.end_waits(self._why)
            return result_of(reply)
        finally:
            self._waits.discard(reply)

    def end_waits(self, why: RankError) -> None:
        """Whoever waits for a batch or an evaluation, now or later, is told ``why``."""
        self._why = why

        def end() -> None:
            for reply in self._waits.copy():
                reply.cancel()
                reply.give(None, RankError(str(why), why.ranks))

        self.call_later(end)


def refuse_to_draw(prompt: Prompt) -> None:
    """Raise ConfigError for a prompt whose responses could be shared with nobody."""
    try:
        refuse_not_plain(prompt)
    except RolloutError as error:
        raise ConfigError(str(error)) from None


class OwnScheduler(RolloutScheduler):
    """See above; ``travels``: prompts' data goes to other processes with their responses, so it must be plain."""

    _loop_type = _RankLoop
    _gathers = True

    def __init__(self, config: Config, *, travels: bool, **options: Any) -> None:
        self._refuse_prompt = refuse_to_draw if travels else None
        super().__init__(config, **options)

    def end_waits(self, why: RankError) -> None:
        """See :class:`_RankLoop`."""
        if isinstance(self._thread, _RankLoop):
            self._thread.end_waits(why)

    @property
    def batches_out(self) -> list[int]:
        """Numbers of the batches that are delivered and not committed."""
        return self._thread.call(lambda: list(self._driver.core.leased))

    def state_dict(self, trained_through: int | None = None) -> dict[str, Any]:
        """Also when the ranks do not go on."""
        assert isinstance(self._thread, _RankLoop)
        self._thread.looks.on = True
        try:
            return super().state_dict(trained_through)
        finally:
            del self._thread.looks.on

    @property
    def vocab_size(self) -> int:
        """That of the engine with the fewest tokens."""
        return self._vocab_size
