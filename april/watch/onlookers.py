"""Who looks on while a scheduler works: the line of progress, and exporters. None of them can hold it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from april.config.settings import Config
from april.core.batch import Batch
from april.driver.detokenizer import Detokenizer
from april.driver.loop_thread import LoopThread
from april.driver.rollout_driver import RolloutDriver
from april.errors import ConfigError
from april.export.exporter import Exporter
from april.export.feed import Feed
from april.export.texts import chosen
from april.record.standing import standing_of
from april.watch.progress import Tell, progress_on


class Onlookers:
    """Of one scheduler; arguments as its own, which say what is wrong with them.

    The driver has them, so they do not have the scheduler: it would never be dropped while requests run.
    """

    driver: RolloutDriver
    """Set before anybody waits."""

    def __init__(
        self, config: Config, progress: Any, exporters: Sequence[Exporter], sample_texts: int,
        detokenizer: Detokenizer | None, thread: LoopThread,
    ) -> None:  # fmt: skip
        if isinstance(sample_texts, bool) or not isinstance(sample_texts, int) or sample_texts < 0:
            raise ConfigError(f"sample_texts must be a number of responses per batch, got {sample_texts!r}")
        if sample_texts and detokenizer is None:
            raise ConfigError("sample_texts: responses are shown as text; give the scheduler tokenizer=...")
        if not isinstance(exporters, Sequence) or not all(isinstance(each, Exporter) for each in exporters):
            raise ConfigError(
                "exporters must be a list of such as april.export.TensorBoard: with log(metrics, step), "
                "log_texts(texts, step) and close()"
            )
        self._thread, self._texts = thread, sample_texts
        self._feeds = [Feed(exporter, detokenizer, config.warned_after_s) for exporter in exporters]
        self._progress = progress_on(progress, self._ask) if thread.threads_wake_it else None

    def waiting(self) -> AbstractContextManager[None]:
        """Somebody waits for a batch inside."""
        return nullcontext() if self._progress is None else self._progress.shown()

    def delivered(self, batch: Batch) -> None:
        """For the exporters; on the loop, so only what takes no time."""
        if self._feeds:
            samples = chosen(batch, self._texts)
            for feed in self._feeds:
                feed.put(batch.id, batch.metrics, samples)

    def close(self) -> None:
        """Until everything is logged, for a few seconds at most."""
        for feed in self._feeds:
            feed.begin_to_close()
        for feed in self._feeds:
            feed.close()

    @property
    def ends(self) -> list[Callable[[], None]]:
        """What ends the exporters without waiting for them; none of it holds the driver."""
        return [feed.begin_to_close for feed in self._feeds]

    def _ask(self, tell: Tell) -> None:
        def look() -> None:
            driver = self.driver
            driver.local.streams.catch_up()  # tokens that have arrived and wait to be read
            tell(driver.now(), standing_of(driver.core, driver.long_waits.waited_s))

        self._thread.call_later(look)
