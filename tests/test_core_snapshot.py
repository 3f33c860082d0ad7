"""Snapshots: all that is held crosses a restart, nothing settled does; a wrong state is refused in a sentence."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from core_machine import EOS, CoreMachine, asked, settings

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.ledger import DropReason
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.types import OnStale, SampleState
from april.core.versions import PolicyVersion
from april.errors import CheckpointError, InvariantError

State = dict[str, Any]


ONE = settings(n=1, samples=1, over=2)
LONG = {0: 60}
"""Group 0 is long, all others have 4 tokens."""


def running(tokens: int = 17, length: Any = LONG, **changes: Any) -> CoreMachine:
    """Group 0 has so many tokens, group 1 none."""
    m = asked(length, over=2, **changes)
    m.tokens(m.attempt(0).id, tokens)
    return m


def test_a_state_keeps_whole_responses_with_a_grammar_and_no_parts() -> None:
    """A request in flight begins again after a restart; of a whole response the state says that it had a grammar."""
    m = CoreMachine(ONE, LONG)
    m.sampling = SamplingParams(max_tokens=1000, grammar='{"json_schema": {}}')
    m.ask()
    m.finish(1)  # its batch is delivered, and not trained yet
    m.tokens(m.attempt(0).id, 17)
    again = m.restarted()
    assert dict(again.core.tokens.dropped) == {DropReason.CUT_GRAMMAR: 17}
    again.ask()
    assert again.batches[0].samples[0].constrained_mask.tolist() == [1, 1, 1, 1]
    again.check_ledger()
    again.ask()
    assert again.attempt(0).request.token_ids.tolist() == [5, 6]


def test_numbers_of_an_engine_may_be_those_of_numpy() -> None:
    """An engine object of a user counts as it likes, and its checkpoints are written all the same."""
    m = asked(LONG, (EngineLimits("a", np.int64(4096), None, (EOS,)),), over=2)  # type: ignore[arg-type]
    m.core.counters["cached_tokens"] += np.int64(7)  # type: ignore[assignment]
    state = m.saved()
    assert (state["max_context"], state["counters"]["cached_tokens"]) == (4096, 7)


@pytest.mark.parametrize("index", range(2))
def test_ids_of_the_two_processes_never_meet(index: int) -> None:
    """Attempts of a later incarnation have other ids, also when the same state is loaded twice by runs of their own."""
    m = running()
    seen = set(m.in_flight)
    for run in range(1, 3):
        again = m.restarted(run_id=run * index)
        again.ask()
        assert seen.isdisjoint(again.in_flight)
        assert {(len(i), i[:16]) for i in again.in_flight} == {(32, f"{run * index:016x}")}
        if index:
            seen |= set(again.in_flight)


# -------------------------------------------------------------------- leased batches


def one_step() -> CoreMachine:
    """Group 1 is delivered, group 0 has some tokens."""
    m = CoreMachine(ONE, LONG)
    m.step(random.Random(0))
    return m


def test_a_batch_that_is_out_is_collected_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last moment, which holds the loop, no group is left; the state is that of one moment all the same."""
    m = one_step()
    state = snapshot.take(m.core, -1)
    freezer = snapshot.Freezer(m.core, at_once=1)
    while freezer.advance():
        pass
    monkeypatch.setattr(snapshot, "_frozen", lambda group: pytest.fail(f"group {group.id} is collected at the end"))
    assert freezer.finish(-1)() == state


def test_batch_that_was_trained_is_not_delivered_again() -> None:
    """trained_through names a leased batch: it is settled, and the version is that of the update that follows it."""
    m = one_step()
    again = m.restarted(m.saved(trained_through=0))
    assert (again.core.clock.current, again.core.prompts.delivered) == (PolicyVersion(1, 1), 1)
    again.step(random.Random(0))
    assert again.batches[0].id == 1
    assert again.delivered() != m.delivered()
    (carried,) = again.batches[0].samples
    assert carried.staleness == (1 if carried.attempts > 1 else 0)


def test_trained_through_takes_what_is_held_and_refuses_the_rest() -> None:
    """Only batches that are delivered, and none before the last committed one."""
    m = CoreMachine(ONE, LONG)
    assert snapshot.take(m.core, -1)["batches"] == 0
    with pytest.raises(CheckpointError, match=r"trained_through=0 must be the id .* no batch was delivered"):
        snapshot.take(m.core, 0)
    for _ in range(3):
        m.step(random.Random(0))
    m.post(ev.BatchCommitted(1))  # the trainer may commit in any order
    with pytest.raises(InvariantError, match="committed twice"):
        m.core.handle(ev.BatchCommitted(1))
    assert [len(snapshot.take(m.core, through)["ready"]) for through in (None, 1, 2)] == [2, 1, 0]
    for through, words in ((0, "batch 1 was committed by a weight update"), (3, "=3 must"), (-2, "=-2 must")):
        with pytest.raises(CheckpointError, match=words):
            snapshot.take(m.core, through)


# -------------------------------------------------------------------- replay


@pytest.mark.parametrize("seen_by", ["nobody", "group_reward", "has_filter"])
def test_finished_sibling_is_kept_unless_somebody_must_see_what_it_returned(seen_by: str) -> None:
    """A filter and a group reward get what functions return, so these run again and are answered from the tape."""
    m = asked(lambda g, i: 4 + 50 * i, samples=2, **({} if seen_by == "nobody" else {seen_by: True}))
    m.finish((0, 0))
    again = m.restarted()
    sample = again.sample(0)
    assert (sample.state is SampleState.FINISHED) == (seen_by == "nobody")
    again.ask()
    assert again.only.sample.id == (0, 1)
    assert sample.chains[0].tape.tokens.tolist() == [10, 11, 12, EOS]


def test_group_that_reopens_after_a_restart_has_its_functions_run_again() -> None:
    """A ready group comes back finished. If a sample gets too old, a group reward needs what all of them returned."""
    m = asked(4, samples=2, over=2, group_reward=True, on_stale=OnStale.RESTART, max_staleness=1)
    m.finish((1, 0), 0)
    m.next_step()
    m.finish(2, (1, 1))  # group 1 is delivered, its first sample one update older, and not trained on
    again = m.restarted()
    assert [again.sample(1, i).state for i in range(2)] == [SampleState.FINISHED] * 2
    again.update()
    assert [len(again.sample(1, i).chains[0].tape) for i in range(2)] == [0, 4]

    again.ask()  # group 2 is there already
    again.finish_aborts()
    again.post(ev.BatchCommitted(again.batches[-1].id))
    commands = again.ask()
    assert {c.sample.id for c in commands if isinstance(c, do.StartSample)} >= {(1, 0), (1, 1)}
    assert not any(isinstance(c, do.Submit) and c.attempt.sample.id == (1, 1) for c in commands)
    again.finish((1, 0))
    again.finish_aborts()
    assert again.delivered() == [1, 1]


# -------------------------------------------------------------------- states that are refused


def saved() -> State:
    """Two partials with tokens and a batch that was not trained on."""
    m = asked({0: 60, 1: 60}, samples=2, over=3)
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 11) if attempt.sample.id.group < 2 else m.end(attempt.id)
    m.next_step()
    return m.saved()


def load(state: Any, **changes: Any) -> CoreMachine:
    return CoreMachine(settings(n=1, samples=2, over=3), 60).restarted(state, **changes)


def test_engines_with_other_log_probabilities() -> None:
    """What is held has the old kind: batches say that theirs are mixed; without held tokens they are the new ones."""
    engines = (EngineLimits("e1", 4096, None, (EOS,), "processed"),)
    for tokens, kind in ((7, "mixed"), (0, "processed")):
        assert running(tokens).restarted(engines=engines).core.engines.logprob_kind == kind


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a state, except the prompts' own data and totals that nothing depends on."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        if key not in ("data", "counters"):
            found += places(below, (*path, key))
    return found


def put(state: State, path: tuple[Any, ...], value: Any) -> None:
    """Overwrite one place; ``...`` removes it."""
    for key in path[:-1]:
        state = state[key]
    if value is ...:
        del state[path[-1]]
    else:
        state[path[-1]] = value


@pytest.mark.parametrize("damage", [..., None, "nonsense", [[1, 2, 3]], b"\x01\x02\x03", float("nan")], ids=repr)
def test_damage_anywhere_is_refused_or_harmless(damage: Any) -> None:
    """Any value removed, or of another type: one named error before anything runs, or a core that goes on. The checksum
    of a state shows changes of other kinds."""
    good = saved()
    refused = 0
    for path in places(good):
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
        put(state, path, damage)
        words = []
        try:
            m = load(state)
        except CheckpointError as error:
            words = str(error).splitlines()
        else:
            m.step(random.Random(0))
            m.core.validate()
        assert len(words) <= 1
        refused += len(words)
    assert refused > 100


def test_groups_out_of_nowhere_are_refused() -> None:
    """A group that was never drawn would be drawn again under its number."""
    with pytest.raises(CheckpointError, match="the state is damaged: ValueError: group 1 of 1"):
        load(saved() | {"groups_drawn": 1})


@pytest.mark.parametrize(("version", "segment"), [((0, 0), (7, 0)), ((0, 0), (-1, 0)), ((3, 0), (0, 0))])
def test_versions_that_never_were_are_refused(version: tuple[int, int], segment: tuple[int, int]) -> None:
    """Their age is unknown, and the core would find that in the middle of a step."""
    state = saved()
    sample = next(s for group in state["waiting"] for s in group["samples"] if s["chains"][0]["tokens"])
    sample["chains"][0]["segments"][0][2], state["version"] = list(segment), list(version)
    state["branches"], state["settings"]["on_stale"] = {}, "mask"
    with pytest.raises(CheckpointError, match="the state is damaged"):
        load(state, on_stale=OnStale.MASK)


def test_a_finished_sample_has_an_end() -> None:
    """The batch in which it is delivered says how it ended."""
    state = one_step().saved()
    state["ready"][0]["samples"][0]["finish"] = None
    with pytest.raises(CheckpointError, match=r"g1\.s0 is finished without an end"):
        one_step().restarted(state)
