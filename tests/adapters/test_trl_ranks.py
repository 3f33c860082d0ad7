"""The TRL adapter on several ranks, here threads: who gets which rows, and what all of them decide alike.

The real package is run on two real ranks by ``make test-adapters``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KNOWN, ServerThread
from tiny_models import tiny_model

import april
from april.adapters import trl as adapter
from april.adapters.trl import trainer as trainers
from april.adapters.trl.checkpoint import STATE_FILE, buffer_file

from . import stand_in_trl as trl
from .stand_in_ranks import Meeting, RankAccelerator, in_threads, on_all_ranks

train = partial(trl.train, ranks=2)
meeting_of_threads = pytest.fixture(autouse=True)(in_threads)


def responses(trained: list[Any], start: int = 0) -> Counter[tuple[int, ...]]:
    """What was scored on all ranks: (row of the data set, tokens)."""
    return Counter(
        (row["answer"], *ids)
        for made in trained
        for rows, output in zip(made.scored[start:], made.outputs[start:], strict=True)
        for row, ids in zip(rows, output["completion_ids"], strict=True)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_scored_is_what_was_delivered(ranks: int) -> None:
    """Rows have the prompt and the columns of their response, each prompt once; old log-probabilities are april's.

    Ranks train contiguous parts of the batch, in their order.
    """
    trained = train(4, ranks=ranks)

    for step in range(4):
        batch = [row["answer"] for made in trained for row in made.scored[step]]
        assert batch[::2] == batch[1::2]  # groups are whole where the ranks' rows are put together
        assert all(len(made.scored[step]) == 6 // ranks for made in trained)
    for made in trained:
        for rows, output in zip(made.scored, made.outputs, strict=True):
            assert output["prompt_ids"] == made._tokenize_prompts([row["prompt"] for row in rows])[0]
            assert len({id(row) for row in rows}) == len(rows)  # TRL writes into its rows
            assert output["old_per_token_logps"] is output["sampling_per_token_logps"]
            assert output["old_per_token_logps"].shape[0] == len(rows)
            assert [len(row) for row in output["logprobs"]] == [len(row) for row in output["completion_ids"]]
        assert made._metrics == trained[0]._metrics  # april's are of the whole batch
        assert made.model.training
        assert made.rollout_func.scheduler is None
    everything = [answer for answer, *_ in responses(trained).elements()]
    assert Counter(everything) == dict.fromkeys(range(12), 2)
    assert [row["answer"] for rows in trained[0].scored for row in rows] != sorted(everything)
    assert trained[0].rollout_func.ledger["prompts"].delivered == 12


def test_masks_are_given_on_all_ranks_or_on_none() -> None:
    """Too old tokens are masked by env_mask, which is left out where everything carries loss.

    TRL counts the trained tokens of all ranks by it, so one rank alone would wait for the others for ever.
    """
    settings = {"max_staleness": 0, "on_stale": "mask", "over_sampling_batch_size": 8}
    shares: dict[int, april.Batch] = {}

    def keep(made: Any) -> None:
        rollouts, rank = made.rollout_func, made.accelerator.process_index
        next_rows = rollouts.next_rows

        def kept(trainer: Any) -> Any:
            rows = next_rows(trainer)
            shares[rank] = rollouts._batch
            return rows

        rollouts.next_rows = kept

    trained = train(4, settings=settings, ranks=3, prepare=keep)

    masks = [[output.get("env_mask") for output in made.outputs] for made in trained]
    steps = [[mask is not None for mask in of_ranks] for of_ranks in zip(*masks, strict=True)]
    assert [len(set(given)) for given in steps] == [1] * 4
    assert not any(steps[0])
    outputs = [output for made in trained for output in made.outputs if "env_mask" in output]
    assert any(0 in mask for output in outputs for mask in output["env_mask"])
    for output in outputs:
        assert [len(mask) for mask in output["env_mask"]] == [len(row) for row in output["completion_ids"]]
    whole = [replace(sample, loss_mask=np.ones_like(sample.loss_mask)) for sample in shares[2].samples]
    for masked in (0.0, 1.0):  # in the whole batch; nothing on this rank
        rollouts = trained[2].rollout_func
        rollouts._batch = replace(shares[2], samples=tuple(whole), metrics={"masked_tokens": masked})
        assert ("env_mask" in rollouts([[{}]] * len(whole), trained[2])) == bool(masked)


def test_an_evaluation_is_one_of_all_ranks() -> None:
    """Each gets the answers to its own rows, those that one process would have got."""
    trl.evaluated_alike(train, [dict(row) for row in trl.prompts(8)])


def test_servers_get_weights_from_rank_0(tmp_path: Path) -> None:
    """Which alone writes and removes directories; all ranks name the same one."""
    server = FakeVllmServer(max_running=4, turns=5)
    saved: list[int] = []

    def noted(made: Any) -> None:
        rank, save = made.accelerator.process_index, made.model.save_pretrained
        made.model.save_pretrained = lambda folder: (saved.append(rank), save(folder))

    with ServerThread(server):
        settings = {"engine": {"kind": "vllm", "urls": [server.url], **KNOWN}, "over_sampling_batch_size": 4}
        trained = train(3, settings=settings, weights_dir=tmp_path, prepare=noted)
        assert (server.weights, server.violations) == ("step_2", [])
    assert saved == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert sum(responses(trained).values()) == 18


def test_sharded_weights_are_gathered_on_all_ranks_and_written_on_one(tmp_path: Path) -> None:
    """The ranks that write nothing take part: without them rank 0 would wait for ever."""
    written: list[Any] = []

    class Whole:
        def save_pretrained(self, folder: Path, state_dict: Any) -> None:
            written.append((folder, state_dict))

    def run(rank: int, meeting: Meeting) -> None:
        accelerator: Any = RankAccelerator(meeting, rank)
        accelerator.state = trl.SimpleNamespace(deepspeed_plugin=trl.SimpleNamespace(zero_stage=3))
        accelerator.get_state_dict = lambda model: {model: accelerator.gather(torch.tensor([rank])).tolist()}
        made = trl.SimpleNamespace(
            accelerator=accelerator, is_deepspeed_enabled=True, model=Whole(), model_wrapped="the sharded one"
        )
        trainers.write_weights(made, tmp_path)

    on_all_ranks(2, run)
    assert written == [(tmp_path, {"the sharded one": [0, 1]})]


# ------------------------------------------------------------------ checkpoints


def half_trained(made: Any) -> None:
    """Two micro-steps per generation batch; what is left of it differs by rank."""
    rank = made.accelerator.process_index

    parts = [{"completion_ids": torch.arange(3) + 10 * rank + i, "num_images": [1, 2 * i]} for i in range(2)]
    made.optimizer_step = lambda output: setattr(made, "_buffered_inputs", parts)


def test_a_training_resumed_on_two_ranks_loses_nothing(tmp_path: Path) -> None:
    """april's state is saved once; each response is trained once before the checkpoint or after it, on some rank."""
    more: dict[str, Any] = {"settings": {"over_sampling_batch_size": 8}, "data": lambda: trl.prompts(18)}
    before = train(3, folder=tmp_path, **more)
    checkpoint = tmp_path / "checkpoint-1"
    after = train(6, resume=checkpoint, **more)

    assert [path.name for path in checkpoint.iterdir()] == [STATE_FILE]
    kept = [trl.SimpleNamespace(scored=made.scored[:1], outputs=made.outputs[:1]) for made in before]
    seen = Counter(answer for answer, *_ in (responses(kept) + responses(after)).elements())
    assert seen == dict.fromkeys(range(18), 2)
    assert sum(after[1]._metrics["train"]["april/resumed_samples"]) > 0


def test_each_rank_keeps_what_it_has_left_of_a_batch(tmp_path: Path) -> None:
    """One file per rank, named in the state; as many ranks must read them, and each its own, undamaged."""
    train(1, folder=tmp_path, steps_per_generation=2, prepare=half_trained)
    checkpoint = tmp_path / "checkpoint-1"
    found: list[Any] = []

    def noted(made: Any) -> None:
        made.optimizer_step = lambda output: found.append(made._buffered_inputs)
        load = made.rollout_func.load

        def loaded(*arguments: Any) -> None:
            load(*arguments)
            found.append((made.accelerator.process_index, made._step, made._buffered_inputs))

        made.rollout_func.load = loaded

    def resume(ranks: int = 2) -> None:
        train(1, resume=checkpoint, ranks=ranks, steps_per_generation=2, prepare=noted)

    assert sorted(path.name for path in checkpoint.iterdir()) == sorted([STATE_FILE, *map(buffer_file, range(2))])
    resume()
    for rank, step, parts in sorted(found, key=lambda row: row[0]):
        assert step == 1
        for i, part in enumerate(parts):
            assert part["completion_ids"].tolist() == list(range(10 * rank + i, 10 * rank + i + 3))
            assert part["num_images"] == [1, 2 * i]  # by which TRL cuts pixels
    assert len(found) == 2
    with pytest.raises(april.CheckpointError, match="spread over 2 processes, but now there are 3"):
        resume(ranks=3)
    first, other = (checkpoint / buffer_file(rank) for rank in range(2))
    whole = other.read_bytes()
    for content, said in (
        (first.read_bytes(), r"in .* belongs to another rank"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "(is damaged|cannot be read)"),
        (None, "cannot be read"),
    ):
        if content is None:
            other.unlink()
        else:
            other.write_bytes(content)
        with pytest.raises(april.CheckpointError, match=rf"april_buffer_rank1\.msgpack {said}"):
            resume()


def test_between_two_batches_another_number_of_ranks_may_go_on(tmp_path: Path) -> None:
    """A generation batch of the same size, dealt to three instead of two."""
    before = train(2, folder=tmp_path)
    after = train(4, ranks=3, resume=tmp_path / "checkpoint-2")

    seen = Counter(answer for answer, *_ in (responses(before) + responses(after)).elements())
    assert seen == dict.fromkeys(range(12), 2)


# ------------------------------------------------------------ rewards and ends


def value(ids: Any) -> float:
    return sum(ids) % 7 / 4


def values(completion_ids: Any, **others: Any) -> list[float]:
    return [value(ids) for ids in completion_ids]


def with_quorum(
    steps: int, reward: Any = values, prepare: Callable[[Any], None] = lambda made: None, ranks: int = 1,
    settings: dict[str, Any] | None = None, **args: Any,
) -> tuple[list[Any], list[list[Any]]]:  # fmt: skip
    """The trainers of all ranks with a quorum of 3 in 4, and the samples of each batch, those of all ranks."""
    batches: list[list[Any]] = [[] for _ in range(ranks)]

    def noted(made: Any) -> None:
        put, mine = made.rollout_func.put_advantages, batches[made.accelerator.process_index]
        made.rollout_func.put_advantages = lambda *given: (mine.append(made.rollout_func._last_batch), put(*given))
        prepare(made)

    fours: dict[str, Any] = {"num_generations": 4, "generation_batch_size": 12, "reward_funcs": [reward]}
    settings = {"group_quorum": 0.75} | (settings or {})
    trained = train(steps, settings=settings, prepare=noted, ranks=ranks, **fours | args)
    return trained, [[s for share in step for s in share.samples] for step in zip(*batches, strict=True)]


def compared_with(sample: Any) -> list[float]:
    """Its own reward, and those of the first others of its group."""
    others = [reward for index, reward in sample.cohort if index != sample.id.index]
    return [value(sample.tokens.tolist()), *others[: len(sample.cohort) - 1]]


def advantages_of(batch: list[Any], scale: str = "group") -> Any:
    """A slow reference."""
    of_batch = float(np.std([value(s.tokens.tolist()) for s in batch], ddof=1))
    found = []
    for compared in map(compared_with, batch):
        scales = {"group": float(np.std(compared, ddof=1)) + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}
        found.append((compared[0] - float(np.mean(compared))) / scales[scale])
    return pytest.approx(found, rel=1e-4, abs=1e-5)


def advantages_in(trained: list[Any], step: int) -> list[float]:
    """What the losses of all ranks got."""
    return torch.cat([made.outputs[step]["advantages"] for made in trained]).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_with_a_quorum_each_response_is_compared_with_the_first_others(scale: str, ranks: int) -> None:
    """As a slow reference says, whatever its place and rank; TRL's table and its share without a difference are of all
    ranks, and say the same.
    """
    trained, batches = with_quorum(4, ranks=ranks, scale_rewards=scale)

    samples = {(s.id.group, s.id.index): s for batch in batches for s in batch}
    assert len(samples) == sum(map(len, batches)) == 12 * 4  # each response once
    for step, batch in enumerate(batches):
        for s in batch:
            assert all(said == value(samples[s.id.group, i].tokens.tolist()) for i, said in s.cohort)
        assert advantages_in(trained, step) == advantages_of(batch, scale)
        same = sum(len(set(compared_with(s))) == 1 for s in batch) / 12
        for made in trained:
            assert made.outputs[step]["advantages"].dtype == torch.float32
            alike = made._metrics["train"]["frac_reward_zero_std"][step]
            assert scale == "batch" or alike == pytest.approx(same)  # else TRL's own: whether the batch has one reward
    assert all(list(made._logs["advantages"]) == advantages_in(trained, -1) for made in trained)
    assert any(s.id.index not in dict(s.cohort) for s in samples.values())
    assert any(count < 4 for batch in batches for count in Counter(s.id.group for s in batch).values())
    assert trained[0].rollout_func.ledger["prompts"].delivered == 12


def test_with_a_quorum_rewards_are_of_single_responses(caplog: pytest.LogCaptureFixture) -> None:
    """Each needs one, for which it is alone; functions that compare are told of, once; TRL scores evaluations."""

    def unscored(completion_ids: Any, **others: Any) -> list[float | None]:
        return [None for _ in completion_ids]

    def longest(completion_ids: Any, **others: Any) -> list[float]:
        return [float(len(ids) == max(map(len, completion_ids))) for ids in completion_ids]

    def evaluates(made: Any) -> None:
        made.optimizer_step = lambda output: made.evaluate([dict(row) for row in trl.prompts(4)])

    with pytest.raises(april.RolloutError, match=r"every reward function returned None or NaN for a response to row"):
        with_quorum(1, unscored, settings={"max_failed_groups": 1, "max_attempt_failures": 1})
    caplog.clear()
    _, batches = with_quorum(3, longest, evaluates)
    assert {sample.reward for batch in batches for sample in batch} == {1.0}
    (told,) = [r.getMessage() for r in caplog.records if "must not compare responses with each other" in r.getMessage()]
    assert told.startswith("batch 0 has a mean reward of 1, but TRL logs 0.")


def test_with_a_quorum_a_filter_judges_the_first_k() -> None:
    """Of single responses' rewards."""
    _, batches = with_quorum(4, filter=april.rewards_differ, settings={"on_data_end": "wrap"})
    assert all(len({reward for _, reward in s.cohort}) > 1 for batch in batches for s in batch)


@pytest.mark.parametrize(("policy", "one_in"), [("replace", 4), ("shrink", 2), ("drop_group", 4)])
def test_with_a_quorum_a_response_that_fails_costs_what_was_said(policy: str, one_in: int) -> None:
    """Batches keep their size; one that takes another's place has a number of its own, and the baselines are right."""

    def brittle(completion_ids: Any, **others: Any) -> list[float]:
        if any(sum(ids) % one_in == 0 for ids in completion_ids):
            raise RuntimeError("no verdict")
        return values(completion_ids)

    settings = {"on_failed_sample": policy, "max_attempt_failures": 1, "on_data_end": "wrap", "max_failed_groups": 50}
    trained, batches = with_quorum(4, brittle, settings=settings)

    samples = {(s.id.group, s.id.index): s for batch in batches for s in batch}
    assert len(samples) == sum(map(len, batches)) == 4 * 12
    assert any(index >= 4 for _, index in samples) == (policy == "replace")
    assert {len(s.cohort) for s in samples.values()} == ({2, 3} if policy == "shrink" else {3})
    for step, batch in enumerate(batches):
        assert advantages_in(trained, step) == advantages_of(batch)


def test_dynamic_sampling_sees_whole_groups() -> None:
    """A group that two ranks train was judged by its rewards together, on rank 0."""
    asked: list[int] = []

    def judged(prompts: Any, completion_ids: Any, answer: Any, **others: Any) -> list[float]:
        asked.append(len(prompts))
        return [float(i) if answer[0] % 2 == 0 else 1.0 for i in range(len(prompts))]

    trained = train(3, settings={"on_data_end": "wrap"}, filter=april.rewards_differ, reward_funcs=[judged])

    assert all(answer % 2 == 0 for answer, *_ in responses(trained))
    assert set(asked) == {2, 3}  # april asks about groups of two, TRL about its three rows


def test_all_ranks_hear_that_the_prompts_have_ended() -> None:
    """By the size of the whole batch: a rank that has all of its own rows does not go on without the others."""
    said: list[str] = []

    def run(made: Any) -> None:
        draw = made.rollout_func.next_rows

        def noted(*arguments: Any) -> Any:
            try:
                return draw(*arguments)
            except april.RolloutError as error:
                said.append(str(error))
                raise

        made.rollout_func.next_rows = noted

    with pytest.raises(april.RolloutError, match="a batch of 4 rows, but TRL needs 6"):
        train(2, data=lambda: trl.prompts(5), prepare=run)
    assert len(said) == 2
    assert any("(see rank 0)" in sentence for sentence in said)


def test_an_error_of_one_rank_is_handed_to_the_scheduler() -> None:
    """Which tells the others at once, who would wait for that rank otherwise."""
    heard: list[BaseException] = []

    class Hearing(trl.GRPOTrainer):
        def train(self, *args: Any) -> None:
            try:
                super().train(*args)
            except april.RankError as error:
                heard.append(error)

    def fails(made: Any) -> None:
        if made.accelerator.process_index == 1:
            made.optimizer_step = lambda output: [][0]

    with pytest.raises(IndexError):
        train(3, kind=Hearing, prepare=fails)
    assert [str(error) for error in heard] == ["rank 1 has ended with an error: IndexError: list index out of range"]


# -------------------------------------------------------------------- refusals

TO_SERVERS: dict[str, Any] = {"weights_dir": "nowhere", "engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}}


def test_ranks_that_share_a_model_or_its_rows_are_refused_where_april_cannot_serve_them() -> None:
    """Sharded weights and the embedded engine; several ranks that train the same rows."""
    model = tiny_model()

    class Sharded(trl.GRPOTrainer):
        def __init__(self, *args: Any, stage: int = 0, fsdp: int = 0, model_parallel: int = 1) -> None:
            super().__init__(*args)
            self.is_deepspeed_enabled, self.is_fsdp_enabled = bool(stage), bool(fsdp)
            self.accelerator.state = trl.SimpleNamespace(
                deepspeed_plugin=trl.SimpleNamespace(zero_stage=stage),
                fsdp_plugin=trl.SimpleNamespace(fsdp_version=fsdp),
            )
            self.accelerator.parallelism_config = trl.SimpleNamespace(non_data_parallel_size=model_parallel)

    made = adapter.april_trainer(Sharded)
    with pytest.raises(april.ConfigError, match="FSDP1: it leaves no rank with the whole model"):
        made(model, adapter.rollout(), trl.prompts(4), fsdp=1)
    with pytest.raises(april.ConfigError, match="ZeRO-3: it leaves no rank with the whole model"):
        made(model, adapter.rollout(), trl.prompts(4), stage=3)
    with pytest.raises(april.ConfigError, match="tensor, context or sequence parallelism: several ranks then train"):
        made(model, adapter.rollout(), trl.prompts(4), model_parallel=2)
    made(model, adapter.rollout(), trl.prompts(4), stage=2)
    made(model, adapter.rollout(), trl.prompts(4), fsdp=2)
    made(model, adapter.rollout(**TO_SERVERS), trl.prompts(4), fsdp=2)
    made(model, adapter.rollout(**TO_SERVERS), trl.prompts(4), stage=3)
    model.peft_config = {}
    with pytest.raises(april.ConfigError, match="PEFT model under ZeRO-3: adapters are merged on a rank with"):
        made(model, adapter.rollout(**TO_SERVERS), trl.prompts(4), stage=3)
