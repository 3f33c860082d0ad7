"""april in verl beside verl's own colocate_async: the same replica, lengths and number of prompts in work.

    python tests/adapters/real_verl/side_by_side.py DIRECTORY [--steps 12] [--arms own april ...] [--restart]

The replica takes 30 ms per decode step whatever is in flight, and gives the responses of a prompt lengths from one list
(lognormal, median 60, at most 164 tokens); N = 4 groups of 4, N' = 8. Prints a line of JSON per arm. Times are real;
the trainer's part of a step is the same in both. With ``--restart`` the process ends there, and another goes on from
its last checkpoint for two steps; then the line also says what was generated anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tiny_verl import END_OF_PROMPT, Outcome, make, train

STEP_S = 0.03
N, SAMPLES = 4, 4
ROWS = 512
"""Enough for one pass: the loader's count of what was drawn begins again with the next."""
OWN = (
    "trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1",
    "algorithm.rollout_correction.rollout_is=token",
)  # fmt: skip
ARMS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "own": (False, (*OWN, "trainer.checkpoint_callback_class=verl_on_cpu.witness.PlainWitness")),
    "april": (True, ("trainer.checkpoint_callback_class=verl_on_cpu.witness.Witness",)),
    "april-sample": (
        True,
        (
            "trainer.checkpoint_callback_class=verl_on_cpu.witness.Witness", "april.refill=sample",
            "april.max_in_flight=32",
        ),
    ),
}


def summary(outcome: Outcome, skip: int) -> dict[str, Any]:
    """Of the steps after the first ``skip`` (the ramp); prompts lost are those of the whole run."""
    steps = [m for m in outcome.metrics if m["step"] > skip]
    rows = [row | {"step": s["step"]} for s in outcome.trained for row in s["rows"]]
    written = Written(outcome)
    ages: list[int] = []
    older = tokens = 0
    for row in rows:
        labels = written.labels(row)
        if row["step"] > skip:
            tokens += len(labels)
            older += sum(label < row["step"] - 1 for label in labels)
            ages.append(row["step"] - 1 - min(labels))
    wait_s = sum(m["timing_s/gen"] for m in steps)
    return {
        "steps": len(steps),
        "trained_tokens": tokens,
        "wait_s": round(wait_s, 2),
        "longest_wait_s": round(max(m["timing_s/gen"] for m in steps), 2),
        "tokens_per_s_of_waiting": round(tokens / wait_s, 1),
        "step_s": round(sum(m["timing_s/step"] for m in steps) / len(steps), 2),
        "late_s": round(sum(lateness(outcome, m) for m in steps), 2),
        "off_policy_share": round(older / tokens, 3),
        "staleness_mean": round(sum(ages) / len(ages), 2),
        "staleness_max": max(ages),
        "prompts_lost": outcome.trained[-1]["drawn"] - len(rows) // SAMPLES - outcome.trained[-1]["open_prompts"],
        "tokens_prefilled_again": sum(len(r["ids"]) for r in outcome.requests if r["ids"][-1] != END_OF_PROMPT),
        "tokens_generated": sum(len(r["tokens"]) for r in outcome.requests),
    }


class Written:
    """Which weights wrote a trained response, by what the replica noted: verl keeps the oldest and newest only."""

    def __init__(self, outcome: Outcome) -> None:
        self._by_ids: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for request in outcome.requests:
            if request["tokens"]:
                self._by_ids.setdefault(tuple(request["ids"]), []).append(request)

    def labels(self, row: dict[str, Any]) -> list[int]:
        """The label of each token."""
        labels: list[int] = []
        while len(labels) < len(row["response"]):
            left = row["response"][len(labels) :]
            candidates = self._by_ids[(*row["prompt"], *row["response"][: len(labels)])]
            found = next(r for r in candidates if r["tokens"] == left[: len(r["tokens"])])
            candidates.remove(found)
            labels += [found["label"]] * len(found["tokens"])
        return labels


def lateness(outcome: Outcome, step: dict[str, Any]) -> float:
    """Seconds between the moment when a step could have stopped (its groups were complete) and when it did."""
    stopped = min(g["time"] for g in outcome.gates if g["label"] == step["step"] - 1)
    finished: dict[tuple[int, ...], list[float]] = {}
    for request in outcome.requests:
        if request["reason"] == "completed":
            ids = request["ids"]
            finished.setdefault(tuple(ids[: ids.index(END_OF_PROMPT) + 1]), []).append(request["time"])
    complete = sorted(max(times) for times in finished.values() if len(times) == SAMPLES)
    ready = complete[step["step"] * N - 1]
    return max(0.0, stopped - max(ready, stopped - step["timing_s/gen"]))


def restarted(first: Outcome, second: Outcome) -> dict[str, Any]:
    """Tokens of the first process that the second one generated anew: those of prompts that it asked from nothing."""
    trained = {tuple(row["prompt"]) for step in first.trained for row in step["rows"]}
    begun = Counter(tuple(r["ids"]) for r in second.requests if r["ids"][-1] == END_OF_PROMPT)
    before: Counter[tuple[int, ...]] = Counter()
    for request in first.requests:
        before[tuple(request["ids"][: request["ids"].index(END_OF_PROMPT) + 1])] += len(request["tokens"])
    again = [p for p, count in begun.items() if count >= SAMPLES and before[p] and p not in trained]
    return {"prompts_begun_again": len(again), "tokens_generated_anew": sum(before[p] for p in again)}


def run(arm: str, directory: Path, steps: int, resume: str) -> Outcome:
    """One process; raises RuntimeError when it fails."""
    april, overrides = ARMS[arm]
    if not (directory / "model").is_dir():
        make(directory, ROWS)
    done = train(
        directory, f"trainer.total_training_steps={steps}", "trainer.save_freq=1", resume,
        "trainer.max_actor_ckpt_to_keep=1", f"data.train_batch_size={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={N}", f"actor_rollout_ref.rollout.n={SAMPLES}", *overrides,
        april=april, VERL_ON_CPU_STEP_S=str(STEP_S),
    )  # fmt: skip
    if done.status:
        raise RuntimeError(done.log[-3000:])
    return done


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    given = parser.parse_args(arguments)
    for arm in given.arms:
        directory = (given.directory / arm).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        done = run(arm, directory, given.steps, "trainer.resume_mode=disable")
        found = {"arm": arm, **summary(done, given.skip)}
        if given.restart:
            after = run(arm, directory, given.steps + 2, "trainer.resume_mode=auto")
            found |= restarted(done, after)
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
