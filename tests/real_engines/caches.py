"""The real vLLM on this CPU, with what other runs left in its caches: are tokens still those of their weights?

``python -m tests.real_engines.caches`` has several trainers follow each other before one server that is never started
anew: every mode of weight updates after every other, on the same prompts, which fill whole blocks of the caches. Each
run begins with the weights that the run before it has left. Then it looks that april refuses a KV connector that finds
keys by tokens alone. vLLM's connectors that offload to the host's memory start on GPUs only.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils.logging import disable_progress_bar

import april
from april.errors import ConfigError
from tests.real_engines.environments import ROOT
from tests.real_engines.keep import BOUND, prompts_of, server_of
from tests.real_engines.models import Updates, make_models
from tests.real_engines.replay import Replay
from tests.real_engines.servers import emptied, end, program, ready

RUNS = ("resubmit", "resubmit", "keep", "keep", "recompute", "recompute", "resubmit", "recompute", "keep", "resubmit")
"""Modes of the runs, in order: each of the nine pairs of modes follows each other once."""
UPDATES = 2
"""Weight updates of each run."""
BY_TOKENS = "ExampleConnector"


def main(
    out: Annotated[Path, typer.Option(help="Where the report and logs go.")] = ROOT / "runs" / "caches",
) -> None:
    """Some two minutes on two cores."""
    assert len(set(pairwise(RUNS))) == 9
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    emptied(out)
    found: dict[str, Any] = {}
    with program():
        weights = Updates(make_models(out / "models")["first"], out / "weights")
        found["runs"] = figures = runs(weights, out)
        print(f"  {json.dumps(figures)}", flush=True)
        found[BY_TOKENS] = refused(weights, out)
        print(f"  {BY_TOKENS}: {found[BY_TOKENS]}", flush=True)
    (out / "caches.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    wrong = [] if figures["largest error"] <= BOUND else [f"tokens are off by {figures['largest error']:.1e}"]
    wrong += [] if figures["tokens found in the cache"] else ["nothing was found in the cache"]
    wrong += [] if "KV connector" in found[BY_TOKENS] else [f"{BY_TOKENS} was not refused"]
    end(wrong)


def runs(weights: Updates, out: Path) -> dict[str, Any]:
    """Have the runs follow each other; return the largest error of each, and how much the cache has served."""
    server = server_of("runs", weights.model, out)
    errors, tokens, first = [], 0, 0
    with ready(server):
        for mode in RUNS:
            config = april.Config(
                rollout_batch_size=2, n_samples_per_prompt=2, generation="continuous", on_weight_update=mode,
                max_response_len=60, max_staleness=9, on_data_end="wrap",
                engine={"kind": "vllm", "urls": [server.url], "first_weights": "present"},
            )  # fmt: skip
            with april.RolloutScheduler(config, prompts=prompts_of((300, 500), 4), reward=None, progress=False) as run:
                samples = list(run.next_batch().samples)
                for n in range(1, UPDATES + 1):
                    run.weight_update(path=str(weights.directory(first + n)))
                    samples += run.next_batch().samples
            began = first

            def load(n: int, began: int = began) -> Any:
                return weights.load(began + n)

            replay = Replay(load, BOUND)
            off = [replay.of(sample).errors for sample in samples]
            errors.append(max(float(e.max()) for e in off))
            tokens += sum(len(e) for e in off)
            first += UPDATES
        hits = server.metric("vllm:prefix_cache_hits_total")
    return {
        "largest error": max(errors), "by run": [f"{m} {e:.1e}" for m, e in zip(RUNS, errors, strict=True)],
        "tokens": tokens, "tokens found in the cache": hits,
    }  # fmt: skip


def refused(weights: Updates, out: Path) -> str:
    """Return the sentence with which april refuses a connector that finds keys by tokens alone."""
    server = server_of(BY_TOKENS, weights.model, out)
    keys = {"shared_storage_path": str(out / "keys")}
    connector = {"kv_connector": BY_TOKENS, "kv_role": "kv_both", "kv_connector_extra_config": keys}
    server.command = [*server.command, "--kv-transfer-config", json.dumps(connector)]
    with ready(server):
        config = april.Config(
            rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=8,
            engine={"kind": "vllm", "urls": [server.url]},
        )  # fmt: skip
        try:
            april.RolloutScheduler(config, prompts=prompts_of([300], 1), reward=None, progress=False).close()
        except ConfigError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    typer.run(main)
