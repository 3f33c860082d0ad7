"""Whole rollouts on a server over HTTP: the books beside slime's own, every hook, miles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from april.adapters.slime import RolloutFunction, make_generate_rollout
from benchmarks.slime_rollouts import _post, served
from benchmarks.slime_server import PER_UPDATE
from benchmarks.slime_surroundings import Trainer, write_inputs

ROOT = Path(__file__).resolve().parents[3]
SHORT = ["--shorter", "25"]
"""Some 100 tokens at 5 ms each: long beside what requests cost on a CPU, so that rounds end in the middle of some."""
SMALL = ["--partial-rollout", "--rollout-batch-size", "8", "--over-sampling-batch-size", "16",
         "--n-samples-per-prompt", "4"]  # fmt: skip


@pytest.fixture
def url() -> Iterator[str]:
    with served(SHORT) as address:
        yield address


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


class Run:
    """april as the rollout function of ``trainer``, and the trainer's own update of the weights before each rollout."""

    def __init__(self, url: str, work: Path, *flags: str, trainer: str = "slime", **settings: Any) -> None:
        self.trainer, self.url = Trainer(trainer), url
        self.args = self.trainer.arguments(url, work, [*SMALL, *flags])
        for name, value in settings.items():
            setattr(self.args, name, value)
        self.data = self.trainer.data_source(self.args)
        self.function = make_generate_rollout(check=True)
        self.trained: Counter[int] = Counter()
        self.resumed = 0

    def update(self, rollout_id: int) -> None:
        """The weights that are there before this rollout."""
        _post(self.url, "/trainer", {"label": str(rollout_id + 1), "updates": rollout_id})

    def __call__(self, rollout_id: int) -> Any:
        self.update(rollout_id)
        output = self.function(self.args, rollout_id, self.data)
        assert [len(group) for group in output.samples] == [4] * 8
        for group in output.samples:
            self.trained[group[0].group_index] += 1
            for sample in group:
                self.resumed += check(sample)
        return output

    @property
    def hook(self) -> Any:
        """What its flag names, by the trainer's own loader."""
        return self.trainer.get("utils.misc.load_function")(self.args.custom_reward_post_process_path)

    def manager(self, hook: Any = None) -> Any:
        """slime's rollout manager without Ray, which makes training data of the samples."""
        made = object.__new__(self.trainer.get("ray.rollout.RolloutManager").__ray_metadata__.modified_class)
        made.args, made.generate_rollout, made.data_source = self.args, self.function, self.data
        made.custom_reward_post_process_func, made.custom_convert_samples_to_train_data_func = hook, None
        return made

    def data_of(self, rollouts: int, hook: Any = None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """The samples of each rollout, and what slime's manager and its schedule make of them for training."""
        manager = self.manager(hook)
        for rollout_id in range(rollouts):
            self.update(rollout_id)
            samples, metrics = manager._get_rollout_data(rollout_id=rollout_id)
            assert metrics["rollout/april/groups"]
            train = manager._convert_samples_to_train_data(samples)
            lengths = train["response_lengths"]
            assert lengths == [len(said) for said in train["rollout_log_probs"]]
            assert lengths == [len(mask) for mask in train["loss_masks"]]
            assert lengths == [told["april"]["spans"][-1][1] for told in train["metadata"]]
            yield samples, train
            parallel = {"dp_size": 4, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
            self.args.micro_batch_size, self.args.balance_data = 2, False
            ranks, *_ = self.trainer.get("utils.dp_schedule.build_dp_schedule")(
                self.args, parallel, [len(t) for t in train["tokens"]], global_batch_size=32,
                rollout_indices=train["rollout_ids"],
            )  # fmt: skip
            assert sorted(i for rank in ranks for i in rank) == list(range(len(samples)))

    @property
    def books(self) -> Any:
        (session,) = self.function.sessions.values()
        session.scheduler.validate()
        return session.scheduler.ledger()["prompts"]

    def close(self) -> None:
        """All that was drawn is delivered once, held, or dropped by name."""
        books = self.books
        assert books.observed == len(self.data.drawn) == sum(self.trained.values()) + books.held + sum(
            books.dropped.values()
        )
        assert set(self.trained.values()) == {1}
        self.function.close()


def check(sample: Any) -> int:
    """Every token has the log-probability of the weights that its span names; 1 if several wrote it."""
    updates = np.rint(np.array(sample.rollout_log_probs) / -PER_UPDATE).astype(int) - 1
    assert len(updates) == len(sample.loss_mask) == sample.response_length
    assert sample.response == "x" * sample.response_length or sample.metadata["april"]
    spans = sample.metadata["april"]["spans"]
    assert [end for _, end, _ in spans[:-1]] == [start for start, _, _ in spans[1:]]
    for start, end, version in spans:
        assert set(updates[start:end]) == {int(version.partition(".")[2])}
    return len(spans) > 1


def test_nothing_is_lost_where_slimes_own_loses_groups(tmp_path: Path) -> None:
    """N = 32, N' = 64, n = 8, twenty rounds: drawn == delivered + held, each group once; slime's own beside it."""
    out = tmp_path / "results.json"
    command = [
        sys.executable, "-m", "benchmarks.slime_rollouts", "--slime", os.environ["SLIME_TREE"], "--rounds", "20",
        "--warm", "0", "--rollout-batch-size", "32", "--over-sampling-batch-size", "64", "--shorter", "25",
        "--rollout-max-response-len", "600", "--arms", "slime", "april", "--json", str(out),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    slime, april = json.loads(out.read_text())
    for result in (slime, april):
        print({key: result[key] for key in ("arm", "drawn", "delivered", "held", "dropped", "lost", "twice")})
    assert april["delivered"] == 640
    assert april["lost"] == april["dropped"] == april["twice"] == 0
    assert april["drawn"] == 640 + april["held"]


def test_slimes_asynchronous_loop_with_continuous_generation(tmp_path: Path) -> None:
    """slime's train_async.py and the calls by which its actors update: the bound holds, no token is of other weights.

    The books are checked where it runs: what was drawn is trained once or held.
    """
    out = tmp_path / "turns.json"
    command = [
        sys.executable, "-m", "benchmarks.slime_async", "--slime", os.environ["SLIME_TREE"], "--rounds", "5",
        "--warm", "2", "--turns", "1", "--train-s", "1", "--arms", "april, continuous", "--json", str(out),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    (turn,) = json.loads(out.read_text())
    assert len(turn["ages"]) >= 5 * 64
    assert max(turn["ages"]) <= 4


def test_slimes_own_generate_function(url: str, work: Path) -> None:
    """--custom-generate-function-path with slime's own ``generate``: counted, stamped and continued by april."""
    run = Run(url, work, "--custom-generate-function-path", "slime.rollout.sglang_rollout.generate")
    for rollout_id in range(20):
        run(rollout_id)
    assert run.resumed
    run.close()


def test_filter_group_reward_and_hooks(url: str, work: Path) -> None:
    """A dynamic filter of slime, --group-rm, a sample hook, both filters of samples, all loaded by slime's loader."""
    here = "adapters.real_slime.hooks_of_a_user"
    run = Run(
        url, work, "--dynamic-sampling-filter-path",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "--group-rm",
        "--custom-rm-path", f"{here}.group_reward", "--rollout-sample-hook-path", f"{here}.mark",
        "--rollout-sample-filter-path", f"{here}.last_is_removed", "--rollout-all-samples-process-path", f"{here}.see",
    )  # fmt: skip
    hooks = __import__(here, fromlist=["judged"])
    dropped = 0
    for rollout_id in range(8):
        output = run(rollout_id)
        dropped += sum(n for name, n in output.metrics.items() if name.startswith("rollout/dynamic_filter/drop_"))
        assert all(s.metadata["marked"] for group in output.samples for s in group)
        assert output.samples[-1][-1].remove_sample
        assert all(len({s.reward for s in group}) > 1 for group in output.samples)
    assert dropped
    assert hooks.judged >= 64 + dropped
    run.close()


def test_restarts_skip_no_prompt(url: str, work: Path) -> None:
    """Four processes' worth of slime's own save and load, each ended two rounds after its checkpoint."""
    trained: Counter[int] = Counter()
    for start in (0, 5, 10, 15):
        run = Run(url, work, save=str(work / "checkpoints"), load=str(work / "checkpoints"))
        if start:
            run.data.load(start - 1)
        for rollout_id in range(start, start + 7):
            groups = run(rollout_id).samples
            if rollout_id < start + 5:
                trained.update(group[0].group_index for group in groups)
            if rollout_id == start + 4:
                run.data.save(rollout_id)
                drawn, held = run.data.sample_group_index, run.books.held
        run.function.close()
        assert len(trained) == sum(trained.values()) == drawn - held
    files = sorted(path.name for path in (work / "checkpoints" / "rollout").iterdir())
    assert files[:4] == [f"april_carry_{n}.msgpack" for n in (14, 19, 4, 9)]


HOOK = ["--custom-reward-post-process-path", "april.adapters.slime.post_process_rewards"]


def test_a_quorum_fills_batches_and_their_advantages_reach_the_training_data(url: str, work: Path) -> None:
    """Parts of groups through slime's manager and its schedule: every sample once, with april's advantage."""
    run = Run(url, work, *HOOK, april={"group_quorum": 0.75}, use_dynamic_batch_size=False)
    seen: Counter[int] = Counter()
    split = 0
    for samples, train in run.data_of(8, run.hook):
        split += any(count < 4 for count in Counter(s.group_index for s in samples).values())
        seen.update(s.index for s in samples)
        assert len(samples) == 32
        assert train["rewards"] == [s.metadata["april"]["advantage"] for s in samples]
        assert train["raw_reward"] == [float(s.index % 2) for s in samples]
    assert split
    assert set(seen.values()) == {1}
    assert any(train["rewards"])
    run.function.close()


def test_the_rows_of_an_agent_count_once_in_the_training_data(url: str, work: Path) -> None:
    """slime's manager sums a response's mask over its rows, and its schedule steps by responses."""
    agent = {"rollout": "adapters.real_slime.hooks_of_a_user.agent"}
    run = Run(url, work, *HOOK, april=agent, use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    several = 0
    for samples, train in run.data_of(6, run.hook):
        rows = Counter(train["rollout_ids"])
        assert len(rows) == 32
        assert all(count == 1 + index % 3 for index, count in rows.items())
        several += sum(count > 1 for count in rows.values())
        masks: Counter[int] = Counter()
        for index, mask in zip(train["rollout_ids"], train["loss_masks"], strict=True):
            masks[index] += sum(mask)
        assert train["rollout_mask_sums"] == [masks[index] for index in train["rollout_ids"]]
        assert train["rewards"] == [s.metadata["april"]["advantage"] for s in samples]
        assert train["raw_reward"] == [float(s.index % 2) for s in samples]
        for sample in samples:
            run.resumed += check(sample)
    assert several
    assert run.resumed
    run.function.close()


@pytest.mark.parametrize("flags", [
    [], ["--disable-grpo-std-normalization"], ["--disable-rewards-normalization"],
    ["--advantage-estimator", "reinforce_plus_plus_baseline"], ["--advantage-estimator", "ppo"],
], ids=str)  # fmt: skip
def test_without_a_quorum_the_hook_gives_what_slime_itself_does(flags: list[str], url: str, work: Path) -> None:
    """The method of slime's manager with and without the hook, on the same samples."""
    run = Run(url, work, *HOOK, *flags)
    manager = run.manager()
    samples = [sample for group in run(0).samples for sample in group]
    raw, theirs = manager._post_process_rewards(samples)
    manager.custom_reward_post_process_func = run.hook
    assert manager._post_process_rewards(samples) == (raw, pytest.approx(theirs, abs=1e-5))
    assert any(theirs)
    run.close()


@pytest.mark.skipif(not os.environ.get("MILES_TREE"), reason="no --miles PATH")
def test_a_quorum_in_miles(url: str, work: Path) -> None:
    """miles' own conversion, which counts a sample by its index, with its own loader of the hook."""
    run = Run(
        url, work, *HOOK, "--custom-rm-path", "adapters.real_slime.hooks_of_a_user.fails_for_one", trainer="miles",
        april={"group_quorum": 0.75, "on_failed_sample": "replace"},
    )  # fmt: skip
    convert = run.trainer.get("ray.rollout.train_data_conversion.convert_samples_to_train_data")
    seen: Counter[int] = Counter()
    for rollout_id in range(8):
        run.update(rollout_id)
        output = run.function(run.args, rollout_id, run.data)
        samples = [sample for group in output.samples for sample in group]
        train = convert(
            run.args, samples, metadata={"prompt_group_sizes": [len(group) for group in output.samples]},
            custom_convert_samples_to_train_data_func=None, custom_reward_post_process_func=run.hook,
        )  # fmt: skip
        assert len(set(train["rollout_ids"])) == 32
        assert train["rollout_mask_sums"] == [sum(mask) for mask in train["loss_masks"]]
        assert train["rewards"] == [s.metadata["april"]["advantage"] for s in samples]
        seen.update(train["rollout_ids"])
    assert set(seen.values()) == {1}
    assert min(seen) < 0
    assert not sum(run.books.dropped.values())
    run.function.close()


@pytest.mark.skipif(not os.environ.get("MILES_TREE"), reason="no --miles PATH")
def test_miles_loads_the_function(url: str, work: Path) -> None:
    """miles' own loader and caller, twenty rounds."""
    run = Run(url, work, trainer="miles")
    get = run.trainer.get
    given = get("rollout.base_types.RolloutFnConstructorInput")(args=run.args, data_source=run.data)
    load = get("rollout.inference_rollout.compatibility.load_rollout_function")
    loaded = load(given, "april.adapters.slime.generate_rollout")
    call = get("rollout.inference_rollout.compatibility.call_rollout_function")
    for rollout_id in range(20):
        run.update(rollout_id)
        asked = get("rollout.base_types.RolloutFnTrainInput")(rollout_id=rollout_id, weight_version=rollout_id + 1)
        for group in call(loaded, asked).samples:
            run.trained[group[0].group_index] += 1
            run.resumed += sum(map(check, group))
    function: RolloutFunction = loaded.fn
    run.function.sessions = function.sessions
    assert run.resumed
    run.close()


def test_a_reward_that_waits_for_another_server(url: str, work: Path) -> None:
    """Rewards run on slime's own loop, where its HTTP client lives, while generation goes on."""
    run = Run(url, work, "--custom-rm-path", "adapters.real_slime.hooks_of_a_user.asks_the_server")
    for rollout_id in range(3):
        for group in run(rollout_id).samples:
            assert all(s.reward >= 0 for s in group)
    run.close()
