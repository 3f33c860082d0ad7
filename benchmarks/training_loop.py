"""Continuous generation with a trainer that takes time: april's core beside a model that shares no code with it.

The reference workload (32 groups x 8, at most 16,384 tokens, four engines of two H100 with Qwen3-4B, 256 samples in
flight) on virtual time, training of 0.25, 1 and 4 batch times, max_staleness 1, 2, 4 and 8. The model is a fluid one:
every sample is a row of a numpy array and gains tokens at the rate of its engine, in equal short times; at each
delivery it asks whether what stays behind can still be trained in time. It also knows a quorum, by which samples
leave once a part of their group is finished. The share is that of the slower of trainer and
engines at their limits; both draw the same lengths. Run: ``python -m benchmarks.training_loop``.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import ResponseLengths
from april.simulate.run import measure
from april.simulate.workload import Workload

TRAIN_TIMES = ("0.25x", "1x", "4x")
BOUNDS = (1, 2, 4, 8)
QUORUMS = (0.5,)
TICK_S = 0.05
"""Between two looks at the state; some ten tokens of every running sample."""


class Model:
    """Engines, a trainer, and at most (max_staleness + 1) batches that are begun and not trained.

    Columns of ``state``, a row per sample that is begun and not delivered: group, tokens to come, tokens so far,
    version of the oldest (-1: none), time of its end (inf: it runs), engine.
    """

    def __init__(
        self, cost: DecodeCost, lengths: ResponseLengths, *, bound: int, train_s: float, quorum: float = 1.0,
        groups: int = 32, n: int = 8, slots: int = 256, engines: int = 4, longest: int = 16_384, prompt: int = 128,
    ) -> None:  # fmt: skip
        self.cost, self.lengths = cost, lengths
        self.bound, self.train_s = bound, train_s
        self.finishers = math.ceil(quorum * n)
        self.n, self.batch, self.slots, self.engines = n, groups * n, slots, engines
        self.longest, self.prompt = longest, prompt
        self.now, self.version, self.drawn = 0.0, 0, 0
        self.training_ends = math.inf
        self.state = np.empty((0, 6))
        self.queue = np.empty((0, 6))
        self.finished_of: dict[int, int] = {}
        self.to_prefill = np.zeros(engines)
        self.changed = True
        """Since it was last looked whether there is a batch."""
        self.delivered: list[tuple[float, float, float, float]] = []
        """Time, tokens, mean and greatest staleness of each batch."""

    def run(self, batches: int) -> None:
        """Until so many are delivered."""
        while len(self.delivered) < batches:
            if self.now >= self.training_ends:
                self._update()
            if self.changed and math.isinf(self.training_ends):
                self.changed = False
                self._deliver()
            self._admit()
            self._decode()

    def _admit(self) -> None:
        out = 0 if math.isinf(self.training_ends) else 1
        running = np.isinf(self.state[:, 4])
        on = np.bincount(self.state[running, 5].astype(int), minlength=self.engines)
        while on.sum() < self.slots:
            if not len(self.queue):
                if len(self.state) + self.n > (self.bound + 1 - out) * self.batch:
                    return
                row = np.minimum(self.lengths.group(self.drawn, self.n), self.longest)
                fresh = [[self.drawn, length, 0.0, -1.0, math.inf, 0.0] for length in row]
                self.queue, self.drawn = np.array(fresh), self.drawn + 1
            first, self.queue = self.queue[:1], self.queue[1:]
            first[0, 5] = engine = int(on.argmin())
            on[engine] += 1
            self.to_prefill[engine] += self.prompt
            self.state = np.vstack([self.state, first])

    def _decode(self) -> None:
        until = min(self.now + TICK_S, self.training_ends)
        s, cost = self.state, self.cost
        running = np.isinf(s[:, 4])
        engine = s[:, 5].astype(int)
        count = np.bincount(engine, running, self.engines)
        resident = np.bincount(engine, running * (s[:, 2] + self.prompt), self.engines)
        prefill_s = np.minimum(self.to_prefill * cost.per_prefill_token_s, until - self.now)
        self.to_prefill -= prefill_s / cost.per_prefill_token_s
        step_s = cost.base_s + cost.per_sequence_s * count + cost.per_kv_token_s * resident
        gained = np.minimum(s[:, 1], ((until - self.now - prefill_s) / step_s)[engine]) * running
        self.now = until
        s[:, 1] -= gained
        s[:, 2] += gained
        s[(gained > 0) & (s[:, 3] < 0), 3] = self.version
        ended = running & (s[:, 1] <= 1e-9)
        s[ended, 4] = self.now
        self.changed |= bool(ended.any())
        for group in s[ended, 0]:
            self.finished_of[int(group)] = self.finished_of.get(int(group), 0) + 1

    def _update(self) -> None:
        """What runs is prefilled again, spread evenly."""
        self.version += 1
        self.training_ends, self.changed = math.inf, True
        s = self.state
        cut = np.flatnonzero(np.isinf(s[:, 4]))
        s[cut, 5] = np.arange(len(cut)) % self.engines
        self.to_prefill += np.bincount(s[cut, 5].astype(int), s[cut, 2] + self.prompt, self.engines)

    def _deliver(self) -> None:
        """If there is a batch, and what stays can still be trained in time."""
        s = self.state
        if not len(s):
            return
        names, place = np.unique(s[:, 0], return_inverse=True)
        finished_of = np.array([self.finished_of.get(int(group), 0) for group in names])[place]
        ready = ~np.isinf(s[:, 4]) & (finished_of >= self.finishers)
        if ready.sum() < self.batch:
            return
        oldest, since = np.where(s[:, 3] < 0, self.version, s[:, 3]), s[:, 4]
        if self.finishers == self.n:  # whole groups: as old as the oldest sample, ready with the last one
            first, last = np.full(len(names), np.inf), np.full(len(names), -np.inf)
            np.minimum.at(first, place, oldest)
            np.maximum.at(last, place, since)
            oldest, since = first[place], last[place]
        slack = self.bound - (self.version - oldest)
        order = np.lexsort((s[:, 0], since, slack, ~ready))
        taken = np.zeros(len(s), bool)
        taken[order[: self.batch]] = True
        for k in range(self.bound + 1):
            if (~taken & (slack <= k)).sum() > k * self.batch:
                return
        ages = self.version - s[taken, 3]
        self.delivered.append((self.now, float(s[taken, 2].sum()), float(ages.mean()), float(ages.max())))
        self.state = s[~taken]
        self.training_ends = self.now + self.train_s

    def figures(self, skip: int, limit: float) -> tuple[float, float, int]:
        """Share of the slower of trainer and engines, mean and greatest staleness, without the first ``skip``."""
        at, tokens, mean, most = np.array(self.delivered[skip - 1 :]).T
        needed = max(float(tokens[1:].sum()) / limit, (len(at) - 1) * self.train_s)
        return needed / float(at[-1] - at[0]), float(mean[1:].mean()), int(most.max())


def compare(train_time: str, bound: int, steps: int, quorums: tuple[float, ...]) -> dict[str, object]:
    """The core and the model, one train time and one bound."""
    ramp = steps // 5
    w = Workload(steps=steps, ramp=ramp, train_time=train_time)
    m = measure(w, w.modes[f"continuous {bound}"]).figures
    limit = w.long_run_limit(256)
    core = max(m["trained_tokens"] / limit, m["steps"] * w.train_s) / m["rollout_s"]

    def model(quorum: float) -> tuple[float, float, int]:
        made = Model(w.cost, w.lengths, bound=bound, train_s=w.train_s, quorum=quorum)
        made.run(steps)
        return made.figures(ramp, limit)

    share, mean, most = model(1.0)
    return {
        "train_time": train_time,
        "max_staleness": bound,
        "core": round(core, 3),
        "core_of_kept_tokens": round(m["fraction_of_limit"], 3),
        "core_staleness": f"{m['staleness_mean']:.2f}/{m['staleness_max']}",
        "core_off_policy_share": round(m["off_policy_share"], 3),
        "core_trainer_idle": round(m["trainer_idle_share"], 3),
        "core_slots_idle": round(m["bubble"], 3),
        "core_dropped_or_masked": m["dropped_tokens"] + m["masked_tokens"],
        "model": round(share, 3),
        "model_staleness": f"{mean:.2f}/{most}",
    } | {f"model_quorum_{q:g}": [round(x, 3) for x in model(q)] for q in quorums}


def main() -> None:
    """Print one JSON object per train time and bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="batches, of which the first fifth is left out")
    parser.add_argument("--train-times", nargs="+", default=TRAIN_TIMES)
    parser.add_argument("--bounds", nargs="+", type=int, default=BOUNDS)
    parser.add_argument("--quorums", nargs="*", type=float, default=QUORUMS)
    asked = parser.parse_args()
    for train_time in asked.train_times:
        for bound in asked.bounds:
            print(json.dumps(compare(train_time, bound, asked.steps, tuple(asked.quorums))), flush=True)


if __name__ == "__main__":
    main()
