"""Replays the record of a run: feeds the recorded events to a new scheduler core, which must decide as in the run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.core import events as ev
from april.core import snapshot
from april.core.commands import Command, Deliver
from april.core.rollout_core import RolloutCore
from april.core.run_times import RunTimes, bottleneck_of
from april.core.saved_state import SavedCore
from april.core.settings import CoreSettings, EngineLimits
from april.core.tape import AttemptTape
from april.errors import CheckpointError, InvariantError, RecordError
from april.record.event_values import blank_extras, from_plain
from april.record.file import (
    BATCH,
    CLOSED,
    CUT_OFF,
    NO_LAST_LINE,
    REPORT,
    STATE,
    STATUS,
    end_text,
    lines_of,
    refuse_other_formats,
)  # fmt: skip
from april.record.recorder import DecisionDigest
from april.version import __version__

EventObserver = Callable[[float, ev.Event, list[Command]], object]
END = 1
"""Token id that ends a response in a replay. All other tokens are 0, as a record holds no tokens."""
SAMPLES_PER_CHECK = 256
"""Up to this number of held samples, the core is checked after every event; with k times as many, after every k-th."""
_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in ev.Event.__subclasses__()}
_LINE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)
"""Errors that a line with impossible contents can raise."""


@dataclass(kw_only=True)
class Replay:
    """The result of a replay: the core in its last state, and counts."""

    head: dict[str, Any]
    core: RolloutCore
    times: RunTimes
    steps: list[dict[str, float]] = field(default_factory=list)
    """Time metrics of each batch; see :class:`april.core.run_times.RunTimes`."""
    decisions: DecisionDigest = field(default_factory=DecisionDigest)
    events: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    unchecked: int = 0
    seconds: float = 0.0
    end: str = NO_LAST_LINE
    """Text that says how the record ends."""

    def rows(self) -> dict[str, str]:
        """Return a summary for people, as {heading: text}."""
        count, core = sum(self.events.values()), self.core
        ledgers = {"tokens": core.tokens.as_dict(), "prompts": core.prompts.as_dict()}
        return {
            "recorded": f"{self.head.get('began')}, april {self.head.get('april')}, {self.seconds:.1f} s",
            "events": (
                f"{count}, with the same decisions as in the run; ledgers and indices checked {self.checks} times"
            ),
            "steps": f"{self.events['StepRequested']} requested, {core.context.batches} batches delivered",
            "time": bottleneck_of(self.steps, core.settings) or "none before a batch",
            "version": str(core.clock.current),
            **{name: ", ".join(f"{key} {value}" for key, value in of.items()) for name, of in ledgers.items()},
            "digest": self.decisions.digest,
            "ends": self.end,
        }


def replay(path: Path, *, whole_story: bool = False, watch: EventObserver | None = None) -> Replay:
    """Replay a record through a new core, and check the core's ledgers and indices on the way.

    Args:
        path: path of the record.
        whole_story: whether the core keeps the whole log of its transitions; otherwise it keeps only the latest part.
        watch: function that is called with the time of each event in seconds, the event and the core's commands.

    Raises:
        RecordError: the file is not a record or was changed, or the core decides differently than in the run; the
            message names the line.
    """
    lines = lines_of(path)
    head = next(lines).fields
    refuse_other_formats(path, head)
    try:
        engines = _with_end_token([from_plain(parts, EngineLimits) for parts in head["engines"]])
        core = RolloutCore(from_plain(head["settings"], CoreSettings), engines)
        run = Replay(head=head, core=core, times=RunTimes(core))
    except _LINE_ERRORS as error:
        raise RecordError(f"line 1 of {path}: {error}") from None
    if whole_story:
        run.core.context.log = deque()
    for number, time_s, what, parts, digest in lines:
        run.end = end_text(what, parts) or run.end
        if what == CUT_OFF:
            break
        where, broke = f"line {number} of {path} ({what}, at {time_s:g} s)", ""
        try:
            _replay_line(run, time_s, what, parts, watch)
        except InvariantError as error:
            run.decisions.add_error(error)
            broke = str(error)
        except (*_LINE_ERRORS, CheckpointError) as error:
            raise RecordError(f"{where} is not valid: {type(error).__name__}: {error}") from None
        run.seconds = time_s
        if run.decisions.digest != digest:
            why = broke or "the core decides differently than in the run"
            raise RecordError(f"{where}: {why} (recorded by april {head.get('april')}, replayed by {__version__})")
        if broke:
            run.end = f"the run broke in line {number}: {broke}"
            break
    return run


def _replay_line(run: Replay, time_s: float, kind: str, fields: Any, watch: EventObserver | None) -> None:
    core = run.core
    if kind in (BATCH, STATUS, REPORT):  # for readers of the record; a replay does not need these lines
        return
    if kind == CLOSED:
        core.validate()
        return
    if kind == STATE:
        snapshot.restore(core, from_plain(fields, SavedCore))
        return
    run.events[kind] += 1
    for for_readers in ("ran", "generated"):
        fields.pop(for_readers, None)
    ends = fields.pop("ends", False)
    event = from_plain(fields, _EVENTS[kind])
    if isinstance(event, ev.EnginesJoined):
        event = msgspec.structs.replace(event, engines=_with_end_token(event.engines))
    tokens, tape = np.zeros(1, np.int32), None
    if isinstance(event, (ev.AttemptEnded, ev.AttemptFailed)):
        attempt = core.context.attempts.get(event.attempt_id)
        parsed = AttemptTape() if attempt is None else attempt.tape
        for version, count in event.counts.spans:
            parsed.append(np.zeros(count, np.int32), np.zeros(count, np.float32), version)
        if attempt is not None and parsed.count:
            parsed.extras = blank_extras(attempt.request.extras, attempt.request.rows_wanted(parsed.count))
    elif isinstance(event, ev.CallMade) and (group := core.context.group(event.sample.group)) is not None:
        chains = group.samples[event.sample.index].chains
        chain = next((c for c in chains if c.number == (event.chain or 0)), None)
        if chain is not None and event.chain is not None and event.token_ids is not None:
            known = chain.conversation(len(chain.tape))[: len(event.token_ids)]
            event.token_ids[: len(known)] = known
        if ends and chain is not None:
            tape, asked, end = chain.tape, event.token_ids, len(chain.prompt) + len(chain.tape) - 1
            tape.tokens = tokens = np.require(tape.tokens, requirements="W")  # joined chunks are read-only
            if asked is not None and end < len(asked):
                asked[end] = 0 if asked[end] else END  # equals the tape's last token, END, only if it did in the run
    last = len(tokens) - 1
    tokens[last] = END  # only for this event: later calls repeat the tape's tokens as 0, and the core compares them
    commands = core.handle(event)
    run.steps += [run.times.delivered(time_s) for command in commands if isinstance(command, Deliver)]
    run.times.update(time_s)
    tokens[last] = 0
    if tape is not None:  # the tape's array may have been replaced as it grew
        tape.tokens = np.require(tape.tokens, requirements="W")
        tape.tokens[last : last + 1] = 0
    run.unchecked += 1
    if run.unchecked * SAMPLES_PER_CHECK >= len(core.buffer) * core.settings.n_samples_per_prompt:
        core.validate()
        run.checks, run.unchecked = run.checks + 1, 0
    run.decisions.add(commands)
    if watch is not None:
        watch(time_s, event, commands)


def _with_end_token(engines: Iterable[EngineLimits]) -> list[EngineLimits]:
    """Return copies of the engines with :data:`END` as their only end-of-sequence token."""
    return [replace(engine, eos_token_ids=(END,)) for engine in engines]
