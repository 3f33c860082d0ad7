"""Records each event of a run in a file, with a digest of the core's decisions.

Each line is a JSON array: [time in s, kind, parts, digest of all decisions so far, checksum of all lines so far].
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
from april.core.saved_state import SavedCore
from april.core.tape import SegmentKind
from april.core.types import Chain
from april.core.versions import VersionClock
from april.record.event_values import exception_name, to_plain
from april.record.file import BATCH, CLOSED, CUT_OFF, FORMAT, HEAD, REPORT, STATE, STATUS, RecordFile, RunRecord
from april.record.run_status import run_status
from april.version import __version__

log = logging.getLogger("april")

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""Encoder that refuses NaN and infinities, because JSON has none: readers would stop at such a line."""
STATUS_EVERY_S = 5.0
"""Minimum seconds between two lines with the state of the run, which are written at events and in long waits."""


class DecisionDigest:
    """Computes a digest of all commands of the core so far; the contents of their text fields do not count."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, commands: Iterable[Command]) -> None:
        """Add commands to the digest."""
        for command in commands:
            self._hash.update(repr((type(command).__name__, to_plain(command))).encode())

    def add_error(self, error: BaseException) -> None:
        """Add to the digest that the core refused an event with this error."""
        self._hash.update(type(error).__name__.encode())

    @property
    def digest(self) -> str:
        """The digest of all commands so far, as 16 hex digits."""
        return self._hash.hexdigest()


class _RecordLines:
    """Formats lines and adds them to the file. It has no reference to the run, whose finalizer uses it."""

    def __init__(self, record: RunRecord, now: Callable[[], float]) -> None:
        self._now, self.began_s = now, now()
        self.decisions = DecisionDigest()
        self.file = RecordFile(Path(record.path), record.limit_mib << 20)

    def add(self, kind: str, parts: Callable[[], Any], commands: Iterable[Command] = ()) -> None:
        """Add a line. A failure ends the record, but not the run."""
        if self.file.ended:
            return
        try:
            self.decisions.add(commands)
            why = self.file.add(self._line(kind, parts()))
        except Exception as error:
            why = f"{kind} could not be recorded ({type(error).__name__})"
        if why:
            self.file.ended = True
            log.warning("the record %s ends here, but the run continues: %s", self.file.path, why)
            self.file.add(self._line(CUT_OFF, {"why": why}), last=True)

    def close(self) -> None:
        """Add the last line and close the file."""
        self.add(CLOSED, dict)
        self.file.close()

    def _line(self, kind: str, parts: Any) -> bytes:
        line = [round(self._now() - self.began_s, 6), kind, parts, self.decisions.digest]
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
        self._text: Callable[[str], str] = str if record.messages else exception_name
        self._lines = _RecordLines(record, now)
        head = {
            "format": FORMAT,
            "april": __version__,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": to_plain(core.settings),
            "engines": [to_plain(state.limits) for state in core.engines.states.values()],
        } | ({} if config is None else {"config": config})
        self._lines.add(HEAD, lambda: head)
        self._next_status_s = now()
        self._before: Any = None

    def before(self, event: ev.Event) -> None:
        """Remember facts that can only be read from the core's state before it handles the event."""
        self._before = None  # if reading the facts fails, after() fails on this None and ends the record
        if not self._lines.file.ended:
            with suppress(Exception):
                self._before = self._token_comparison(event) | self._request_facts(event)

    def after(self, event: ev.Event, commands: list[Command], error: BaseException | None) -> None:
        """Record an event, and the core's commands or error."""
        if error is not None:
            self._lines.decisions.add_error(error)
        self._lines.add(type(event).__name__, lambda: to_plain(event, self._text) | self._before, commands)
        self.record_status()

    def record_status(self, waited_s: float = 0.0) -> None:
        """Record the state of the run, unless it was recorded less than STATUS_EVERY_S ago.

        ``waited_s`` is the known length of the current wait in seconds.
        """
        if (now := self._now()) >= self._next_status_s:
            self._next_status_s = now + STATUS_EVERY_S
            self._lines.add(STATUS, lambda: asdict(run_status(self._core, waited_s)))

    def record_state(self, state: SavedCore) -> None:
        """Record the snapshot from which the core was restored."""
        self._lines.add(STATE, lambda: to_plain(state))

    def record_batch(self, batch: Batch) -> None:
        """Record a batch and its metrics for readers of the record; a replay ignores this line."""
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

    def record_report(self, batch_id: int, report: Mapping[str, float]) -> None:
        """Record the trainer's report on a batch, for readers of the record."""
        parts = {"id": batch_id, "report": {name: float(f"{value:.6g}") for name, value in report.items()}}
        self._lines.add(REPORT, lambda: parts)

    def close(self) -> None:
        """Record the end of the run."""
        self._lines.close()

    @property
    def end(self) -> Callable[[], None]:
        """A function like :meth:`close` that holds no reference to the run."""
        return self._lines.close

    def _token_comparison(self, event: ev.Event) -> dict[str, Any]:
        """Return how a call's tokens compare with those of its sample, because a replay has no tokens to compare."""
        if not isinstance(event, ev.CallMade) or (group := self._core.context.group(event.sample.group)) is None:
            return {}
        sample = group.samples[event.sample.index]
        parts: dict[str, Any] = {}
        chain: Chain | None = sample.chains[0]
        if event.any_chain and event.token_ids is not None:
            chain = self._core.calls.find_chain(sample, event.token_ids, event.attached)
            parts["chain"] = ev.NEW_CHAIN if chain is None else chain.number
        elif event.token_ids is not None and chain is not None:
            known = np.concatenate((chain.prompt, chain.tape.tokens))
            common = min(len(known), len(event.token_ids))
            differ = np.flatnonzero(known[:common] != event.token_ids[:common])
            parts["token_ids"] = to_plain(event.token_ids) | ({"differs_at": int(differ[0])} if len(differ) else {})
        if chain is not None and chain.replay is not None and len(chain.tape):
            eos = self._core.engines.eos_token_ids.union(event.sampling.stop_token_ids)
            parts["ends"] = int(chain.tape.tokens[-1]) in eos
        return parts

    def _request_facts(self, event: ev.Event) -> dict[str, Any]:
        """Return facts about the request that this event ends, or the token count of the sample that returns."""
        if isinstance(event, ev.SampleReturned):
            group = self._core.context.group(event.sample.group)
            return {} if group is None else {"generated": group.samples[event.sample.index].generated}
        if not isinstance(event, (ev.AttemptEnded, ev.AttemptFailed)):
            return {}
        attempt = self._core.context.attempts.get(event.attempt_id)
        request = None if attempt is None else self._requests.record_of(attempt, event.counts.tokens)
        if request is None:
            return {}
        began = round(request.began_s - self._lines.began_s, 6)
        r, evaluation = request, int(request.evaluation)
        return {"ran": [r.engine, *r.sample, evaluation, r.age, began, r.context, r.generated]}
