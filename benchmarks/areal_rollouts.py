"""The rollouts of AReaL's training loop: its own executor, and april's in its place, beside each other.

    python -m tests.adapters areal   # once: makes .venv/areal
    .venv/areal/bin/python -m benchmarks.areal_rollouts

Each arm has a server of its own (``benchmarks.areal_server``), AReaL's RemoteSGLangEngine and RLVRWorkflow, and the
calls of AReaL's PPOTrainer in their order; training is a sleep, and the servers go on meanwhile, as on GPUs of their
own. Arms take turns; medians over the turns are printed, with ranges. Staleness is measured: whose weights wrote a
token is read off its log-probability. Mishaps: ``--late-s`` makes answers leave late, ``--fail-every`` lets episodes
raise.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.areal_server import EOS, PER_WEIGHTS

# before areal is imported
os.environ |= {"AREAL_SPMD_MODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parent.parent
GROUPS, SAMPLES, PLACES = 8, 4, 32
BOUNDS = (1, 2, 4)
FIRST_PROMPT = 100


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to make rollouts."""

    april: bool
    bound: int
    """max_head_offpolicyness."""

    @property
    def name(self) -> str:
        """For the table."""
        return f"{'april' if self.april else 'stock'} {self.bound}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one arm's counted steps; times in seconds."""

    tokens: int
    """Response tokens that were trained."""
    wall_s: float
    staleness: float
    """Mean over samples: updates between the weights of the oldest token and those that train on it."""
    staleness_max: int
    off_policy_share: float
    """Of tokens, those of older weights than the ones that train on them."""
    mislabelled: float
    """Share of tokens whose version is not that of their weights."""
    twice: int
    """Prompts that were trained before."""
    skipped: int
    """Prompts far behind the newest trained one (two windows of ``bound + 1`` batches) that were never trained."""


class Tokenizer:
    """What RLVRWorkflow asks for."""

    pad_token_id, eos_token_id = 0, EOS

    def decode(self, ids: Any, **_: Any) -> str:
        """Not looked at."""
        return ""


class Loader:
    """Batches of prompts, each another one."""

    batch_size = GROUPS

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for i in range(self._batches):
            yield [{"messages": [FIRST_PROMPT + i * GROUPS + j, 11, 12, 13]} for j in range(GROUPS)]

    def __len__(self) -> int:
        return self._batches


def ids_of(data: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """The prompt is token ids already."""
    return list(data)


@contextmanager
def server(token_s: float, mean: float) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "benchmarks.areal_server", "--places", str(PLACES), "--token-s", str(token_s),
               "--mean", str(mean)]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield json.loads(process.stdout.readline())["address"]
        process.stdin.close()


def call(address: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET without a body, POST with one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{route}", data)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own server
        found: dict[str, Any] = json.load(answer)
    return found


def areal_config(arm: Arm, longest: int) -> Any:
    """AReaL's configuration; responses of at most ``longest`` tokens."""
    from areal.api import cli_args

    own: dict[str, Any] = {"experiment_name": "e", "trial_name": "t"}
    return cli_args.PPOConfig(
        **own, total_train_epochs=1, tokenizer_path="-", gconfig=cli_args.GenerationHyperparameters(
            max_new_tokens=longest, max_tokens=2 * longest, n_samples=SAMPLES
        ),
        train_dataset=cli_args.TrainDatasetConfig(path="-", type="rl", batch_size=GROUPS),
        actor=cli_args.PPOActorConfig(**own, path="-", backend="fsdp:d1"),
        rollout=cli_args.InferenceEngineConfig(
            **own, backend="sglang:d1", consumer_batch_size=GROUPS, max_concurrent_rollouts=2 * GROUPS,
            max_head_offpolicyness=arm.bound, pause_grace_period=0.0, setup_timeout=60,
        ),
    )  # fmt: skip


def engine_of(arm: Arm, config: Any, address: str) -> Any:
    """AReaL's engine, with april's executor where the arm says so."""
    from areal.engine.sglang_remote import RemoteSGLangEngine

    engine = RemoteSGLangEngine(config.rollout)
    engine.initialize(addr=address, train_data_parallel_size=1)
    if arm.april:
        from april.adapters.areal.settings import config_of
        from april.adapters.areal.trainer import AprilExecutor

        inner = engine._engine
        april = config_of(config, {}, groups=GROUPS, ranks=1)
        executor = AprilExecutor(inner.config, inner, april, (EOS, Tokenizer.pad_token_id))
        inner.workflow_executor.destroy()
        executor.initialize(logger=inner.logger, train_data_parallel_size=1)
        inner.workflow_executor = executor
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(logging.ERROR)
    return engine


def workflow_of(config: Any, fail_every: int) -> Any:
    """AReaL's own, with rewards at once (AReaL's pool of reward processes takes a core to start), and with failures.

    Args:
        config: AReaL's.
        fail_every: every so manieth episode raises; 0: none.
    """
    from areal.workflow.rlvr import RLVRWorkflow

    class Workflow(RLVRWorkflow):  # type: ignore[misc]
        """Counts its episodes."""

        episodes = 0

        async def arun_episode(self, engine: Any, data: Any) -> Any:
            self.episodes += 1
            if fail_every and self.episodes % fail_every == 0:
                raise RuntimeError("a mishap of the environment")
            return await super().arun_episode(engine, data)

        async def _compute_rewards(self, resp: Any, prompt_str: str, task_data: Any) -> float:
            return float(resp.output_len % 2)

    return Workflow(float, config.gconfig, Tokenizer(), get_input_ids_fn=ids_of)


def run(
    arm: Arm, *, warm: int, steps: int, train_s: float, token_s: float, mean: float, longest: int, late_s: float,
    fail_every: int,
) -> Result:  # fmt: skip
    """``warm`` steps that are not counted, and ``steps`` that are."""
    with server(token_s, mean) as address:
        config = areal_config(arm, longest)
        engine = engine_of(arm, config, address)
        call(address, "/mishaps", {"late_s": late_s})
        workflow = workflow_of(config, fail_every)
        loader = Loader(4 * (warm + steps))
        batches, began = [], 0.0
        for step in range(warm + steps):
            if step == warm:
                began = time.perf_counter()
            batches.append(engine.prepare_batch(loader, workflow=workflow, group_size=SAMPLES))
            time.sleep(train_s)
            engine.pause()
            engine.pause_generation()
            call(address, "/update_weights_from_disk", {"model_path": "-"})
            engine.continue_generation()
            engine.set_version(step + 1)
            engine.resume()
        wall, violations = time.perf_counter() - began, call(address, "/figures")["violations"]
        engine.destroy()
    if violations:
        raise RuntimeError(str(violations))
    return result(arm, batches, warm, wall)


def result(arm: Arm, batches: list[Any], warm: int, wall_s: float) -> Result:
    """Figures of the batches after the first ``warm`` ones."""
    tokens = older = mislabelled = 0
    ages: list[int] = []
    trained: list[int] = []
    for version, batch in enumerate(batches):
        for group in batch:
            trained.append(int(group["input_ids"][0][0]))
            for mask, logprobs, labels in zip(group["loss_mask"], group["logprobs"], group["versions"], strict=True):
                here = mask.bool()
                wrote = np.rint(-logprobs[here].numpy() / PER_WEIGHTS).astype(int) - 1
                if version >= warm:
                    mislabelled += int((labels[here].numpy() != wrote).sum())
                    tokens += len(wrote)
                    older += int((wrote < version).sum())
                    ages.append(version - int(wrote.min()))
    behind = max(trained) - 2 * (arm.bound + 1) * GROUPS
    return Result(
        tokens=tokens,
        wall_s=wall_s,
        staleness=sum(ages) / len(ages),
        staleness_max=max(ages),
        off_policy_share=older / tokens,
        mislabelled=mislabelled / tokens,
        twice=len(trained) - len(set(trained)),
        skipped=len(set(range(FIRST_PROMPT, behind)) - set(trained)),
    )


def table(found: dict[Arm, list[Result]]) -> str:
    """A line per arm: medians over the turns, with the range of what is compared."""
    lines = [f"{'arm':10} {'trained tok/s (range)':>26} {'staleness mean':>15} {'max':>4} {'off-policy':>10} "
             f"{'mislabelled':>11} {'skipped':>7} {'twice':>5}"]  # fmt: skip
    for arm, results in found.items():
        rates = [r.tokens / r.wall_s for r in results]
        lines.append(
            f"{arm.name:10} {median(rates):10,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
            f" {median(r.staleness for r in results):15.2f} {max(r.staleness_max for r in results):4}"
            f" {median(r.off_policy_share for r in results):10.2f}"
            f" {median(r.mislabelled for r in results):11.2f} {sum(r.skipped for r in results):7}"
            f" {sum(r.twice for r in results):5}"
        )
    for arm, results in found.items():
        other = next(a for a in found if not a.april and a.bound == arm.bound)
        if arm.april:
            ratios = [(r.tokens / r.wall_s) / (s.tokens / s.wall_s) for r, s in zip(results, found[other], strict=True)]
            lines.append(
                f"{arm.name} over {other.name}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    return "\n".join(lines)


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.areal_rollouts")
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS), help="max_head_offpolicyness")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm", type=int, default=4, help="steps of each arm that are not counted")
    parser.add_argument("--steps", type=int, default=10, help="steps of each arm that are")
    parser.add_argument("--train-s", type=float, default=0.6)
    parser.add_argument("--token-s", type=float, default=0.004)
    parser.add_argument("--mean", type=float, default=120.0, help="tokens per response")
    parser.add_argument("--longest", type=int, default=2_000, help="tokens of a response, at most")
    parser.add_argument("--late-s", type=float, default=0.0, help="answers leave so long after their last token")
    parser.add_argument("--fail-every", type=int, default=0, help="every so manieth episode raises")
    parser.add_argument("--json", action="store_true", help="a line of JSON per arm and turn, and no table")
    given = parser.parse_args()
    words = ("warm", "steps", "train_s", "token_s", "mean", "longest", "late_s", "fail_every")
    numbers = {name: getattr(given, name) for name in words}
    arms = [Arm(april=april, bound=bound) for bound in given.bounds for april in (False, True)]
    found: dict[Arm, list[Result]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as names:
        from areal.api.cli_args import NameResolveConfig
        from areal.utils import name_resolve

        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=names))
        for turn in range(given.turns):
            for arm, results in found.items():
                results.append(run(arm, **numbers))
                line = {"turn": turn, "arm": arm.name} | asdict(results[-1])
                print(json.dumps(line), file=sys.stdout if given.json else sys.stderr, flush=True)
    if not given.json:
        print(f"N = {GROUPS} groups of {SAMPLES}, {PLACES} places, {numbers}, {given.turns} turns")
        print(table(found), flush=True)
    # threads of AReaL's pools never end
    os._exit(0)


if __name__ == "__main__":
    main()
