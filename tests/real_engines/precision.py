"""``python -m tests.real_engines.precision``: what float32 and bfloat16 mean for log-probabilities on a real model.

SmolLM2-135M generates on the real vLLM and SGLang with cuts, continuations and weight updates from disk. Every token is
then recomputed by transformers under the weights of its stamp, one response at a time, in float32 and in the precision
of the server. Beside it stands the noise of transformers itself: the same responses padded in one batch, and singly.
Prints a table and writes ``runs/precision/precision.json``.

Ends with status 1 if a float32 server is off by more than FLOAT32_BOUND, or tokens behind a cut are worse than others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

import april
from april.core.batch import DeliveredSample
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import ROOT
from tests.real_engines.keep import Weights
from tests.real_engines.pretrained import questions, smollm2
from tests.real_engines.servers import Server, emptied, end, free_ports, program, running, until_ready

Errors = NDArray[np.float64]
"""Absolute differences of log-probabilities in nats, one per token."""

CONTEXT = 1024
RESPONSE_LEN = 96
STEPS = 4
FLOAT32_BOUND = 2e-3
"""Nats. Thirty layers, sums in another order; a wrong key or position is off by more than 0.1."""
BEHIND_A_CUT = 8
"""Tokens after a continuation that are looked at on their own."""


def main(
    only: Annotated[list[str] | None, typer.Option(help="vllm, sglang")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16")] = None,
    out: Annotated[Path, typer.Option(help="Where the report and logs go.")] = ROOT / "runs" / "precision",
) -> None:
    """Both servers in both precisions; some five minutes each on two cores."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    emptied(out)
    found: dict[str, dict[str, Any]] = {}
    with program():
        weights = Weights(smollm2(), out / "weights")
        for kind in only or ["vllm", "sglang"]:
            for precision in dtype or ["float32", "bfloat16"]:
                name = f"{kind} {precision}"
                print(f"== {name}", flush=True)
                found[name] = measure(kind, precision, weights, out)
                print(f"  {json.dumps(found[name])}", flush=True)
                (out / "precision.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(table(found))
    wrong = [f"{name}: {reason}" for name, figures in found.items() for reason in judge(name, figures)]
    end(wrong)


def measure(kind: str, precision: str, weights: Weights, out: Path) -> dict[str, Any]:
    """Generate on a server, recompute; figures of the differences."""
    (port,) = free_ports(1)
    start = {"vllm": _vllm, "sglang": _sglang}[kind]
    server = start(f"{kind}-{precision}", weights.model, port, out, precision)
    with running([server]):
        until_ready([server])
        samples = _generate(kind, server.url, weights)
    return compare(samples, weights, getattr(torch, precision))


def _vllm(name: str, model: Path, port: int, out: Path, dtype: str) -> Server:
    log = out / f"{name}.log"
    return vllm_server(name, model, port, log, open_routes=True, context=CONTEXT, in_flight=32, dtype=dtype)


def _sglang(name: str, model: Path, port: int, out: Path, dtype: str) -> Server:
    return sglang_server(name, model, port, out / f"{name}.log", context=CONTEXT, in_flight=32, dtype=dtype)


def _generate(kind: str, url: str, weights: Weights) -> list[DeliveredSample]:
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=4, refill="sample", max_in_flight=14, max_response_len=RESPONSE_LEN,
        max_staleness=3, engine={"kind": kind, "urls": [url]},
    )  # fmt: skip
    prompts = [{"token_ids": ids} for ids in questions(weights.model)]
    samples: list[DeliveredSample] = []
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda prompt, response: 0.0) as rollouts:
        for step in range(1, STEPS + 1):
            batch = rollouts.next_batch()
            samples += batch.samples
            print(f"  batch {batch}", flush=True)
            if step < STEPS:
                rollouts.weight_update(path=str(weights.directory(step)))
    return samples


# -------------------------------------------------------------------- recomputing


def compare(samples: Sequence[DeliveredSample], weights: Weights, dtype: torch.dtype) -> dict[str, Any]:
    """Differences between the delivered log-probabilities and recomputations under the weights of each stamp."""
    to_float32, to_own, noise, rounding, behind_cuts = [], [], [], [], []
    for n in sorted({segment.version.n for sample in samples for segment in sample.segments}):
        rows = [s for s in samples if (s.versions[:, 1] == n).any()]
        exact = list(one_by_one(weights.load(n), rows))
        model = weights.load(n).to(dtype)
        single, together = list(one_by_one(model, rows)), padded(model, rows)
        for row, fp32, own, pad in zip(rows, exact, single, together, strict=True):
            at = row.versions[:, 1] == n
            to_float32.append(np.abs(row.logprobs - fp32)[at])
            to_own.append(np.abs(row.logprobs - own)[at])
            noise.append(np.abs(pad - own)[at])
            rounding.append(np.abs(own - fp32)[at])
            for segment in row.segments[1:]:
                if segment.version.n == n:
                    end = segment.start + min(segment.count, BEHIND_A_CUT)
                    behind_cuts.append(np.abs(row.logprobs - own)[segment.start : end])
    return {
        "tokens": int(sum(map(len, to_own))),
        "responses continued": sum(s.resumes > 0 for s in samples),
        "to float32": figures(to_float32),
        "to its own precision": figures(to_own),
        "behind a cut": figures(behind_cuts),
        "transformers, padded against single": figures(noise),
        "transformers, its precision against float32": figures(rounding),
    }


def one_by_one(model: Any, rows: Sequence[DeliveredSample]) -> Iterator[Errors]:
    """Log-probabilities of each response, by a forward pass of its own."""
    for row in rows:
        yield padded(model, [row])[0]


def padded(model: Any, rows: Sequence[DeliveredSample]) -> list[Errors]:
    """Log-probabilities of the responses, all in one forward pass, padded at the right."""
    texts = [[*row.prompt.token_ids.tolist(), *row.tokens.tolist()] for row in rows]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask if len(rows) > 1 else None, use_cache=False).logits.float()
    logs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].double().numpy()
    return [
        line[len(row.prompt.token_ids) - 1 :][: len(row.tokens)] for line, row in zip(logs, rows, strict=True)
    ]


def figures(parts: Sequence[Errors]) -> dict[str, float]:
    """Mean, 99th percentile and largest, in nats."""
    values = np.concatenate([np.zeros(0), *parts])
    if not len(values):
        return {"mean": 0.0, "p99": 0.0, "max": 0.0}
    found = {"mean": values.mean(), "p99": np.quantile(values, 0.99), "max": values.max()}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def judge(name: str, found: dict[str, Any]) -> Iterator[str]:
    """What is wrong with figures."""
    largest = found["to its own precision"]["max"]
    if name.endswith("float32") and largest > FLOAT32_BOUND:
        yield f"log-probabilities differ from a recomputation by up to {largest} nats"
    if not found["responses continued"]:
        yield "no response was continued, so that nothing was shown of cuts"
    cuts, noise = found["behind a cut"], found["transformers, its precision against float32"]
    if cuts["mean"] > 3 * max(found["to its own precision"]["mean"], noise["mean"], FLOAT32_BOUND / 3):
        yield f"tokens behind a cut are off by {cuts['mean']} nats on average"


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown: mean, 99th percentile, largest."""
    columns = [name for name, value in next(iter(found.values()), {}).items() if isinstance(value, dict)]
    lines = [f"| server | tokens | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name, row in found.items():
        cells = [" / ".join(f"{row[c][f]:.2g}" for f in ("mean", "p99", "max")) for c in columns]
        lines.append(f"| {name} | {row['tokens']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
