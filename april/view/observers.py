"""Shows a running scheduler to people with a progress line and exporters, neither of which can hold it up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

from april.core.batch import Batch, DeliveredSample
from april.core.whole_numbers import whole_number
from april.driver.detokenizer import Detokenizer
from april.driver.loop_thread import LoopThread
from april.driver.rollout_driver import RolloutDriver
from april.driver.user_code import describe
from april.errors import ConfigError
from april.export import Exporter, choose_samples, texts_of
from april.record.run_status import run_status
from april.view.progress import StatusReceiver, progress_on

log = logging.getLogger("april")

MAX_WAITING_BATCHES = 1000
"""Largest number of batches that wait for a slow exporter; further batches are not exported."""
CLOSE_TIMEOUT_S = 10.0
"""Longest wait in seconds for an exporter when the scheduler closes."""


class Observers:
    """Holds one scheduler's progress line and exporters. Raises ConfigError for wrong arguments of the scheduler.

    This object refers to the driver and not to the scheduler; otherwise the scheduler could not be freed while requests
    run.
    """

    driver: RolloutDriver
    """The scheduler's driver; set before the first wait."""

    def __init__(
        self, progress: Any, exporters: Sequence[Exporter], sample_texts: int, detokenizer: Detokenizer | None,
        thread: LoopThread,
    ) -> None:  # fmt: skip
        if (texts := whole_number(sample_texts)) is None or texts < 0:
            raise ConfigError(f"sample_texts must be a number of responses per batch, got {sample_texts!r}")
        if texts and detokenizer is None:
            raise ConfigError("sample_texts: responses are shown as text; give the scheduler tokenizer=...")
        if not isinstance(exporters, Sequence) or not all(isinstance(each, Exporter) for each in exporters):
            raise ConfigError(
                "exporters must be a list of exporters such as april.export.TensorBoard, with log(metrics, step), "
                "log_texts(texts, step) and close()"
            )
        self._thread, self._texts = thread, texts
        self._feeds = [ExporterThread(exporter, detokenizer) for exporter in exporters]
        self._progress = progress_on(progress, self._ask) if thread.threads_wake_it else None

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context manager that shows the progress line while the trainer waits for a batch."""
        return nullcontext() if self._progress is None else self._progress.shown()

    def delivered(self, batch: Batch) -> None:
        """Queue a batch for the exporters. This runs on the event loop, so the export itself runs in other threads."""
        if self._feeds:
            samples = choose_samples(batch, self._texts)
            for feed in self._feeds:
                feed.put(batch.id, batch.metrics, samples)

    def close(self) -> None:
        """Close all exporters; wait until they have logged everything, for each at most :data:`CLOSE_TIMEOUT_S`."""
        for feed in self._feeds:
            feed.begin_to_close()
        for feed in self._feeds:
            feed.close()

    @property
    def close_functions(self) -> list[Callable[[], None]]:
        """Functions that close the exporters without waiting for them, and do not refer to the driver."""
        return [feed.begin_to_close for feed in self._feeds]

    def _ask(self, receive: StatusReceiver) -> None:
        def answer() -> None:
            driver = self.driver
            driver.executor.streams.catch_up()  # otherwise tokens that have arrived but are not read would not count
            receive(driver.now(), run_status(driver.core, driver.long_waits.waited_s))

        self._thread.call_later(answer)


class ExporterThread:
    """Runs one exporter in its own thread, so that nothing waits for it.

    An exporter that fails still gets the next batch. Only its first failure is logged as a warning.
    """

    def __init__(self, exporter: Exporter, detokenizer: Detokenizer | None) -> None:
        self._exporter, self._detokenizer = exporter, detokenizer
        self._name = type(exporter).__name__
        self._waiting: SimpleQueue[tuple[int, Mapping[str, float], Sequence[DeliveredSample]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._warned = self._waited_for = False
        self._left_out = 0

    def put(self, step: int, metrics: Mapping[str, float], samples: Sequence[DeliveredSample]) -> None:
        """Queue the metrics of a batch and the samples whose text is logged; returns at once."""
        with self._lock:
            if self._closing or self._waiting.qsize() >= MAX_WAITING_BATCHES:
                self._left_out += 1
            else:
                self._queue((step, dict(metrics), samples))  # a copy, as the trainer may change batch.metrics

    def _queue(self, item: tuple[int, Mapping[str, float], Sequence[DeliveredSample]] | None) -> None:
        """Queue a batch, or None to close. The first item starts the thread; only this thread calls the exporter."""
        self._waiting.put(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"april-{self._name}", daemon=True)
            self._thread.start()

    def begin_to_close(self) -> None:
        """Accept no more batches. The thread logs the queued batches and closes the exporter; returns at once."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._queue(None)

    def close(self) -> None:
        """Close the exporter and wait until all its batches are logged, at most :data:`CLOSE_TIMEOUT_S`."""
        self.begin_to_close()
        if self._waited_for:
            return
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("exporter %s does not end; the run ends without it", self._name)
        self._waited_for = True  # set after the wait, so that an interrupted close waits again
        if self._left_out:
            log.warning("exporter %s was too slow: %d batches did not reach it", self._name, self._left_out)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            step, metrics, samples = item
            try:
                self._exporter.log(metrics, step)
                if samples and self._detokenizer is not None:
                    self._exporter.log_texts(texts_of(samples, self._detokenizer), step)
            except BaseException as error:  # SystemExit, too, must not end april's thread
                self._failed(f"step {step}", error)
        try:
            self._exporter.close()
        except BaseException as error:
            self._failed("its end", error)

    def _failed(self, where: str, error: BaseException) -> None:
        log.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "exporter %s failed at %s, the run goes on: %s", self._name, where, describe(error),
        )  # fmt: skip
        self._warned = True
