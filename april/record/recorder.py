"""Records each event of the core, with a digest of the core's decisions.

A record has JSON lines: [time in s, kind, parts, digest of all decisions so far, checksum of all lines so far].
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from april.core import events as ev
from april.core.batch import Batch, rows_by_sample
from april.core.commands import Command
from april.core.event_pump import RequestLog
from april.core.rollout_core import RolloutCore
from april.core.tape import SegmentKind
from april.core.types import Chain
from april.core.versions import VersionClock
from april.record.file import BATCH, CLOSED, FORMAT, HEAD, LEARNING, OVER, STANDING, STATE, RecordFile, RunRecord
from april.record.plain import bare, plain, what_raised
from april.record.standing import standing_of
from april.version import __version__

log = logging.getLogger("april")

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Encoder that refuses NaN and infinities: JSON readers reject them, so all later lines would be lost."""
STAND_EVERY_S = 5.0
"""Smallest number of seconds between two lines on the state of the run, written at events and in long waits."""


class Decisions:
    """Running digest of the core's commands, without their texts."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, commands: Iterable[Command]) -> None:
        """Add commands to the digest."""
        for command in commands:
            self._hash.update(repr((type(command).__name__, plain(command))).encode())

    def broke(self, error: BaseException) -> None:
        """Add to the digest that the core refused an event with this error."""
        self._hash.update(type(error).__name__.encode())

    @property
    def digest(self) -> str:
        """The digest so far, as 16 hex digits."""
        return self._hash.hexdigest()


class _Lines:
    """Formats lines and adds them to the file. It does not refer to the run, so neither does :attr:`Recorder.end`."""

    def __init__(self, record: RunRecord, now: Callable[[], float]) -> None:
        self._now, self.began_s = now, now()
        self.decisions = Decisions()
        self.file = RecordFile(Path(record.path), record.limit_mib << 20)

    def add(self, what: str, parts: Callable[[], Any], commands: Iterable[Command] = ()) -> None:
        """Add a line. A failure ends the record, but not the run."""
        if self.file.over:
            return
        try:
            self.decisions.add(commands)
            why = self.file.add(self._line(what, parts()))
        except Exception as error:
            why = f"{what} could not be recorded ({type(error).__name__})"
        if why:
            self.file.over = True
            log.warning("the record %s ends here, but the run continues: %s", self.file.path, why)
            self.file.add(self._line(OVER, {"why": why}), last=True)

    def close(self) -> None:
        """Add the last line and close the file."""
        self.add(CLOSED, dict)
        self.file.close()

    def _line(self, what: str, parts: Any) -> bytes:
        line = [round(self._now() - self.began_s, 6), what, parts, self.decisions.digest]
        return _JSON.encode(line)[:-1].encode()


class Recorder:
    """Observer that records the events of one core. It must observe them before ``requests`` does.

    ``now`` is the event loop's clock; ``config`` is the run's configuration as plain JSON values. Raises ConfigError
    if the file cannot be created.
    """

    def __init__(
        self, record: RunRecord, core: RolloutCore, now: Callable[[], float], requests: RequestLog | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._core, self._now = core, now
        self._requests = requests or RequestLog(core, now)
        self._text: Callable[[str], str] = str if record.messages else what_raised
        self._lines = _Lines(record, now)
        head = {
            "format": FORMAT,
            "april": __version__,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": plain(core.settings),
            "engines": [plain(state.limits) for state in core.engines.states.values()],
        } | ({} if config is None else {"config": config})
        self._lines.add(HEAD, lambda: head)
        self._stand_at = now()
        self._before: Any = None

    def before(self, event: ev.Event) -> None:
        """Remember facts that can only be read from the core's state before it handles the event."""
        self._before = None  # after an error here, None makes after() end the record
        if not self._lines.file.over:
            with suppress(Exception):
                self._before = self._compared(event) | self._ran(event)

    def after(self, event: ev.Event, commands: list[Command], error: BaseException | None) -> None:
        """Record an event, and the core's commands or error."""
        if error is not None:
            self._lines.decisions.broke(error)
        self._lines.add(type(event).__name__, lambda: plain(event, self._text) | self._before, commands)
        self.stand()

    def stand(self, waited_s: float = 0.0) -> None:
        """Record the state of the run unless that was done lately. ``waited_s``: known length of the current wait."""
        if (now := self._now()) >= self._stand_at:
            self._stand_at = now + STAND_EVERY_S
            self._lines.add(STANDING, lambda: asdict(standing_of(self._core, waited_s)))

    def restored(self, state: Any) -> None:
        """Record the snapshot from which the core was restored."""
        self._lines.add(STATE, lambda: bare(state))

    def delivered(self, batch: Batch) -> None:
        """Record a batch and its metrics for readers of the record. A replay ignores them and makes its own."""
        ages: Counter[int] = Counter()
        clock = VersionClock(batch.trained_at, dict(batch.branches))
        for sample in batch.samples:
            for segment in sample.segments:
                if segment.kind is SegmentKind.GENERATED:
                    ages[clock.staleness(segment.version)] += segment.count
        parts = {
            "id": batch.id,
            "metrics": {name: round(value, 6) for name, value in batch.metrics.items()},
            "lengths": [sum(len(row.tokens) for row in rows) for rows in rows_by_sample(batch.samples)],
            "ages": ages,
            "bottleneck": batch.bottleneck,
        }
        self._lines.add(BATCH, lambda: parts)

    def learning(self, batch_id: int, report: Mapping[str, float]) -> None:
        """Record the trainer's report on a batch, for readers of the record."""
        parts = {"id": batch_id, "report": {name: float(f"{value:.6g}") for name, value in report.items()}}
        self._lines.add(LEARNING, lambda: parts)

    def close(self) -> None:
        """Record the end of the run."""
        self._lines.close()

    @property
    def end(self) -> Callable[[], None]:
        """A function like :meth:`close` that holds no reference to the run."""
        return self._lines.close

    def _compared(self, event: ev.Event) -> dict[str, Any]:
        """Return the results of the core's comparison between a call's tokens and the sample's, for a replay."""
        if not isinstance(event, ev.CallMade) or (group := self._core.context.group(event.sample.group)) is None:
            return {}
        sample = group.samples[event.sample.index]
        parts: dict[str, Any] = {}
        chain: Chain | None = sample.chains[0]
        if event.any_chain and event.token_ids is not None:
            chain = self._core.calls.find_chain(sample, event.token_ids, event.attached)
            parts["chain"] = ev.NEW_CHAIN if chain is None else chain.number
        elif event.token_ids is not None and chain is not None:
            have = np.concatenate((chain.prompt, chain.tape.tokens))
            both = min(len(have), len(event.token_ids))
            differ = np.flatnonzero(have[:both] != event.token_ids[:both])
            parts["token_ids"] = plain(event.token_ids) | ({"differs_at": int(differ[0])} if len(differ) else {})
        if chain is not None and chain.replay is not None and len(chain.tape):
            eos = self._core.engines.eos_token_ids.union(event.sampling.stop_token_ids)
            parts["ends"] = int(chain.tape.tokens[-1]) in eos
        return parts

    def _ran(self, event: ev.Event) -> dict[str, Any]:
        """Return facts on the request that this event ends, or the tokens generated for a function that returns."""
        if isinstance(event, ev.SampleReturned):
            group = self._core.context.group(event.sample.group)
            return {} if group is None else {"generated": group.samples[event.sample.index].generated}
        if not isinstance(event, (ev.AttemptEnded, ev.AttemptFailed)):
            return {}
        attempt = self._core.context.attempts.get(event.attempt_id)
        ran = None if attempt is None else self._requests.record_of(attempt, event.counts.tokens)
        if ran is None:
            return {}
        began = round(ran.began_s - self._lines.began_s, 6)
        return {"ran": [ran.engine, *ran.sample, int(ran.evaluation), ran.age, began, ran.context, ran.generated]}
