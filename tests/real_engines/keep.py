"""``python -m tests.real_engines.keep``: requests that go on over weight updates, on the real vLLM on this CPU.

First what is exact: a random model, prompts of 200 to 3,000 tokens whose siblings share them, so little memory that the
server puts requests back, 20 updates in mid-generation, with ``on_weight_update`` keep and recompute. Every delivered
log-probability is compared with a replay by transformers over the keys that the segments name.

Then what it costs, against resubmit in the same run: the time from an update's first call until every response has a
further token, CPU of the server, tokens per second. Writes ``runs/keep/keep.json``.

Ends with status 1 if a token is off by more than BOUND, or what was to happen did not happen.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

import april
from april.core.batch import DeliveredSample
from tests.real_engines.commands import vllm_server
from tests.real_engines.environments import ROOT
from tests.real_engines.going_on import NothingMoves, going_on
from tests.real_engines.models import CONTEXT, VOCAB_SIZE, Updates, make_models
from tests.real_engines.replay import Replay
from tests.real_engines.servers import Server, emptied, end, program, ready

BOUND = 1e-4
"""Nats, float32 on both sides."""
LENGTHS = (200, 450, 1000, 3000)
SIBLINGS = 4
RESPONSE_LEN = 360
BLOCKS = 90
"""Of 128 tokens: the server holds less than half of what is in flight."""
ASKED = 16
MODES = ("resubmit", "keep", "recompute")


def main(
    updates: Annotated[int, typer.Option(min=2, help="Updates in mid-generation, per mode.")] = 20,
    contexts: Annotated[str, typer.Option(help="Prompt lengths for the costs; empty: none.")] = "200,1000,3000",
    out: Annotated[Path, typer.Option(help="Where the report and logs go.")] = ROOT / "runs" / "keep",
) -> None:
    """Some five minutes on two cores, of which the costs take more than half."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    emptied(out)
    found: dict[str, Any] = {}
    wrong: list[str] = []
    with program(NothingMoves):
        weights = Updates(make_models(out / "models")["first"], out / "weights")
        for n in range(updates + 1):
            weights.directory(n)
        found["exact"] = {}
        for mode in ("keep", "recompute"):
            found["exact"][mode] = exact(mode, weights, updates, out)
            print(f"  {json.dumps(found['exact'][mode])}", flush=True)
        wrong = [f"{mode}: {why}" for mode, figures in found["exact"].items() for why in judge(mode, figures, updates)]
        if contexts:
            found["costs"] = costs([int(c) for c in contexts.split(",")], out)
    (out / "keep.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    end(wrong)


def server_of(name: str, model: Path, out: Path, *, blocks: int | None = None, in_flight: int = ASKED) -> Server:
    server = vllm_server(name, model, out, open_routes=True, context=CONTEXT, in_flight=in_flight)
    if blocks is not None:
        server.command = [*server.command, "--num-gpu-blocks-override", str(blocks)]
    return server


def prompts_of(lengths: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Random prompts, of these lengths in turn."""
    rng = np.random.default_rng(0)
    return [{"token_ids": rng.integers(3, VOCAB_SIZE, lengths[i % len(lengths)]).tolist()} for i in range(count)]


# -------------------------------------------------------------------- exactness


def exact(mode: str, weights: Updates, updates: int, out: Path) -> dict[str, Any]:
    """Updates in mid-generation, several per batch; figures of the differences to a replay."""
    print(f"== exact: {mode}", flush=True)
    server = server_of(f"exact-{mode}", weights.model, out, blocks=BLOCKS)
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=SIBLINGS, generation="continuous", on_weight_update=mode,
        max_in_flight=ASKED, max_response_len=RESPONSE_LEN, max_staleness=3 * updates,
        engine={"kind": "vllm", "urls": [server.url]},
    )  # fmt: skip
    samples: list[DeliveredSample] = []
    metrics: list[dict[str, float]] = []
    with ready(server):
        prompts = prompts_of(LENGTHS, 4 * updates)
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda prompt, response: 0.0) as rollouts:
            done = 0
            while done < updates:
                batch = rollouts.next_batch()
                samples += batch.samples
                metrics.append(dict(batch.metrics))
                for n in range(5):  # so that many responses live through several
                    if done < updates:
                        time.sleep(0.3)
                        done += 1
                        rollouts.weight_update(path=str(weights.directory(done)), trained=None if n else batch.id)
                print(f"  {batch}, {done} updates", flush=True)
            for _ in range(2):  # what was in flight at the last ones
                samples += rollouts.next_batch().samples
        preempted = server.metric("vllm:num_preemptions_total")
        salted = server.metric("vllm:prefix_cache_hits_total")
    replay = Replay(weights.load, BOUND)
    replayed = [replay.of(sample) for sample in samples]
    errors, kept = (np.concatenate([getattr(r, name) for r in replayed]) for name in ("errors", "kept"))
    versions = [len({s.version for s in sample.segments}) for sample in samples]
    by_request = [len({s.attempt_id for s in sample.segments}) for sample in samples]
    return {
        "responses": len(samples),
        "tokens": len(errors),
        "kept tokens": int(kept.sum()),
        "largest error": float(errors.max()),
        "largest error of kept tokens": float(errors[kept].max(initial=0.0)),
        "tokens off by more": int((errors > BOUND).sum()),
        "most versions in a response": max(versions),
        "responses with several versions": sum(v > 1 for v in versions),
        "requests per response": float(np.mean(by_request)),
        "responses begun over older keys": sum(sample.segments[0].over is not None for sample in samples),
        "preemptions": preempted,
        "keys written anew by the server": sum(r.anew for r in replayed),
        "tokens found in the cache": salted,
        "aborted attempts": sum(m["aborted_attempts"] for m in metrics),
        "prompt lengths": sorted({len(s.prompt.token_ids) for s in samples}),
    }


def judge(mode: str, figures: dict[str, Any], updates: int) -> Iterator[str]:
    """Yield what is wrong."""
    if figures["tokens off by more"]:
        yield f"{figures['tokens off by more']} tokens are off by up to {figures['largest error']:.1e}"
    if figures["most versions in a response"] < min(3, updates):
        yield "no response has lived through two updates"
    if not figures["preemptions"]:
        yield "the server has put no request back"
    if (figures["kept tokens"] > 0) != (mode == "keep"):
        yield f"{figures['kept tokens']} tokens are said to be over older keys"


# -------------------------------------------------------------------- costs


def costs(contexts: Sequence[int], out: Path) -> dict[str, Any]:
    """Each mode at each context, on a model large enough that a prefill takes time."""
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, initializer_range=0.06, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip
    plain = make_models(out / "endless", eos=False)["first"]
    where = out / "mid"
    shutil.copytree(plain, where)
    model.save_pretrained(where)
    weights = Updates(where, out / "mid-weights")
    server = server_of("costs", where, out)
    found: dict[str, Any] = {}
    with ready(server):
        for context in contexts:
            for mode in MODES:
                found[f"{context} tokens, {mode}"] = cost(mode, context, weights, server)
                print(f"  {context} tokens, {mode}: {json.dumps(found[f'{context} tokens, {mode}'])}", flush=True)
    return found


def cost(mode: str, context: int, weights: Updates, server: Server, times: int = 3) -> dict[str, float]:
    """Updates with two groups of four in flight; the mean of what each took."""
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=SIBLINGS, generation="continuous", on_weight_update=mode,
        max_in_flight=2 * SIBLINGS, max_response_len=1000, max_staleness=9,
        engine={"kind": "vllm", "urls": [server.url], "max_token_loss": 64},
    )  # fmt: skip
    with april.RolloutScheduler(config, prompts=prompts_of([context], 2), reward=lambda p, r: 0.0) as rollouts:
        return going_on(
            rollouts, 2 * SIBLINGS, lambda n: rollouts.weight_update(path=str(weights.directory(1 + n % 2))), times,
            server.cpu_s,
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
