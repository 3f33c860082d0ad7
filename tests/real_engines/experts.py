"""``python -m tests.real_engines.experts``: routed experts of the real SGLang on this CPU, over cuts and updates.

A random model with experts, several updates of all its weights from a directory, requests cut at each and continued,
and so little memory that the server puts requests back. Every row of every delivered token, the prompt's included, is
compared with transformers' own router under the weights of the version that generated it. Rounding decides only where
two experts are nearly as likely: a row of another set of experts counts as near where the router's numbers are within
NEAR, and as a mismatch elsewhere. The same rows are compared under the next version, to see that the check sees.

Ends with status 1 at a mismatch, or if nothing was continued.

vLLM gives experts on a GPU only. With ``--kind vllm --url URL --model DIRECTORY`` a server of yours is put to the same
test, started on that directory with --enable-return-routed-experts --enable-scale-out and VLLM_SERVER_DEV_MODE=1, in
float32 or with a larger ``--near``.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers.utils.logging import disable_progress_bar

import april
from april.core.batch import DeliveredSample
from april.core.versions import PolicyVersion
from tests.real_engines.commands import sglang_server
from tests.real_engines.environments import ROOT
from tests.real_engines.models import CONTEXT, VOCAB_SIZE, Updates, make_experts
from tests.real_engines.servers import emptied, end, program, ready

NEAR = 1e-4
"""Difference of two numbers of a router, in float32 of the order of 1, within which rounding decides."""
BOUND = 1e-4
"""Nats."""
NAME = "routed_experts"
OTHERWISE = "layers of a token that another version routes otherwise"


class Weights(Updates):
    """A model after each update, as a directory, and its router's own choice."""

    noise = 0.05

    def __init__(self, model: Path, where: Path) -> None:
        super().__init__(model, where)
        self._loaded: dict[int, Any] = {}

    def load(self, n: int) -> Any:
        """As the base class does, once."""
        if n not in self._loaded:
            self._loaded[n] = super().load(n)
        return self._loaded[n]

    def read(self, n: int, ids: list[int], top_k: int) -> tuple[Any, Any, Any]:
        """By transformers: the chosen experts [T, layers, k], how far the last of them is from the next [T, layers],
        and the log-probabilities of ids[1:]."""
        with torch.no_grad():
            out = self.load(n)(torch.tensor([ids]), output_router_logits=True)
        first = torch.stack(list(out.router_logits), 1).float().topk(top_k + 1, -1)
        apart = first.values[..., top_k - 1] - first.values[..., top_k]
        logprobs = out.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return first.indices[..., :top_k].numpy(), apart.numpy(), logprobs.numpy()


class Compared:
    """The rows of delivered samples against transformers."""

    def __init__(self, weights: Weights, near: float = NEAR) -> None:
        self._weights, self._near = weights, near
        self.count: Counter[str] = Counter()
        self.nearest, self.worst = 0.0, 0.0
        """The largest distance at which a row differs; the largest difference of a log-probability."""

    def sample(self, sample: DeliveredSample) -> None:
        """Compare all rows of a sample."""
        ids, rows = [*sample.prompt.token_ids.tolist(), *sample.tokens.tolist()], sample.extras[NAME]
        prompt, made = len(sample.prompt.token_ids), self.versions(sample)
        self.count["samples"] += 1
        self.count["continued samples"] += len({s.attempt_id for s in sample.segments}) > 1
        self.count["samples of several versions"] += len(set(made)) > 1
        self.count["rows of prompts"] += prompt - 1
        if rows.shape != (len(ids) - 1, *rows.shape[1:]):
            self.count["wrong shapes"] += 1
            return
        for version in sorted(set(made)):
            chosen, apart, logprobs = self._weights.read(version.n, ids, rows.shape[-1])
            mine = np.array([v == version for v in made])
            same = self._rows(rows, chosen[:-1], apart[:-1], mine)
            generated = mine & (np.arange(len(mine)) >= prompt - 1)
            off = np.abs(logprobs - np.concatenate((logprobs[: prompt - 1], sample.logprobs)))[generated]
            self.worst = max(self.worst, float(off.max(initial=0.0)))
            later = made[-1] if version != made[-1] else PolicyVersion(version.incarnation, max(version.n - 1, 0))
            if later != version:
                other = _same(rows, self._weights.read(later.n, ids, rows.shape[-1])[0][:-1])
                self.count[OTHERWISE] += int((same & ~other)[mine].sum())

    @staticmethod
    def versions(sample: DeliveredSample) -> list[PolicyVersion]:
        """The version of each row: that of the token which it made; a prompt's is that of the first token."""
        by_token = [s.version for s in sample.segments for _ in range(s.count)]
        return [by_token[0]] * (len(sample.prompt.token_ids) - 1) + by_token

    def _rows(self, rows: Any, chosen: Any, apart: Any, mine: Any) -> Any:
        same = _same(rows, chosen)
        differs = ~same & mine[:, None]
        self.count["tokens compared"] += int(mine.sum())
        self.count["layers of a token compared"] += int(mine.sum()) * rows.shape[1]
        self.count["layers of a token within near"] += int((apart[mine] < self._near).sum())
        self.count["differ within near"] += int((differs & (apart < self._near)).sum())
        self.count["mismatches"] += int((differs & (apart >= self._near)).sum())
        self.count["in the same order"] += int((rows == chosen).all(-1)[mine].sum())
        self.nearest = max(self.nearest, float(apart[differs].max(initial=0.0)))
        return same


def _same(rows: Any, chosen: Any) -> Any:
    return (np.sort(rows, -1) == np.sort(chosen, -1)).all(-1)


def main(
    updates: Annotated[int, typer.Option(min=1, help="Weight updates.")] = 5,
    room: Annotated[int, typer.Option(help="Tokens that the server has memory for.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where models and logs go.")] = ROOT / "runs" / "experts",
    url: Annotated[str, typer.Option(help="A server of yours, in place of SGLang here.")] = "",
    kind: Annotated[str, typer.Option(help="Its engine.kind.")] = "vllm",
    model: Annotated[Path | None, typer.Option(help="Directory of its model.")] = None,
    near: Annotated[float, typer.Option(help="Distance in the router within which rounding decides.")] = NEAR,
    bound: Annotated[float, typer.Option(help="Nats by which log-probabilities may differ.")] = BOUND,
) -> None:
    """Some three minutes on two cores, most of which SGLang takes to start."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    emptied(out)
    with program():
        if url:
            if model is None:
                raise typer.BadParameter("a server of yours needs the directory of its model", param_hint="--model")
            weights = Weights(model, out / "weights")
            samples, figures = rollouts_at({"kind": kind, "urls": [url]}, weights, updates)
        else:
            weights = Weights(make_experts(out / "model"), out / "weights")
            samples, figures = at_sglang(weights, out / "model", updates, room, out)
        found = compare(weights, samples, near) | figures
    print(json.dumps(found, indent=1))
    wrong = [
        why for why, broken in (
            (f"{found['mismatches']} mismatches", found["mismatches"] or found.get("wrong shapes")),
            ("nothing was continued", not found["continued samples"]),
            ("no sample has several versions", not found["samples of several versions"]),
            ("another version would not be seen", not found[OTHERWISE]),
            (f"log-probabilities are off by {found['largest difference of a log-probability']:.1e}",
             found["largest difference of a log-probability"] > bound),
        ) if broken
    ]  # fmt: skip
    end(wrong)


Figures = dict[str, Any]


def at_sglang(
    weights: Weights, model: Path, updates: int, room: int, out: Path
) -> tuple[list[DeliveredSample], Figures]:
    """On a server that is started and stopped."""
    server = sglang_server("sglang", model, out, context=CONTEXT, in_flight=16, room=room, experts=True)
    # it lets requests in as if they were short, and puts some back when its memory is full
    server.command = [*server.command, "--schedule-conservativeness", "0.05"]
    with ready(server):
        samples, figures = rollouts_at({"kind": "sglang", "urls": [server.url]}, weights, updates)
    put_back = re.findall(r"#retracted_reqs: (\d+)", server.log.read_text("utf-8"))
    return samples, figures | {"requests put back": sum(map(int, put_back))}


def rollouts_at(
    engine: dict[str, Any], weights: Weights, updates: int
) -> tuple[list[DeliveredSample], Figures]:
    """Batches with an update after each."""
    config = april.Config(
        rollout_batch_size=4, over_sampling_batch_size=8, n_samples_per_prompt=2, max_response_len=300,
        max_in_flight=16, max_staleness=2 * updates, extras=NAME, engine=engine,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, int(rng.integers(2, 60))).tolist() for _ in range(8 * (updates + 2))]
    samples: list[DeliveredSample] = []
    counters: Counter[str] = Counter()
    for n in range(updates + 1):
        weights.directory(n)
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 0.0, check=True) as rollouts:
        for n in range(updates + 1):
            batch = rollouts.next_batch()
            samples += batch.samples
            counters.update({k: int(batch.metrics[k]) for k in ("aborted_attempts", "resumed_attempts")})
            print(f"  {batch}", flush=True)
            if n < updates:
                rollouts.weight_update(path=str(weights.directory(n + 1)))
        dropped = {str(why): count for why, count in rollouts.ledger()["tokens"].dropped.items()}
    return samples, {**counters, "dropped": dropped, "dtype": str(samples[0].extras[NAME].dtype)}


def compare(weights: Weights, samples: list[DeliveredSample], near: float) -> Figures:
    """All rows of these samples against transformers."""
    began, compared = time.monotonic(), Compared(weights, near)
    for sample in samples:
        compared.sample(sample)
    return {
        **compared.count, "mismatches": compared.count["mismatches"],
        "largest distance at which a layer differs": compared.nearest,
        "largest difference of a log-probability": compared.worst,
        "compared in": time.monotonic() - began,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
