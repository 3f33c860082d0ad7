"""One scheduler for several ranks: shares, calls of all, errors of one. Ranks are threads with sockets between them."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from rank_threads import CONFIG, beside, drain, engine, names_of, raised, reward, run_ranks

import april
from april.engines.simulated.engine import SimulatedEngine
from april.processes.rank_scheduler import RankScheduler

# ---------------------------------------------------------------- the same face


def test_it_has_the_face_of_the_rollout_scheduler() -> None:
    """Every public method with the same arguments, and every property; beside them only ``ranks``."""
    for name, theirs in vars(april.RolloutScheduler).items():
        if name.startswith("_") and name not in ("__enter__", "__exit__", "__aenter__", "__aexit__"):
            continue
        ours = inspect.getattr_static(RankScheduler, name)
        assert type(ours) is type(theirs), name
        if isinstance(theirs, property):
            continue
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs), name
        shapes = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (ours, theirs)
        ]
        assert shapes[0] == shapes[1], name
    assert {n for n in dir(RankScheduler) if n[0] != "_"} == {n for n in dir(april.RolloutScheduler) if n[0] != "_"}


def shown(*weights: float) -> SimulatedEngine:
    """An engine that shows these weights."""
    made = engine()
    made.weight_sample = lambda: np.array(weights, np.float32)  # type: ignore[attr-defined]
    return made


def test_ranks_that_generate_from_other_weights_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Each rank that has a model compares it with rank 0's at a weight update, and warns once."""

    def program(rollouts: RankScheduler, rank: int) -> None:
        for _ in range(2):
            rollouts.next_batch()
            rollouts.weight_update(transfer=lambda: None)

    run_ranks(program, 3, engines=lambda rank: [shown(1.0, 2.0)])
    run_ranks(program, 3, engines=lambda rank: None if rank else [shown(1.0, 2.0)])
    assert caplog.messages == []
    run_ranks(program, 3, engines=lambda rank: [shown(1.0, 2.5 if rank == 2 else 2.0)])
    (said,) = caplog.messages
    assert said.startswith(
        "rank 2 does not generate from the weights of rank 0 (largest difference of 2 values: 0.5), so its log-prob"
    )
    run_ranks(program, 2, engines=lambda rank: [shown(*[1.0] * (1 + rank))])
    assert caplog.messages[1].startswith("rank 1 does not generate from the weights of rank 0 (another model), so")


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_response_goes_to_one_rank(world_size: int) -> None:
    """Over all ranks: each sample once, the advantages of whole groups, the same metrics, the end at the same call."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        return drain(rollouts), rollouts.version, rollouts.ledger()

    outcomes = run_ranks(program, world_size)
    ((batches, end), version, ledger), *_ = outcomes
    assert len(batches) == 4
    for (theirs, words), its_version, its_ledger in outcomes:
        assert (len(theirs), words, its_version, its_ledger) == (4, end, version, ledger)
        assert [b.metrics for b in theirs] == [b.metrics for b in batches]
    for step in range(4):
        shares = [outcome[0][0][step] for outcome in outcomes]
        everything = [name for share in shares for name in names_of(share)]
        assert sorted(everything) == [(2 * step + g, i) for g in range(2) for i in range(3)]
        assert [(s.share.rank, s.share.ranks, s.share.samples) for s in shares] == [
            (r, world_size, 6) for r in range(world_size)
        ]
        for share in shares:
            expected = [sample.reward - np.mean([r for _, r in sample.cohort]) for sample in share.samples]
            np.testing.assert_allclose(share.advantages("dr_grpo"), expected, atol=1e-6)
            assert share.padded()["response_ids"].flags.writeable
    assert version == (0, 4)
    assert ledger["prompts"].delivered == 8


def test_what_travels_is_what_was_delivered() -> None:
    """A rank whose data_rank is that of rank 0 has the same share: all fields, arrays and prompts are equal."""

    def program(rollouts: RankScheduler, rank: int) -> april.Batch:
        return rollouts.next_batch()

    prompts = [{"token_ids": [5 + i], "answer": {"of": [i, None, 2.5, "x", b"y"]}} for i in range(4)]
    own, same, other = run_ranks(program, 3, data={0: 0, 1: 0, 2: 1}, prompts=prompts)
    assert names_of(own) == names_of(same) != names_of(other)
    for mine, theirs in zip(own.samples, same.samples, strict=True):
        for name in ("tokens", "logprobs", "loss_mask"):
            there = getattr(theirs, name)
            assert (there.tolist(), there.dtype) == (getattr(mine, name).tolist(), getattr(mine, name).dtype)
        assert mine.prompt.token_ids.tolist() == theirs.prompt.token_ids.tolist()
        assert mine.prompt.data == theirs.prompt.data
        for name in ("id", "segments", "staleness", "reward", "cohort", "finish", "attempts", "resumes"):
            assert getattr(mine, name) == getattr(theirs, name), name
            assert type(getattr(mine, name)) is type(getattr(theirs, name)), name
    for name in ("id", "version", "group_sizes", "metrics", "logprob_kind", "bottleneck", "branches", "share"):
        assert getattr(own, name) == getattr(same, name), name
    assert own.token_ages.tolist() == same.token_ages.tolist()
    assert other.share == april.core.batch.BatchShare(1, 2, 6, own.share.loss_tokens)


def test_more_ranks_than_samples() -> None:
    """Shares of nobody are empty, and work; balanced by tokens, too."""
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=9)

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batch = rollouts.next_batch()
        return len(batch), batch.padded()["response_ids"].shape[0], batch.advantages().shape, batch.token_ages.dtype

    outcomes = run_ranks(program, 3, config=config, split_by="tokens")
    assert sorted(outcomes) == [(0, 0, (0,), np.int32), *[(1, 1, (1,), np.int32)] * 2]


def test_a_rank_alone_is_a_rollout_scheduler() -> None:
    """Without other ranks nothing listens, and data may be anything; a loop over it ends with the data."""
    unplain = [{"token_ids": [3], "set": {1, 2}} for _ in range(2)]
    (((batch,)),) = run_ranks(lambda rollouts, rank: list(rollouts), 1, prompts=unplain)
    assert len(batch) == 6
    assert batch.samples[0].prompt.data == {"set": {1, 2}}


# ---------------------------------------------------------------- calls of all


def test_a_pause_and_the_number_of_a_version_are_every_ranks() -> None:
    """Between pause and resume no rank waits for a batch; a weight update there names the version, on all."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        first = rollouts.next_batch()
        rollouts.pause()
        rollouts.pause()
        with pytest.raises(april.RolloutError, match=r"call resume\(\) first"):
            rollouts.next_batch()
        versions = [rollouts.weight_update(transfer=lambda: None, label=7), rollouts.version]
        rollouts.resume()
        then = rollouts.next_batch()
        with pytest.raises(april.RankError, match="label=8"):
            rollouts.weight_update(transfer=lambda: None, label=8 + rank)
        return versions, [first.id, then.id]

    assert run_ranks(program) == [([(0, 7)] * 2, [0, 1])] * 2


def test_transfers_run_on_every_rank_while_the_engines_are_paused() -> None:
    """In each trainer's thread, at the same time: they may wait for each other."""
    together = threading.Barrier(3, timeout=30)
    threads = {}

    def program(rollouts: RankScheduler, rank: int) -> Any:
        def transfer() -> None:
            together.wait()
            threads[rank] = threading.current_thread()
            with pytest.raises(april.RolloutError, match="cannot be called inside"):
                rollouts.next_batch()

        batch = rollouts.next_batch()
        version = rollouts.weight_update(transfer=transfer, trained=batch.id)
        assert threads[rank] is threading.current_thread()
        return version

    assert run_ranks(program, 3) == [(0, 1)] * 3


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_transfer_that_raises_on_one_rank(culprit: int) -> None:
    """There its own error comes out, on the others a RankError that names it; the version stays, and all go on."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        def transfer() -> None:
            if rank == culprit:
                raise OSError("caf\udce9")  # as names of files may have it

        batch = rollouts.next_batch()
        with pytest.raises(OSError if rank == culprit else april.RankError) as caught:
            rollouts.weight_update(transfer=transfer, trained=batch.id)
        assert rank == culprit or caught.value.ranks == (culprit,)
        before = rollouts.version
        after = rollouts.weight_update(transfer=lambda: None, trained=batch.id)
        return str(caught.value), before, after

    outcomes = run_ranks(program, 3)
    sentence = f"the transfer of rank {culprit} raised OSError: caf\\udce9"
    assert outcomes == [("caf\udce9" if r == culprit else sentence, (0, 0), (0, 1)) for r in range(3)]


def test_evaluations_are_whole_on_every_rank() -> None:
    """Prompts are those of rank 0; the texts are those of each rank's own tokenizer."""

    class Tokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return "-".join(map(str, ids))

    def program(rollouts: RankScheduler, rank: int) -> april.EvaluationResult:
        return rollouts.evaluate([[1, 2], [3]] if rank == 0 else None, n_samples=2, seed=3)  # type: ignore[arg-type]

    first, second = run_ranks(program, tokenizer=Tokenizer())
    assert first.rewards.tolist() == second.rewards.tolist()
    assert first.rewards.shape == (2, 2)
    for mine, theirs in zip(sum(first.responses, ()), sum(second.responses, ()), strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.text(special_tokens=True) == theirs.text(special_tokens=True) != ""
        assert (mine.sample_id, mine.finish, mine.output) == (theirs.sample_id, theirs.finish, theirs.output)


def test_the_small_calls() -> None:
    """commit, lower_staleness and extend on all; story and validate for whoever asks; errors keep their types."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batch = rollouts.next_batch()
        rollouts.commit(batch.id)
        bound = rollouts.lower_staleness(3)
        with pytest.raises(april.ConfigError, match="there is no batch 7; the batches so far are 0 to 0"):
            rollouts.commit(7)
        rollouts.extend([[9, 9]] * 2)
        rollouts.validate()
        with pytest.raises(april.ConfigError, match="there is no batch 7"):
            rollouts.weight_update(trained=7, transfer=lambda: None)
        rest, _ = drain(rollouts)
        return bound, rollouts.story(0, 1), len(rest), len(rollouts.engines), repr(rollouts)

    (bound, story, rest, engines, words), other = run_ranks(program, timeouts={"rank_timeout_s": 10.0})
    assert other == (3, story, 4, 0, "<RankScheduler rank 1 of 2>")
    assert (bound, rest, engines) == (3, 4, 1)
    assert "leased in batch 0" in story
    assert words.startswith("<RankScheduler rank 0 of 2 <RolloutScheduler ")


def test_every_rank_sees_the_groups_that_are_held() -> None:
    """The third of N' = 3 groups, whichever it is, waits for the next batch."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batch = rollouts.next_batch()
        return rollouts.held_groups(), {s.id.group for s in batch.samples}

    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=3, over_sampling_batch_size=3, max_response_len=9)
    (held, mine), (same, others) = run_ranks(program, config=config)
    assert held == same == set(range(3)) - mine - others
    assert len(held) == 1


def test_a_state_of_two_ranks_goes_on_on_three() -> None:
    """Whole on whoever asks; loaded from rank 0's, on any number of ranks: every prompt is trained once."""

    def first(rollouts: RankScheduler, rank: int) -> Any:
        batches = [rollouts.next_batch() for _ in range(2)]
        rollouts.weight_update(trained=0)
        return batches, rollouts.state_dict()

    def second(rollouts: RankScheduler, rank: int) -> Any:
        version = rollouts.load_state_dict(state if rank == 0 else {}, transfer=lambda: None)
        return drain(rollouts)[0], version

    (before, state), (other, same) = run_ranks(first)
    assert state == same
    outcomes = run_ranks(second, 3)
    assert {version for _, version in outcomes} == {(1, 1)}
    trained = [names_of(before[0]), names_of(other[0]), *(names_of(b) for batches, _ in outcomes for b in batches)]
    assert sorted(name for names in trained for name in names) == [(g, i) for g in range(8) for i in range(3)]


def test_the_async_face() -> None:
    """The same calls in threads; one that is cancelled is taken up by the next one."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        async def main() -> Any:
            if rank == 1:
                asked = asyncio.ensure_future(rollouts.anext_batch())
                await asyncio.sleep(0)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            first = await rollouts.anext_batch()
            version = await rollouts.aweight_update(transfer=lambda: None, trained=first.id)
            found = await rollouts.aevaluate([[1]])
            second = await rollouts.anext_batch()
            return first.id, version, found.reward_mean, second.id

        return asyncio.run(main())

    first, second = run_ranks(program)
    assert first == second
    assert (first[0], first[1], first[3]) == (0, (0, 1), 1)


def test_by_hand_one_scheduler_after_the_other() -> None:
    """One address and token for all: a rank that is early for the next scheduler waits for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"address": f"127.0.0.1:{free.getsockname()[1]}", "token": april.new_token()}
    closed = threading.Event()

    def live(rank: int) -> list[int]:
        ranks = april.Ranks(rank=rank, world_size=2, rank_timeout_s=20.0, **place)
        seen = []
        for _ in range(2):
            options = {"prompts": [[1], [2]], "engines": [engine()], "reward": reward} if rank == 0 else {}
            with RankScheduler(CONFIG, ranks=ranks, **options) as rollouts:
                seen.append(len(rollouts.next_batch()))
                if rank == 0:
                    closed.wait(20)
            if rank == 1:
                closed.set()
        return seen

    assert beside(partial(live, 0), partial(live, 1)) == [[3, 3]] * 2


# ---------------------------------------------------------------- weights that are spread over the ranks


class ShardedEngine(SimulatedEngine):
    """Generates while the weights are whole; putting them together takes all ranks at the same time."""

    def __init__(self, together: threading.Barrier, fails: bool = False) -> None:
        vars(self).update(vars(engine()))
        self._together, self._fails = together, fails
        self.whole = False
        self.requests = 0
        self.threads: list[threading.Thread] = []

    @property
    def capabilities(self) -> april.Capabilities:
        return replace(super().capabilities, gathers_weights=True, shares_weights=True)

    async def quiet(self) -> None:
        """Nothing computes beside the loop."""

    def generate(self, request: april.Request) -> Any:
        assert self.whole
        self.requests += 1
        return super().generate(request)

    def gather(self) -> None:
        if self._fails:
            raise ZeroDivisionError("no memory")
        self._together.wait()
        self.whole = True
        self.threads.append(threading.current_thread())

    def release(self) -> None:
        self.whole = False


def test_weights_are_gathered_on_all_ranks_around_generation() -> None:
    """In the trainers' threads, for batches and evaluations; released before the trainers go on, after errors, too."""
    engines = [ShardedEngine(threading.Barrier(2, timeout=15)) for _ in range(2)]
    engines[1]._together = engines[0]._together

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batches, _ = drain(rollouts)
        assert not engines[rank].whole
        rollouts.evaluate([[1]])
        assert not engines[rank].whole
        assert rollouts.engines == [engines[rank]]
        assert set(engines[rank].threads) == {threading.current_thread()}
        return len(batches), len(engines[rank].threads)

    assert run_ranks(program, engines=lambda rank: [engines[rank]]) == [(4, 6)] * 2
    assert all(engine.requests for engine in engines)  # each rank has generated
    assert sum(engine.requests for engine in engines) >= 25


def test_weights_that_cannot_be_gathered() -> None:
    """One rank fails: all are told. One rank has no model: refused at the construction, on all."""
    engines = [ShardedEngine(threading.Barrier(1), fails=rank == 1) for rank in range(2)]
    first, second = run_ranks(lambda rollouts, rank: rollouts.next_batch(), engines=lambda rank: [engines[rank]])
    assert str(raised(first)) == "the gathering of the weights of rank 1 raised ZeroDivisionError: no memory"
    assert isinstance(second, ZeroDivisionError)
    assert not engines[0].whole

    first, second = run_ranks(lambda rollouts, rank: None, engines=lambda rank: None if rank else [engines[0]])
    assert "the joining of rank 1 raised the parameters of rank 0's model are sharded" in str(raised(first))
    assert type(second) is april.ConfigError
