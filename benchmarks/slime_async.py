"""slime's asynchronous loop, its own train_async.py, with its own rollout functions and with april's, in one run.

    python -m benchmarks.slime_async --slime PATH

``PATH`` and environment: as for ``benchmarks.slime_rollouts``, whose server and surroundings it has. Real are slime's
loop, data source, HTTP client, conversion to training data, and the calls by which its actors pause servers, empty
caches, name weights and let servers go on. The GPUs are not: a batch is trained in ``--train-s`` seconds, weights move
in ``--update-s``. Arms take turns, in both orders; each turn is a process of its own before a server of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.slime_rollouts import ROOT, _environment, _get, served
from benchmarks.slime_server import PER_UPDATE
from benchmarks.slime_surroundings import Trainer, write_inputs

SLOTS = 128
N, SAMPLES = 8, 8
FLAGS = ["--partial-rollout", f"--rollout-batch-size={N}", f"--n-samples-per-prompt={SAMPLES}",
         f"--over-sampling-batch-size={SLOTS // SAMPLES}", "--rollout-max-response-len=2048"]  # fmt: skip
ARMS: dict[str, tuple[str, dict[str, Any] | str]] = {
    "slime": ("train_async", "rollout.sglang_rollout.generate_rollout"),
    "slime, fully async": ("train_async", "rollout.fully_async_rollout.generate_rollout_fully_async"),
    "april, stepwise": ("train_async", {}),
    "april, continuous": ("train_async", {"generation": "continuous"}),
    "april, continuous, bound 2": ("train_async", {"generation": "continuous", "max_staleness": 2}),
    "april, continuous, train.py": ("train", {"generation": "continuous"}),
}
"""slime's loop, and its rollout function or april's settings."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Of one arm; seconds of the wall clock, from the end of a training step to that of another."""

    arm: str
    wall_s: float
    tokens: int
    """Trained."""
    ages: list[int]
    """Per trained sample: updates between the weights of its oldest token and those it was trained on."""


class Worker:
    """Stands for a Ray actor: one call at a time; ``x.remote(...)`` gives what ``get`` waits for."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        pool = ThreadPoolExecutor(1)
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=lambda *given, _m=method: pool.submit(_m, *given)))


def get(waits: Any) -> Any:
    """As ``ray.get``."""
    return waits.result() if isinstance(waits, Future) else [w.result() for w in waits]


class Loop:
    """What slime's loop meets in place of its GPUs."""

    def __init__(self, arm: str, url: str, work: Path, rounds: int, warm: int, train_s: float, update_s: float) -> None:
        self.arm, self.url, self.warm, self.train_s, self.update_s = arm, url, warm, train_s, update_s
        self.trainer = Trainer("slime")
        self.file, rolls = ARMS[arm]
        self.args = args = self.trainer.arguments(url, work, [*FLAGS, f"--num-rollout={warm + rounds + 1}"])
        more = {"colocate": False, "offload_rollout": False, "offload_train": False, "release_train": False,
                "check_weight_update_equal": False, "start_rollout_id": 0, "use_critic": False, "save_interval": None,
                "eval_interval": None, "update_weights_interval": 1, "sglang_server_concurrency": SLOTS,
                "custom_reward_post_process_path": None, "custom_convert_samples_to_train_data_path": None}  # fmt: skip
        vars(args).update(more)
        self.data = self.trainer.data_source(args)
        if isinstance(rolls, str):
            self.function: Any = self.trainer.get(rolls)
        else:
            args.april = {"max_staleness": 4, "engine": {"max_in_flight": SLOTS}, **rolls}
            self.function = __import__("april.adapters.slime", fromlist=["_"]).make_generate_rollout()
        cls = self.trainer.get("ray.rollout.RolloutManager").__ray_metadata__.modified_class
        self.manager = object.__new__(cls)
        self.manager.args, self.manager.generate_rollout, self.manager.data_source = args, self.function, self.data
        self.manager.custom_reward_post_process_func = self.manager.custom_convert_samples_to_train_data_func = None
        self.server = object.__new__(self.trainer.get("backends.sglang_utils.sglang_engine.SGLangEngine"))
        host, _, port = url.removeprefix("http://").partition(":")
        self.server.node_rank, self.server.server_host, self.server.server_port = 0, host, int(port)
        self.updates = 0
        self.tokens, self.ages = 0, list[int]()
        self.begun = self.ended = 0.0
        """Of the steps that are counted."""
        self.groups: set[int] = set()

    def generate(self, rollout_id: int) -> Any:
        samples, _ = type(self.manager)._get_rollout_data(self.manager, rollout_id=rollout_id)
        return samples, type(self.manager)._convert_samples_to_train_data(self.manager, samples)

    def update_weights(self) -> None:
        """The calls of slime's UpdateWeightFromDistributed, in its order."""
        self.server.pause_generation()
        self.server.flush_cache()
        time.sleep(self.update_s)
        self.updates += 1
        self.server.update_weights_from_distributed([], [], [], "group", weight_version=str(self.updates))
        self.server.continue_generation()

    def train(self, rollout_id: int, data: Any) -> None:
        time.sleep(self.train_s)
        samples, _ = data
        self.groups |= {sample.group_index for sample in samples}
        for sample in samples if rollout_id >= self.warm else ():
            made = np.rint(np.array(sample.rollout_log_probs) / -PER_UPDATE).astype(int)
            self.tokens += len(made)
            self.ages.append(self.updates - int(made.min()))
        self.ended = time.monotonic()
        if rollout_id == self.warm - 1:
            self.begun = self.ended

    def run(self, slime: Path) -> Turn:
        """slime's own loop from beginning to end."""
        spec = importlib.util.spec_from_file_location(self.file, slime / f"{self.file}.py")
        assert spec is not None
        assert spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        pool = ThreadPoolExecutor(1)
        actors = SimpleNamespace(
            update_weights=self.update_weights, clear_memory=lambda: None,
            async_train=lambda rollout_id, data: [pool.submit(self.train, rollout_id, data)],
        )  # fmt: skip
        manager = Worker(generate=self.generate, dispose=lambda: None)
        absent = {"configure_logger": lambda: None, "init_tracking": lambda args: None,
                  "finish_tracking": lambda args: None, "create_placement_groups": lambda args: {"rollout": None},
                  "create_rollout_manager": lambda args, group: (manager, None),
                  "create_training_models": lambda *given: (actors, None), "ray": SimpleNamespace(get=get)}  # fmt: skip
        with mock.patch.dict(vars(program), absent):
            program.train(self.args)
        self._check_books()
        violations = _get(self.url, "/figures")["violations"]
        assert not violations, violations[:3]
        return Turn(arm=self.arm, wall_s=self.ended - self.begun, tokens=self.tokens, ages=self.ages)

    def _check_books(self) -> None:
        """Of april's: every group that was drawn is trained once, or held."""
        if hasattr(self.function, "function"):
            (session,) = self.function.sessions.values()
            session.scheduler.validate()
            prompts = session.scheduler.ledger()["prompts"]
            self.function.close()
            assert len(self.groups) == N * self.args.num_rollout
            assert len(self.data.drawn) == len(self.groups) + prompts.held, prompts


def table(turns: list[Turn]) -> str:
    """Markdown, a column per arm, over all its turns."""
    arms = list(dict.fromkeys(turn.arm for turn in turns))
    of = {arm: [turn for turn in turns if turn.arm == arm] for arm in arms}
    ages = {arm: [age for turn in of[arm] for age in turn.ages] for arm in arms}

    def rate(arm: str) -> float:
        return sum(turn.tokens for turn in of[arm]) / sum(turn.wall_s for turn in of[arm])

    rows: dict[str, Callable[[str], str]] = {
        "trained tokens per second of the loop": lambda a: f"{rate(a):,.0f} ({rate(a) / rate(arms[0]):.2f}x)",
        "the same, by turn": lambda a: ", ".join(f"{t.tokens / t.wall_s:,.0f}" for t in of[a]),
        "staleness when trained, in updates: mean, largest": lambda a: f"{np.mean(ages[a]):.2f}, {max(ages[a])}",
    }
    lines = ["| | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(cell, arms))} |" for name, cell in rows.items())])


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slime_async", allow_abbrev=False)
    parser.add_argument("--slime", type=Path, required=True, help="slime's source tree")
    parser.add_argument("--rounds", type=int, default=8, help="of a turn that are counted")
    parser.add_argument("--warm", type=int, default=4, help="rounds before, in which the carry fills")
    parser.add_argument("--turns", type=int, default=2, help="of each arm")
    parser.add_argument("--train-s", type=float, default=4.0, help="seconds of a training step")
    parser.add_argument("--update-s", type=float, default=0.2, help="seconds in which weights move")
    parser.add_argument("--arms", nargs="*", choices=[[], *ARMS], help="which ones; all without")
    parser.add_argument("--json", type=Path, help="write the turns there too")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.turn:
        logging.disable(logging.INFO)
        with contextlib.redirect_stdout(sys.stderr):
            turn = Loop(o.turn, o.url, o.work, o.rounds, o.warm, o.train_s, o.update_s).run(o.slime)
        print(json.dumps(asdict(turn)), flush=True)
        return
    turns, arms = [], list(o.arms or ARMS)
    with tempfile.TemporaryDirectory() as work:
        write_inputs(Path(work))
        for number in range(o.turns):
            for arm in arms if number % 2 == 0 else reversed(arms):
                with served(["--shorter", "8"]) as url:
                    command = [
                        sys.executable, "-m", "benchmarks.slime_async", "--slime", str(o.slime), "--turn", arm,
                        "--url", url, "--work", work, f"--rounds={o.rounds}", f"--warm={o.warm}",
                        f"--train-s={o.train_s}", f"--update-s={o.update_s}",
                    ]  # fmt: skip
                    env = _environment(o.slime)
                    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
                turns.append(Turn(**json.loads(done.stdout.splitlines()[-1])))
                ages = turns[-1].ages
                print({**asdict(turns[-1]), "ages": f"{min(ages)} to {max(ages)}"}, file=sys.stderr, flush=True)
    print(table(sorted(turns, key=lambda turn: arms.index(turn.arm))))
    if o.json:
        o.json.write_text(json.dumps([asdict(t) for t in turns]), "utf-8")


if __name__ == "__main__":
    main()
