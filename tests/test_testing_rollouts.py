"""Rollouts on the caller's loop, the audit from outside, and what importing april.testing costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.core.tape import Segment
from april.core.versions import PolicyVersion
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import AuditError, FakeEngine, FaultScript, audit, rollouts, run_virtual
from april.testing.fault_script import STREAM_FAULTS

CONFIG = april.Config(rollout_batch_size=2, over_sampling_batch_size=4, n_samples_per_prompt=2, max_response_len=60)
LENGTHS = {(g, i): 1 + (11 * g + 7 * i) % 40 for g in range(60) for i in range(2)}


def prompts() -> list[list[int]]:
    return [[i + 1, 2] for i in range(60)]


def by_length(prompt: april.Prompt, response: Any) -> float:
    """A plain reward function, as most are."""
    return float(len(response.tokens))


def test_it_is_the_scheduler_without_its_thread() -> None:
    """The same batches, versions and ledgers as april.RolloutScheduler with the same engines, prompts and functions."""

    def facts(batches: list[Batch]) -> list[Any]:
        return [
            (s.id, s.tokens.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.reward)
            for batch in batches
            for s in sorted(batch.samples, key=lambda s: s.id)
        ]

    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=60)

    async def program() -> tuple[list[Batch], Any]:
        async with rollouts(config, engines=[FakeEngine(lengths=LENGTHS)], prompts=prompts(), reward=by_length) as run:
            for n in range(3):
                await run.next_batch()
                assert await run.weight_update() == run.version == PolicyVersion(0, n + 1)
            run.audit()
            return run.batches, run.ledger()

    batches, ledger = run_virtual(program())
    engine = FakeEngine(lengths=LENGTHS, seconds_per_token=1e-4, chunk_tokens=4)
    with april.RolloutScheduler(config, prompts=prompts(), reward=by_length, engines=[engine], check=True) as scheduler:
        real = []
        for _ in range(3):
            real.append(scheduler.next_batch())
            scheduler.weight_update()
        assert scheduler.ledger() == ledger
        found = audit(real, engine, scheduler.ledger())
    assert facts(real) == facts(batches)
    assert found.delivered == found.handed_over == sum(LENGTHS[g, i] for g in range(6) for i in range(2))


@on_virtual_time
async def test_a_plain_rollout_function_on_a_virtual_clock_is_refused() -> None:
    """It would run in a thread, which a virtual clock does not wait for: a sentence instead of time-outs."""

    def plain(prompt: april.Prompt, llm: Any) -> None:
        llm.generate()

    with pytest.raises(april.ConfigError, match=r"plain is a plain function.*make it async"):
        rollouts(CONFIG, engines=[FakeEngine()], prompts=prompts(), rollout=plain)


@on_virtual_time
async def test_an_audit_needs_fake_engines() -> None:
    """With other engines too the counts could not be complete; said so instead of a wrong verdict."""
    other = SimulatedEngine("other", DecodeCost(1.0, 0.0, 0.0), lambda request: 5, max_running=8)
    async with rollouts(CONFIG, engines=[FakeEngine(lengths=5), other], prompts=prompts(), reward=by_length) as run:
        await run.next_batch()
        with pytest.raises(april.ConfigError, match="an audit needs the records of fake engines"):
            run.audit()


# ---------------------------------------------------------------- the audit sees what it is for


def _some_batches() -> tuple[list[Batch], list[FakeEngine], Any]:
    """Three batches with partials, multi-turn, and two versions in some sample."""

    async def agent(prompt: april.Prompt, llm: april.LLM) -> None:
        first = await llm.generate()
        await llm.generate([*first.conversation.tolist(), 5, 6])

    async def program() -> tuple[list[Batch], list[FakeEngine], Any]:
        engines = [FakeEngine(f"e{i}", lengths=LENGTHS, chunk_tokens=4) for i in range(2)]
        config = april.Config(
            rollout_batch_size=2, over_sampling_batch_size=4, n_samples_per_prompt=2, max_response_len=100
        )
        async with rollouts(config, engines=engines, prompts=prompts(), reward=by_length, rollout=agent) as run:
            for _ in range(3):
                await run.next_batch()
                await run.weight_update()
            run.audit()
            return run.batches, engines, run.ledger()

    return run_virtual(program())


def _long(batch: Batch) -> Any:
    return max(batch.samples, key=lambda s: len(s.segments))


def _one_longer(segment: Segment) -> Segment:
    return structs.replace(segment, count=segment.count + 1)


def _with(batch: Batch, **changes: Any) -> Batch:
    """The batch with its most-cut sample changed."""
    old = _long(batch)
    new = tuple(replace(s, **changes) if s is old else s for s in batch.samples)
    return Batch(id=batch.id, version=batch.version, samples=new, group_sizes=batch.group_sizes, metrics=batch.metrics)


def _swapped(array: Any) -> Any:
    """Tokens 0 and 1 change places."""
    out = array.copy()
    out[[0, 1]] = out[[1, 0]]
    return out


def _newer(batch: Batch) -> Batch:
    """The first segment claims the version of the last."""
    segments = _long(batch).segments
    return _with(batch, segments=(structs.replace(segments[0], version=segments[-1].version), *segments[1:]))


def _cut(batch: Batch) -> Batch:
    """The first segment is gone."""
    sample = _long(batch)
    gone = sample.segments[0].count
    return _with(
        batch,
        tokens=sample.tokens[gone:],
        logprobs=sample.logprobs[gone:],
        loss_mask=sample.loss_mask[gone:],
        segments=tuple(structs.replace(s, start=s.start - gone) for s in sample.segments[1:]),
    )


TAMPERED: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "a token": (lambda b: _with(b, tokens=_swapped(_long(b).tokens)), "has token"),
    "a log-probability": (lambda b: _with(b, logprobs=_swapped(_long(b).logprobs)), "has log-probability"),
    "stamped at arrival": (_newer, "has version"),
    "a lost partial": (_cut, "of them are not in the delivered"),
    "a resumed prompt": (_cut, "was not asked to continue"),
    "lengths": (lambda b: _with(b, logprobs=_long(b).logprobs[1:]), "arrays of different lengths"),
    "loss on the tool": (lambda b: _with(b, loss_mask=np.ones_like(_long(b).loss_mask)), "tokens of the environment"),
    "a masked sample": (lambda b: _with(b, loss_mask=np.zeros_like(_long(b).loss_mask)), "has no loss on tokens"),
    "another sample": (lambda b: _with(b, id=april.SampleId(50, 0)), "which is not its own"),
    "a longer tail": (
        lambda b: _with(
            b,
            tokens=np.append(_long(b).tokens, np.int32(3)),
            logprobs=np.append(_long(b).logprobs, np.float32(-1)),
            loss_mask=np.append(_long(b).loss_mask, np.uint8(1)),
            segments=(*_long(b).segments[:-1], _one_longer(_long(b).segments[-1])),
        ),
        "handed over",
    ),
    "the share": (
        lambda b: Batch(
            id=b.id,
            version=b.version,
            samples=b.samples,
            group_sizes=b.group_sizes,
            metrics={**b.metrics, "off_policy_share": 0.123},
        ),
        "reports off_policy_share 0.123",
    ),
}


@pytest.mark.parametrize("what", list(TAMPERED))
def test_the_audit_catches(what: str) -> None:
    """One change in one delivered sample is found and named."""
    change, message = TAMPERED[what]
    batches, engines, _ = _some_batches()
    assert len({s.version for s in _long(batches[-1]).segments}) > 1
    with pytest.raises(AuditError, match=message) as caught:
        audit([*batches[:-1], change(batches[-1])], engines)
    assert caught.value.audit.problems


def test_the_audit_catches_double_delivery_and_wrong_books() -> None:
    """A sample in two batches; a ledger that differs by one token; a batch kept from the audit; a broken protocol."""
    batches, engines, ledger = _some_batches()
    assert audit(batches, engines).problems == ()
    with pytest.raises(AuditError, match="was delivered again, in batch 1") as caught:
        audit([*batches, batches[1]], engines)
    assert caught.value.audit.duplicated == sum(int(s.loss_mask.sum()) for s in batches[1].samples)
    ledger["tokens"].observed += 1
    with pytest.raises(AuditError, match=r"the ledger has \d+ tokens observed"):
        audit(batches, engines, ledger)
    with pytest.raises(AuditError, match=r"the ledger has \d+ tokens delivered"):
        audit(batches[:-1], engines, ledger)
    record = next(r for e in engines for r in e.attempts.values() if r.request.response_offset)
    first = next(r for e in engines for r in e.attempts_of(record.request.sample_key) if r is not record)  # type: ignore[arg-type]
    original = record.request
    record.request = structs.replace(original, sampling=first.request.sampling)
    with pytest.raises(AuditError, match="which began at another token"):
        audit(batches, engines)
    record.request = original
    engines[0].violations.append("asked for the moon")
    with pytest.raises(AuditError, match="asked for the moon"):
        audit(batches, engines)


@on_virtual_time
async def test_what_began_again_is_lost_unless_the_ledger_names_it() -> None:
    """on_stale: restart throws tokens away on purpose: without the ledger the audit calls them lost."""
    engine = FakeEngine(lengths=lambda r: 45 if r.sample_key[0] in (1, 2) else 9, chunk_tokens=4)  # type: ignore[index]
    config = april.Config(
        rollout_batch_size=1, over_sampling_batch_size=3, n_samples_per_prompt=1, max_response_len=60,
        max_staleness=1, on_stale="restart", max_in_flight=3,
    )  # fmt: skip
    async with rollouts(config, engines=[engine], prompts=prompts()[:4], reward=by_length) as run:
        for _ in range(4):
            await run.next_batch()
            await run.weight_update()
        with pytest.raises(april.DataExhausted):
            await run.next_batch()
        found = run.audit()
        assert found.lost == sum(run.ledger()["tokens"].dropped.values()) > 0
        with pytest.raises(AuditError, match="pass ledger="):
            audit(run.batches, engine)


@pytest.mark.parametrize(("group_quorum", "trained"), [(1.0, True), (0.5, True), (1.0, False)])
@on_virtual_time
async def test_what_was_loaded_can_be_audited(group_quorum: float, trained: bool) -> None:
    """A run that began with a saved state: its tokens are compared with those that it held then, its counts with
    those, and tokens of its own engines with what these handed over. Saved tokens are no older than the weights."""
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=6, max_response_len=60, over_sampling_batch_size=6,
        group_quorum=group_quorum,
    )  # fmt: skip
    options: dict[str, Any] = {"prompts": prompts(), "reward": by_length}
    lengths = {(g, i): 1 + (11 * g + 7 * i) % 40 for g in range(60) for i in range(6)}

    def fakes() -> list[FakeEngine]:
        return [FakeEngine(lengths=lengths, faults=FaultScript.random(seed=2, rate=0.1, kinds=STREAM_FAULTS))]

    async with rollouts(config, engines=fakes(), **options) as run:
        for step in range(3):
            await run.next_batch()
            run.audit()
            if trained or step < 2:
                await run.weight_update()
        state = run.state_dict(None if trained else 1)
    async with rollouts(config, engines=fakes(), **options) as run:
        version = await run.load_state_dict(state)
        for _ in range(3):
            await run.next_batch()
            run.audit()
            await run.weight_update()
        loaded = [
            (batch, sample, segment) for batch in run.batches for sample in batch.samples
            for segment in sample.segments if segment.version < version
        ]  # fmt: skip
        assert len(loaded) > 3
        _, sample, segment = loaded[0]
        sample.logprobs.flags.writeable = True
        sample.logprobs[segment.start] -= 1.0
        with pytest.raises(AuditError, match=r"has other logprobs from .* than the loaded state"):
            run.audit()


# ---------------------------------------------------------------- the package


def test_importing_it_needs_no_torch_and_no_test_runner() -> None:
    """Nor does using any of its names."""
    code = (
        "import sys, april.testing as t\n"
        "[getattr(t, name) for name in t.__all__]\n"
        "print(sorted({'torch', 'transformers', 'pytest', 'hypothesis'} & {m.split('.')[0] for m in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]"]
