"""What becomes of rollouts in slime: its own partial rollout, and april as its rollout function, beside each other.

    python -m benchmarks.slime_rollouts --slime PATH

``PATH`` is a source tree of slime (github.com/THUDM/slime; it is on no package index). Run it where slime can be
imported: ``python -m tests.adapters.real_slime --slime PATH --compare`` makes such an environment first. Each arm is a
process of its own with slime's own data source and namespace, before a server of its own (``benchmarks.slime_server``):
the same prompts, the same response lengths, the same time per decode step. Whose weights wrote a token is read off its
log-probability.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.slime_server import PER_UPDATE
from benchmarks.slime_surroundings import Trainer, write_inputs

ROOT = Path(__file__).resolve().parent.parent
ARMS: dict[str, dict[str, Any] | None] = {"slime": None, "april": {}, "april, refill: sample": {"refill": "sample"}}
"""Settings of april by arm; None: slime's own rollout function."""


@dataclass(frozen=True)
class Result:
    """Of one arm; times in seconds of the wall clock."""

    arm: str
    rounds: int
    drawn: int
    delivered: int
    held: int
    dropped: int
    """By name; see the scheduler's ledger."""
    lost: int
    """Groups: drawn, and neither delivered nor held nor dropped by name."""
    twice: int
    tokens: int
    """Response tokens delivered in the rounds that are counted, as everything below is."""
    rollout_s: float
    """Time inside the rollout function, all rounds together."""
    longest_s: float
    off_policy_share: float
    """Of the delivered tokens, those of older weights than the round's."""
    staleness_mean: float
    """Per sample: updates between the weights of its oldest token and those of its round."""
    staleness_max: int


def run_arm(arm: str, url: str, work: Path, rounds: int, warm: int, flags: list[str]) -> Result:
    """``warm`` rounds that are not in times and shares, and ``rounds`` that are; groups count from the start."""
    trainer = Trainer("slime")
    args = trainer.arguments(url, work, ["--partial-rollout", *flags])
    data = trainer.data_source(args)
    settings = ARMS[arm]
    function: Any
    if settings is None:
        function = trainer.get("rollout.sglang_rollout.generate_rollout")
    else:
        args.april = settings
        adapter = __import__("april.adapters.slime", fromlist=["make_generate_rollout"])
        function = adapter.make_generate_rollout()
    seen: dict[int, int] = {}
    walls, ages = [], []
    tokens = older = 0
    for rollout_id in range(warm + rounds):
        _post(url, "/trainer", {"label": str(rollout_id + 1), "updates": rollout_id})
        begun = time.monotonic()
        groups = function(args, rollout_id, data).samples
        if rollout_id >= warm:
            walls.append(time.monotonic() - begun)
        assert [len(g) for g in groups] == [args.n_samples_per_prompt] * args.rollout_batch_size
        for group in groups:
            seen[group[0].group_index] = seen.get(group[0].group_index, 0) + 1
            for sample in group if rollout_id >= warm else ():
                updates = np.rint(np.array(sample.rollout_log_probs) / -PER_UPDATE).astype(int) - 1
                assert len(updates) == sample.response_length > 0
                tokens += len(updates)
                older += int((updates < rollout_id).sum())
                ages.append(rollout_id - int(updates.min()))
    violations = _get(url, "/figures")["violations"]
    assert not violations, violations[:3]
    held, dropped = _kept(function, data) if settings is not None else (len(data.buffer), 0)
    return Result(
        arm=arm, rounds=rounds, drawn=len(data.drawn), delivered=sum(seen.values()), held=held, dropped=dropped,
        lost=len(data.drawn) - sum(seen.values()) - held - dropped, twice=sum(n > 1 for n in seen.values()),
        tokens=tokens, rollout_s=sum(walls), longest_s=max(walls), off_policy_share=older / tokens,
        staleness_mean=float(np.mean(ages)), staleness_max=max(ages),
    )  # fmt: skip


def _kept(function: Any, data: Any) -> tuple[int, int]:
    """Groups that april holds, and has dropped by name; its books must agree with the data source."""
    (session,) = function.sessions.values()
    session.scheduler.validate()
    prompts = session.scheduler.ledger()["prompts"]
    assert prompts.observed == len(data.drawn), (prompts, len(data.drawn))
    function.close()
    return prompts.held, sum(prompts.dropped.values())


def table(results: list[Result]) -> str:
    """Markdown, one column per arm."""
    first = results[0]
    rows = {
        "groups drawn = delivered + held + dropped by name + **lost**": [
            f"{r.drawn} = {r.delivered} + {r.held} + {r.dropped} + **{r.lost}**" for r in results
        ],
        "delivered tokens per second": [
            f"{r.tokens / r.rollout_s:,.0f} ({r.tokens / r.rollout_s / (first.tokens / first.rollout_s):.2f}x)"
            for r in results
        ],
        "a round: mean, longest": [f"{r.rollout_s / r.rounds:.2f} s, {r.longest_s:.2f} s" for r in results],
        "tokens from older weights": [f"{r.off_policy_share:.0%}" for r in results],
        "staleness of samples: mean, max": [f"{r.staleness_mean:.2f}, {r.staleness_max}" for r in results],
    }
    lines = ["| | " + " | ".join(r.arm for r in results) + " |", "|---" * (len(results) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


@contextlib.contextmanager
def served(flags: list[str]) -> Iterator[str]:
    """A server in a process of its own; its address."""
    command = [sys.executable, "-m", "benchmarks.slime_server", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start (exit status {process.wait()})")
        try:
            yield json.loads(line)["url"]
        finally:
            process.communicate()  # closes its standard input, which it takes for the end


def _get(url: str, route: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}{route}", timeout=30) as reply:  # noqa: S310 - our own loopback server
        return dict(json.load(reply))


def _post(url: str, route: str, body: dict[str, Any]) -> None:
    asked = urllib.request.Request(  # noqa: S310 - our own loopback server
        f"{url}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=30) as reply:  # noqa: S310
        reply.read()


def _arms(o: argparse.Namespace, work: Path) -> list[Result]:
    results = []
    sizes = [f"--{name}={getattr(o, name.replace('-', '_'))}" for name in SIZES]
    for arm in o.arms or ARMS:
        with served(["--shorter", str(o.shorter), "--faster", str(o.faster)]) as url:
            command = [
                sys.executable, "-m", "benchmarks.slime_rollouts", "--slime", str(o.slime), "--arm", arm, "--url", url,
                "--work", str(work), f"--rounds={o.rounds}", f"--warm={o.warm}", *sizes,
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, env=_environment(o.slime), stdout=subprocess.PIPE, check=True)
        results.append(Result(**json.loads(done.stdout.splitlines()[-1])))
        print(results[-1], file=sys.stderr, flush=True)
    return results


def _environment(slime: Path) -> dict[str, str]:
    paths = [str(ROOT), str(slime), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


SIZES = {"rollout-batch-size": 8, "over-sampling-batch-size": 16, "n-samples-per-prompt": 8,
         "rollout-max-response-len": 2048}  # fmt: skip


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slime_rollouts", allow_abbrev=False)
    parser.add_argument("--slime", type=Path, required=True, help="slime's source tree")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that are counted")
    parser.add_argument("--warm", type=int, default=5, help="rounds before, in which the carry fills")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="as slime's flag of this name")
    parser.add_argument("--shorter", type=float, default=8.0, help="responses are so many times shorter")
    parser.add_argument("--faster", type=float, default=1.0, help="the server's times are divided by this")
    parser.add_argument("--arms", nargs="*", choices=[[], *ARMS], help="which ones; all without")
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.arm:
        logging.disable(logging.INFO)
        flags = [word for name in SIZES for word in (f"--{name}", str(getattr(o, name.replace("-", "_"))))]
        with contextlib.redirect_stdout(sys.stderr):
            result = run_arm(o.arm, o.url, o.work, o.rounds, o.warm, flags)
        print(json.dumps(asdict(result)))
        return
    with tempfile.TemporaryDirectory() as work:
        results = _arms(o, write_inputs(Path(work)))
    print(table(results))
    if o.json:
        o.json.write_text(json.dumps([asdict(r) for r in results], indent=1), "utf-8")


if __name__ == "__main__":
    main()
