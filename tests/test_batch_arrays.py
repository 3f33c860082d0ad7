"""A batch's arrays, ragged and padded, in numpy and in torch; and its shares, which say what the whole batch says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from several_rows import delivered
from tiny_models import tiny_model

import april
from april.core.batch import Batch, DeliveredSample, deliver_sample
from april.core.tape import AttemptTape, Segment, SegmentKind
from april.core.types import FinishReason, Group, Prompt
from april.core.versions import PolicyVersion, VersionClock
from april.corrections.loss_weights import BatchShare

Rows = list[tuple[int, list[tuple[int, int]]]]
"""Per sample: prompt length, and its segments (tokens, version n); n of 0 has incarnation 0, others 1."""

BOTH = {
    "logprobs": np.float32, "loss_mask": np.uint8, "kept_mask": np.uint8, "constrained_mask": np.uint8,
    "temperatures": np.float32, "version_n": np.int32, "version_incarnation": np.int32,
}  # fmt: skip
PER_SAMPLE = {"sample_numbers": np.int32, "rewards": np.float32, "group_ids": np.int64, "staleness": np.int32}


def make_batch(rows: Rows, max_staleness: int | None = None) -> Batch:
    """One group of one sample per row; tokens count up from 1 through the whole batch, so each is recognisable."""
    clock = VersionClock()
    clock.restart(0)
    for _ in range(9):
        clock.advance()
    token, samples = 1, []
    for number, (prompt_len, segments) in enumerate(rows):
        group = Group(100 + number, Prompt(np.arange(token, token + prompt_len, dtype=np.int32)), 1)
        token += prompt_len
        sample = group.samples[0]
        for count, n in segments:
            tape = AttemptTape()
            ids = np.arange(token, token + count, dtype=np.int32)
            tape.append(ids, -ids.astype(np.float32), PolicyVersion(int(n > 0), n))
            sample.chains[0].tape.add_attempt(tape, f"a{token}", "e0", 1.0)
            token += count
        sample.finish, sample.reward = FinishReason.STOP, number / 2
        samples += deliver_sample(sample, clock.staleness, max_staleness)
    return Batch(
        id=0,
        version=clock.current,
        samples=tuple(samples),
        group_sizes=(1,) * len(samples),
        metrics={"off_policy_share": 0.0},
    )


segments = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=3).map(
    lambda s: sorted(s, key=lambda item: item[1])
)
batches = st.lists(st.tuples(st.integers(1, 6), segments), max_size=5).map(lambda rows: make_batch(rows, 4))


@settings(max_examples=150, deadline=None)
@given(batches, st.booleans())
def test_ragged_and_padded_hold_the_same_tokens(batch: Batch, left: bool) -> None:
    """Row by row, both give exactly what the samples have; the padding holds pad_id, zeros and version -1."""
    flat, wide = batch.ragged(), batch.padded(pad_id=-7, left_pad_prompts=left)
    assert len(flat["prompt_offsets"]) == len(flat["response_offsets"]) == len(batch) + 1
    for i, sample in enumerate(batch.samples):
        prompt = flat["prompt_ids"][flat["prompt_offsets"][i] : flat["prompt_offsets"][i + 1]]
        row = slice(flat["response_offsets"][i], flat["response_offsets"][i + 1])
        mask = wide["response_mask"][i].astype(bool)
        assert prompt.tolist() == sample.prompt.token_ids.tolist()
        assert wide["prompt_ids"][i][wide["prompt_mask"][i] == 1].tolist() == prompt.tolist()
        assert flat["response_ids"][row].tolist() == sample.tokens.tolist()
        assert wide["response_ids"][i][mask].tolist() == sample.tokens.tolist()
        assert mask.tolist() == sorted(mask, reverse=True)
        whole = [*prompt, *sample.tokens]
        assert wide["input_ids"][i][wide["attention_mask"][i] == 1].tolist() == whole
        for name in BOTH:
            assert flat[name][row].tolist() == wide[name][i][mask].tolist()
        assert flat["logprobs"][row].tolist() == sample.logprobs.tolist()
        assert flat["loss_mask"][row].tolist() == sample.loss_mask.tolist()
        versions = np.stack([flat["version_incarnation"][row], flat["version_n"][row]], axis=1)
        assert versions.tolist() == sample.versions.tolist()
        for name, fill in (("response_ids", -7), ("logprobs", 0), ("loss_mask", 0), ("version_n", -1)):
            assert set(wide[name][i][~mask].tolist()) <= {fill}
        assert set(wide["prompt_ids"][i][wide["prompt_mask"][i] == 0].tolist()) <= {-7}
        assert set(wide["input_ids"][i][wide["attention_mask"][i] == 0].tolist()) <= {-7}
    for name in PER_SAMPLE:
        assert flat[name].tolist() == wide[name].tolist()
    assert flat["rewards"].tolist() == [s.reward for s in batch.samples]
    assert flat["group_ids"].tolist() == [s.id.group for s in batch.samples]
    assert flat["staleness"].tolist() == [s.staleness for s in batch.samples]


ROWS: Rows = [(2, [(3, 0), (1, 7)]), (4, [(2, 9)])]


@pytest.mark.parametrize(
    ("rows", "prompt", "response", "total"),
    [(ROWS, 4, 4, 6), (ROWS[:1], 2, 4, 6), ([], 0, 0, 0)],
    ids=["two", "one", "empty"],
)
@pytest.mark.parametrize("left", [False, True])
def test_shapes_and_types(rows: Rows, prompt: int, response: int, total: int, left: bool) -> None:
    """The documented shapes and types, also of one sample and of none."""
    batch = make_batch(rows)
    count = len(rows)
    wide, flat = batch.padded(left_pad_prompts=left), batch.ragged()
    shapes: dict[str, Any] = dict.fromkeys([*BOTH, "response_ids", "response_mask"], (count, response))
    shapes |= dict.fromkeys(["prompt_ids", "prompt_mask"], (count, prompt)) | dict.fromkeys(PER_SAMPLE, (count,))
    shapes |= dict.fromkeys(["input_ids", "attention_mask"], (count, prompt + response if left else total))
    types = BOTH | PER_SAMPLE | dict.fromkeys(["prompt_ids", "response_ids", "input_ids"], np.int32)
    types |= dict.fromkeys(["prompt_mask", "response_mask", "attention_mask"], np.uint8)
    assert {name: a.shape for name, a in wide.items()} == shapes
    assert {name: a.dtype for name, a in wide.items()} == {name: np.dtype(t) for name, t in types.items()}

    prompts, tokens = sum(p for p, _ in rows), sum(n for _, s in rows for n, _ in s)
    lengths: dict[str, Any] = dict.fromkeys([*BOTH, "response_ids"], tokens) | dict.fromkeys(PER_SAMPLE, count)
    lengths |= {"prompt_ids": prompts, "prompt_offsets": count + 1, "response_offsets": count + 1}
    types = BOTH | PER_SAMPLE | {"prompt_ids": np.int32, "response_ids": np.int32}
    types |= {"prompt_offsets": np.int64, "response_offsets": np.int64}
    assert {name: len(a) for name, a in flat.items()} == lengths
    assert {name: a.dtype for name, a in flat.items()} == {name: np.dtype(t) for name, t in types.items()}


def test_the_two_layouts_of_whole_sequences() -> None:
    """Left-padded prompts put every response into the same columns; otherwise all padding is on the right."""
    batch = make_batch(ROWS)

    left, right = batch.padded(left_pad_prompts=True), batch.padded()

    assert left["input_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 0, 0]]
    assert left["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]
    assert left["prompt_ids"].tolist() == [[0, 0, 1, 2], [7, 8, 9, 10]]
    assert right["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert right["prompt_ids"].tolist() == [[1, 2, 0, 0], [7, 8, 9, 10]]
    assert right["response_ids"].tolist() == left["response_ids"].tolist() == [[3, 4, 5, 6], [11, 12, 0, 0]]
    assert left["version_n"].tolist() == [[0, 0, 0, 7], [9, 9, -1, -1]]
    assert left["version_incarnation"].tolist() == [[0, 0, 0, 1], [1, 1, -1, -1]]
    assert left["staleness"].tolist() == [9, 0]


def test_arrays_are_the_trainers_own() -> None:
    """Writing into arrays changes neither the batch nor the next call's; writing into tensors, not the arrays."""
    batch = make_batch(ROWS)
    before = {name: a.copy() for name, a in batch.padded().items()}

    for arrays in (batch.padded(), batch.ragged()):
        for array in arrays.values():
            array[...] = 1
    again = batch.padded()
    for tensor in april.to_torch(again).values():
        tensor.fill_(1)

    assert all((again[name] == value).all() for name, value in before.items())
    assert batch.rewards.tolist() == [0.0, 0.5]
    assert all((batch.padded()[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("rows", [ROWS, []], ids=["two", "empty"])
def test_tensors(rows: Rows) -> None:
    """Integers become int64, masks bool, floats float32; names, shapes and values stay."""
    batch = make_batch(rows)
    for arrays in (batch.padded(left_pad_prompts=True), batch.ragged()):
        tensors = april.to_torch(arrays, device="cpu")
        assert list(tensors) == list(arrays)
        for name, tensor in tensors.items():
            want = torch.bool if name.endswith("_mask") else torch.float32
            if not name.endswith(("_mask", "logprobs", "rewards", "temperatures")):
                want = torch.int64
            assert tensor.dtype == want, name
            assert np.array_equal(tensor.numpy(), arrays[name]), name


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int8])
def test_extras_stay_numbers(kind: type[np.integer[Any]]) -> None:
    """Rows of small unsigned numbers, such as ids of experts, are no masks: they become int64."""
    rows = np.array([[[0, 5]], [[127, 1]]], kind)
    found = april.to_torch({"routed_experts": rows, "loss_mask": np.array([1, 0], np.uint8)})
    assert found["routed_experts"].dtype == torch.int64
    assert found["routed_experts"].tolist() == rows.tolist()
    assert found["loss_mask"].tolist() == [True, False]


def test_what_is_no_array_is_named() -> None:
    """to_torch says which value it cannot take."""
    with pytest.raises(TypeError, match=r"to_torch: text is list; give the arrays"):
        april.to_torch({"text": ["a"]})
    with pytest.raises(TypeError, match=r"to_torch: data is an array of object"):
        april.to_torch({"data": np.array([None])})


def test_without_torch_there_is_one_sentence() -> None:
    """In a base install to_torch says what to install, and april itself needs no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import april\n"
        "try: april.to_torch({})\n"
        "except april.ConfigError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("april.to_torch needs torch, in the build for your machine: pip install torch")
    assert run.stderr == ""


def test_a_trainer_recomputes_the_log_probabilities_from_the_arrays() -> None:
    """Both layouts, fed to the model as they are, give the behaviour log-probabilities of the delivered tokens."""
    model = tiny_model()
    config = april.Config(rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=40)
    prompts = [[3, 4, 5, 6, 7, 8][: 2 + i] for i in range(4)]
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 0.0, model=model) as rollouts:
        batch = rollouts.next_batch()

    assert batch.logprob_kind == "temperature"
    for left in (True, False):
        a = april.to_torch(batch.padded(left_pad_prompts=left))
        with torch.no_grad():
            logits = model(input_ids=a["input_ids"], attention_mask=a["attention_mask"]).logits.float()
        now = logits[:, :-1].log_softmax(-1).gather(-1, a["input_ids"][:, 1:, None])[..., 0]
        if left:
            now = now[:, -a["response_ids"].shape[1] :]
        else:
            columns = a["prompt_mask"].sum(1, keepdim=True) - 1 + torch.arange(a["response_ids"].shape[1])
            now = now.gather(1, columns.clamp(max=now.shape[1] - 1))
        error = torch.where(a["response_mask"], now - a["logprobs"], 0.0).abs()
        assert a["response_mask"].sum() == batch.lengths.sum()
        assert error.max() < 1e-4


# ---------------------------------------------------------------- shares


def sample_of(group: int, index: int, spans: list[int], cohort: tuple[tuple[int, float], ...]) -> DeliveredSample:
    """One response; ``spans``: tokens of each of the versions 0, 1, 2, of which those of version 0 have no loss."""
    segments, start = [], 0
    for n, count in enumerate(spans):
        kind = SegmentKind.GENERATED if (index + n) % 3 else SegmentKind.ENVIRONMENT
        segments.append(Segment(start, count, PolicyVersion(0, n), kind, f"a{group}.{index}.{n}", "e", 1.0))
        start += count
    first = 1000 * group + 50 * index
    return delivered(
        group, index, prompt=Prompt(np.arange(first, first + 1 + group % 4, dtype=np.int32)),
        tokens=np.arange(first, first + start, dtype=np.int32),
        logprobs=-np.arange(1, start + 1, dtype=np.float32),
        loss_mask=np.array([n > 0 for n, count in enumerate(spans) for _ in range(count)], np.uint8),
        segments=tuple(segments), staleness=2, reward=float(index % 3) + group / 8, cohort=cohort,
    )  # fmt: skip


@st.composite
def grouped(draw: Any) -> Batch:
    """Groups of any sizes; of some, only a part of the cohort is in the batch."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=5))
    spans = st.lists(st.integers(0, 6), min_size=3, max_size=3)
    samples = []
    for group, size in enumerate(sizes):
        cohort = tuple((i, float(i % 3) + group / 8) for i in range(size + draw(st.integers(1, 2))))
        samples += [sample_of(group, index, draw(spans), cohort) for index in range(size)]
    return Batch(
        id=3, version=PolicyVersion(0, 2), samples=tuple(samples), group_sizes=tuple(sizes),
        metrics={"off_policy_share": 0.25, "batches_out": 1.0},
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(grouped(), st.integers(1, 9), st.sampled_from(["samples", "tokens"]))
def test_each_sample_is_in_one_share_with_what_the_batch_says_of_it(batch: Batch, ranks: int, by: Any) -> None:
    """Nothing is lost or there twice, in any order; advantages, ages and arrays are the rows of the whole batch's."""
    shares = batch.split(ranks, by=by)
    assert len(shares) == ranks
    row_of = {sample.id: row for row, sample in enumerate(batch.samples)}
    rows = [[row_of[s.id] for s in share.samples] for share in shares]
    assert sorted(row for own in rows for row in own) == list(range(len(batch)))
    assert all(own == sorted(own) for own in rows)
    whole, ends = batch.ragged(), np.cumsum(batch.lengths)
    for rank, (share, own) in enumerate(zip(shares, rows, strict=True)):
        assert share.share == replace(batch.share, rank=rank, ranks=ranks)
        assert (share.metrics, share.id, share.trained_at) == (batch.metrics, 3, PolicyVersion(0, 3))
        assert sum(share.group_sizes) == len(share) == len(own)
        assert len(share.group_sizes) == len(set(share.group_ids.tolist()))
        for method in ("grpo", "dr_grpo", "rloo"):
            assert share.advantages(method).tolist() == batch.advantages(method)[own].tolist()
        tokens = np.concatenate([np.arange(ends[r] - batch.lengths[r], ends[r]) for r in own] or [np.empty(0, int)])
        assert share.token_ages.tolist() == batch.token_ages[tokens].tolist()
        assert share.ragged()["response_ids"].tolist() == whole["response_ids"][tokens].tolist()
        assert share.padded()["rewards"].tolist() == whole["rewards"][own].tolist()


@settings(max_examples=100, deadline=None)
@given(grouped(), st.integers(1, 9))
def test_shares_are_as_equal_as_they_are_asked_to_be(batch: Batch, ranks: int) -> None:
    """By samples: contiguous, sizes one apart at most. By tokens: no share has more than the mean and one row."""
    by_samples = batch.split(ranks)
    assert [s.id for share in by_samples for s in share.samples] == [s.id for s in batch.samples]
    sizes = [len(share) for share in by_samples]
    assert max(sizes) - min(sizes) <= 1

    by_tokens = batch.split(ranks, "tokens")
    tokens = [[len(s.prompt.token_ids) + len(s.tokens) for s in share.samples] for share in by_tokens]
    assert all(tokens) or len(batch) < ranks
    longest = max((t for share in tokens for t in share), default=0)
    assert max(map(sum, tokens)) <= sum(map(sum, tokens)) / ranks + longest


@settings(max_examples=100, deadline=None)
@given(grouped(), st.integers(1, 5), st.integers(1, 3))
def test_the_losses_of_all_shares_are_the_loss_of_the_batch(batch: Batch, ranks: int, parts: int) -> None:
    """With ``share``, and with micro-batches that are shares of a share."""

    def loss(part: Batch, **share: Any) -> dict[str, float]:
        mask, logprobs = (part.padded()[name] for name in ("loss_mask", "logprobs"))
        weights = {
            m: april.loss_weights(mask, m, max_response_len=9, **share) for m in ("grpo", "dapo", "dr_grpo", "rloo")
        }  # fmt: skip
        return {m: float((w * logprobs).sum()) for m, w in weights.items()}

    whole = loss(batch)
    micro = [part for share in batch.split(ranks, "tokens") for part in share.split(parts)]
    for method, value in whole.items():
        assert sum(loss(m, share=m.share)[method] for m in micro) == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_an_empty_share_works() -> None:
    """Fewer samples than ranks: arrays with no rows, of the same names, types and shapes, those of extras among them.

    A whole batch is its own share, and a share of nothing may be split.
    """
    sample = sample_of(7, 0, [1, 2, 3], ((0, 0.875), (1, 1.875)))
    count = len(sample.prompt.token_ids) + len(sample.tokens) - 1
    sample = replace(sample, extras={"routed_experts": np.ones((count, 4, 2), np.uint8)})
    batch = Batch(
        id=0, version=PolicyVersion(0, 2), samples=(sample,), group_sizes=(1,), metrics={"off_policy_share": 0.5}
    )
    assert batch.share == BatchShare(0, 1, 1, 5)
    first, empty = batch.split(2)
    assert len(first) == 1
    assert repr(empty).startswith("<Batch 0 share 1 of 2 version=0.2 groups=0 samples=0 tokens=0 off_policy_share=0.5")
    for left in (False, True):
        full, none = batch.padded(left_pad_prompts=left), empty.split(2)[1].padded(left_pad_prompts=left)
        assert none["routed_experts"].shape[2:] == (4, 2)
        assert {k: (v.dtype, v.ndim, 0) for k, v in full.items()} == {
            k: (v.dtype, v.ndim, len(v)) for k, v in none.items()
        }
        april.to_torch(none)
    flat = empty.ragged()
    for name in ("prompt_offsets", "response_offsets", "extras_offsets"):
        assert flat[name].tolist() == [0]
    assert {k: v.dtype for k, v in flat.items()} == {k: v.dtype for k, v in batch.ragged().items()}
    assert all(empty.advantages(m).shape == (0,) for m in ("grpo", "dr_grpo", "rloo", "dapo", "gspo"))
    assert (empty.token_ages.shape, empty.token_ages.dtype) == ((0,), np.int32)
    assert (empty.rewards.shape, empty.lengths.shape, empty.group_sizes) == ((0,), (0,), ())
    assert april.loss_weights(empty.padded()["loss_mask"], "dapo", share=empty.share).shape == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0,), "ranks must be a whole number and at least 1, got 0"),
        ((True,), "ranks must be a whole number"),
        ((2.0,), "ranks must be a whole number and at least 1, got 2.0"),
        ((2, "rows"), 'by must be "samples" or "tokens", got \'rows\''),
    ],
)
def test_splits_that_cannot_be(arguments: Any, sentence: str) -> None:
    """Refused with what is wrong."""
    batch = Batch(id=0, version=PolicyVersion(0, 0), samples=(), group_sizes=(), metrics={"off_policy_share": 0.0})
    with pytest.raises(ValueError, match=sentence):
        batch.split(*arguments)
