"""The feed of one exporter: a thread of its own, so that nothing waits for it and nothing ends by it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from april.core.batch import DeliveredSample
from april.driver.detokenizer import Detokenizer
from april.driver.long_waits import WARN_AFTER_S
from april.driver.user_code import describe
from april.export.exporter import Exporter
from april.export.texts import texts_of

log = logging.getLogger("april")

MOST_WAITING = 1000
"""Batches that wait for an exporter that hangs; more are left out."""
CLOSE_PATIENCE_S = 10.0
"""How long the end waits for an exporter."""


class Feed:
    """Hands what is delivered to one exporter; of its failures the first is warned of, and it gets the next batch."""

    def __init__(
        self, exporter: Exporter, detokenizer: Detokenizer | None, warn_after_s: float = WARN_AFTER_S
    ) -> None:
        self._exporter, self._detokenizer, self._warn_after_s = exporter, detokenizer, warn_after_s
        self._name = type(exporter).__name__
        self._waiting: deque[tuple[int, Mapping[str, float], Sequence[DeliveredSample]]] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = self._warned = self._waited_for = self._slow = False
        self._left_out = 0
        self._busy: tuple[int, float] | None = None
        """Step that the exporter is at, and since when."""

    def put(self, step: int, metrics: Mapping[str, float], samples: Sequence[DeliveredSample]) -> None:
        """A batch, and the responses of it that are to be shown; does not wait."""
        self._warn_if_slow()
        with self._news:
            if self._closing or len(self._waiting) >= MOST_WAITING:
                self._left_out += 1
                return
            self._waiting.append((step, dict(metrics), samples))  # its own: the trainer may write into the batch's
            self._news.notify()
            self._begin()

    def _warn_if_slow(self) -> None:
        """Once: what hangs gets nothing more, and the batches that wait for it have an end."""
        busy = self._busy
        if busy is None or self._slow or (took := time.monotonic() - busy[1]) < self._warn_after_s:
            return
        self._slow = True
        log.warning(
            "exporter %s has been at work on step %d for %.0f s; %d batches wait for it, and no more than %d can",
            self._name, busy[0], took, len(self._waiting) + 1, MOST_WAITING,
        )  # fmt: skip

    def begin_to_close(self) -> None:
        """Nothing more comes: what waits is still logged, and then the exporter is closed; does not wait."""
        with self._news:
            self._closing = True
            self._news.notify()
            self._begin()

    def close(self) -> None:
        """Until all that came is logged and the exporter is closed, for a few seconds at most."""
        self.begin_to_close()
        if self._waited_for:
            return
        if self._thread is not None:
            self._thread.join(CLOSE_PATIENCE_S)
            if self._thread.is_alive():
                log.warning("exporter %s does not end and is left behind", self._name)
        self._waited_for = True  # not before: an interrupted wait is made again
        if self._left_out:
            log.warning("exporter %s was too slow: it has not got %d batches", self._name, self._left_out)

    def _begin(self) -> None:
        """The thread is there, which alone uses the exporter."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"april-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closing:
                    self._news.wait()
                if not self._waiting:
                    break
                step, metrics, samples = self._waiting.popleft()
            self._busy = step, time.monotonic()
            try:
                self._exporter.log(metrics, step)
                if samples and self._detokenizer is not None:
                    self._exporter.log_texts(texts_of(samples, self._detokenizer), step)
            except BaseException as error:  # SystemExit too: the thread is april's, and the next batch comes
                self._failed(f"step {step}", error)
            self._busy = None
        self._close()

    def _close(self) -> None:
        try:
            self._exporter.close()
        except BaseException as error:
            self._failed("its end", error)

    def _failed(self, what: str, error: BaseException) -> None:
        log.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "exporter %s failed at %s, the run goes on: %s", self._name, what, describe(error),
        )  # fmt: skip
        self._warned = True
