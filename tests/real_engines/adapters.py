"""``python -m tests.real_engines.adapters [vllm|sglang]``: a policy that is an adapter (LoRA), on a real server.

Eight updates through a scheduler, each an adapter under a new name, with responses that are cut and resumed; then three
versions that run at the same time. Every token's log-probability is compared with a forward pass of transformers with
the adapter of its version; what does not fit is refused before anything is hurt. Ends with status 1 if a promise is
broken.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file

import april
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Engine, Request
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import HERE, ROOT
from tests.real_engines.models import make_models
from tests.real_engines.servers import Server, emptied, end, opened, program, ready

UPDATES, RANK, ALPHA, CONTEXT, BOUND = 8, 8, 16, 1024, 1e-4
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PER_VERSION = 8
APART = 0.1
"""Nats by which two versions differ at least, somewhere; else the comparison would prove nothing."""


class Policies:
    """The model with the adapter of a version, as PEFT computes it: W + alpha / r * B A."""

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        read: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = read.eval()
        self._base = {n: p.detach().clone() for n, p in self._model.named_parameters() if self._is_adapted(n)}
        self._folder, self._now = folder, 0

    @staticmethod
    def _is_adapted(name: str) -> bool:
        return name.split(".")[-2] in LAYERS

    def write(self, n: int, rank: int = RANK) -> str:
        """The directory of adapter ``n``: another random one for each."""
        draw = torch.Generator().manual_seed(n)
        tensors = {}
        for name, weight in self._base.items():
            layer = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=draw) * 0.1
            tensors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=draw) * 0.1
        where = self._folder / f"adapter{n}"
        where.mkdir(parents=True)
        save_file(tensors, where / "adapter_model.safetensors", metadata={"format": "pt"})
        said = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": list(LAYERS),
        }  # fmt: skip
        (where / "adapter_config.json").write_text(json.dumps(said), "utf-8")
        return str(where)

    @torch.no_grad()
    def logprobs(self, n: int, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
        """float32 [T], of the tokens after the prompt under version ``n``."""
        if n != self._now:
            adapter = load_file(self._folder / f"adapter{n}" / "adapter_model.safetensors") if n else {}
            for name, weight in self._model.named_parameters():
                if name in self._base:
                    weight.copy_(self._base[name])
                    if n:
                        layer = "base_model.model." + name.removesuffix(".weight")
                        a, b = adapter[f"{layer}.lora_A.weight"], adapter[f"{layer}.lora_B.weight"]
                        weight.add_(ALPHA / RANK * (b @ a))
            self._now = n
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


class Found:
    """The largest differences: to a token's own version, and to the version before it."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self.tokens, self.worst, self.apart = 0, 0.0, 0.0
        self.versions: set[int] = set()

    def compare(self, n: int, prompt: Sequence[int], tokens: Sequence[int], logprobs: Any) -> None:
        """Hold tokens that are said to be of version ``n`` against it."""
        if not len(tokens):
            return
        self.worst = max(self.worst, float(np.abs(self._policies.logprobs(n, prompt, tokens) - logprobs).max()))
        if n:
            other = np.abs(self._policies.logprobs(n - 1, prompt, tokens) - logprobs)
            self.apart = max(self.apart, float(other.max()))
        self.tokens += len(tokens)
        self.versions.add(n)

    def figures(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "versions": len(self.versions), "largest difference": self.worst,
            "to the version before": self.apart,
        }  # fmt: skip

    def wrong(self, what: str) -> list[str]:
        """What is broken, a sentence each."""
        found = []
        if not self.worst <= BOUND:
            found.append(f"{what}: a log-probability differs from its version by {self.worst:.1e}")
        if not self.apart > APART:
            found.append(f"{what}: versions differ by {self.apart:.1e} nats, which proves nothing")
        return found


def run_updates(settings: dict[str, Any], policies: Policies) -> tuple[dict[str, Any], list[str]]:
    """Eight versions through a scheduler: responses are cut by each update, and go on under the next."""
    found, resumed, spans, seconds = Found(policies), 0, 0, list[float]()
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=5, max_response_len=300,
        max_staleness=UPDATES, engine=settings, sampling={"stop_token_ids": list(range(300, 304))},
    )  # fmt: skip
    prompts = [[20 + i, 60 + i, *range(100, 140)] for i in range(80)]
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0, progress=False) as rollouts:
        for n in range(UPDATES + 1):
            for sample in rollouts.next_batch().samples:
                prompt = sample.prompt.token_ids.tolist()
                resumed += bool(sample.resumes)
                spans = max(spans, len({s.version for s in sample.segments}))
                for s in sample.segments:
                    before = [*prompt, *sample.tokens[: s.start].tolist()]
                    part = slice(s.start, s.start + s.count)
                    found.compare(s.version.n, before, sample.tokens[part].tolist(), sample.logprobs[part])
            evaluated = rollouts.evaluate(prompts[:2], max_tokens=30).responses
            for asked, (response,) in zip(prompts[:2], evaluated, strict=True):
                found.compare(n, asked, response.tokens.tolist(), response.logprobs)
            if n < UPDATES:
                path, began = policies.write(n + 1), time.monotonic()
                if rollouts.weight_update(path=path) != PolicyVersion(0, n + 1):
                    return {}, ["an update has another version than its own"]
                seconds.append(time.monotonic() - began)
        rollouts.validate()
    wrong = found.wrong("updates")
    if len(found.versions) <= UPDATES:
        wrong.append(f"updates: of {UPDATES + 1} versions {sorted(found.versions)} were seen")
    if not resumed or spans < 2:
        wrong.append(f"updates: {resumed} responses were resumed, the longest over {spans} versions")
    figures = {"resumed": resumed, "versions in one response": spans, "longest update, s": round(max(seconds), 3)}
    return found.figures() | figures, wrong


async def _generate(
    engine: Engine, name: int, prompt: list[int], tokens: int
) -> tuple[list[int], list[float], set[PolicyVersion]]:
    # without min_tokens, under which SGLang's log-probabilities are those of fewer tokens
    sampling = SamplingParams(tokens, seed=name)
    ids, got = np.array(prompt, np.int32), (list[int](), list[float](), set[PolicyVersion]())
    async for chunk in engine.generate(Request(attempt_id=f"{name:032x}", token_ids=ids, sampling=sampling)):
        got[0].extend(chunk.tokens.tolist())
        got[1].extend(chunk.logprobs.tolist())
        got[2].update([chunk.version] if len(chunk.tokens) else [])
    return got


async def whole_and_adapter(
    settings: dict[str, Any], policies: Policies, others: Policies, models: dict[str, Path]
) -> tuple[dict[str, Any], list[str]]:
    """Whole weights go into the model of a server with adapters, an adapter over them, and the first model back."""
    engine = await opened(settings)
    found, prompt, wrong = Found(others), list(range(100, 150)), list[str]()
    last = Found(policies)
    try:
        adapter = others.write(1)
        for name, path, n, held in (
            (1, adapter, 0, None), (2, str(models["second"]), 0, found), (3, adapter, 1, found),
            (4, str(models["first"]), 0, last),
        ):  # fmt: skip
            await engine.pause()
            await engine.update_weights(PolicyVersion(0, name), path)
            await engine.resume()
            ids, logprobs, versions = await _generate(engine, name, prompt, 60)
            if held is not None:
                held.compare(n, prompt, ids, logprobs)
            if versions != {PolicyVersion(0, name)}:
                wrong.append(f"whole and adapter: tokens of version {name} are called {versions}")
    finally:
        await engine.close()
    if last.worst > BOUND:
        wrong.append(f"whole and adapter: the first model, loaded again, differs by {last.worst:.1e}")
    return found.figures(), wrong + found.wrong("whole and adapter")


async def three_at_once(settings: dict[str, Any], policies: Policies) -> tuple[dict[str, Any], list[str]]:
    """Requests of three versions run at the same time; the first version's end, cut, goes on under the last."""
    engine = await opened(settings)
    found, alive, wrong = Found(policies), 0, list[str]()

    generate = partial(_generate, engine)
    try:
        running_now: dict[int, list[asyncio.Task[Any]]] = {}
        prompt = list(range(100, 150))
        for n in (1, 2, 3):
            await engine.update_weights(PolicyVersion(0, n), str(policies._folder / f"adapter{n}"))
            names = [100 * n + i for i in range(PER_VERSION)]  # some end early
            running_now[n] = [asyncio.create_task(generate(name, prompt, 800)) for name in names]
            await asyncio.sleep(0.1)
        alive = sum(not all(task.done() for task in tasks) for tasks in running_now.values())
        await engine.abort([f"{100 + i:032x}" for i in range(PER_VERSION)])
        for n, tasks in running_now.items():
            for ids, logprobs, versions in await asyncio.gather(*tasks):
                found.compare(n, prompt, ids, logprobs)
                if versions - {PolicyVersion(0, n)}:
                    wrong.append(f"three at once: tokens of version {n} are called {versions}")
        first = [*prompt, *max((task.result()[0] for task in running_now[1]), key=len)]
        ids, logprobs, versions = await generate(9, first, 40)
        found.compare(3, first, ids, logprobs)
        for bad, why in (("wide", "has rank 64"), ("missing", "")):
            path = policies.write(99, 64) if bad == "wide" else str(policies._folder / "missing")
            try:
                await engine.update_weights(PolicyVersion(0, 4), path)
                wrong.append(f"three at once: an adapter that is {bad} was taken")
            except april.EngineError as error:
                if why not in str(error):
                    wrong.append(f"three at once: {error}")
        ids, logprobs, versions = await generate(10, prompt, 40)
        found.compare(3, prompt, ids, logprobs)
        if versions != {PolicyVersion(0, 3)}:
            wrong.append(f"three at once: after a refusal tokens are called {versions}")
        if not (health := await engine.health()).ok:
            wrong.append(f"three at once: {health.detail}")
    finally:
        await engine.close()
    if alive < 3:
        wrong.append(f"three at once: only {alive} ran at the same time")
    return found.figures() | {"alive at once": alive}, wrong + found.wrong("three at once")


def adapters_on(kind: str, model: Path, out: Path) -> Server:
    """A server that takes adapters of up to rank 16, three at once."""
    if kind == "vllm":
        server = vllm_server(kind, model, out, open_routes=True, context=CONTEXT)
        slots = ["--max-loras", "3"]
        server.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    else:
        server = sglang_server(kind, model, out, context=CONTEXT)
        slots = ["--max-loras-per-batch", "4", "--lora-target-modules", "all", "--lora-backend", "torch_native"]
        server.environment["PYTHONPATH"] = f"{HERE / 'sglang_lora_on_cpu'}:{HERE / 'sglang_on_cpu'}"
    server.command = [*server.command, "--enable-lora", "--max-lora-rank", "16", *slots]
    return server


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang.")] = "vllm",
    out: Annotated[Path, typer.Option(help="Where models, adapters and logs go.")] = ROOT / "runs" / "adapters",
) -> None:
    """Hold the server and april to it."""
    emptied(out / kind)
    with program():
        models = make_models(out / kind / "models")
        model = models["first"]
        server = adapters_on(kind, model, out / kind)
        policies, others = Policies(model, out / kind), Policies(models["second"], out / kind / "second")
        with ready(server):
            settings = {"kind": kind, "urls": [server.url]}
            parts: list[tuple[str, Callable[[], tuple[dict[str, Any], list[str]]]]] = [
                ("updates", lambda: run_updates(settings, policies)),
                ("three at once", lambda: asyncio.run(three_at_once(settings, policies))),
                ("whole and adapter", lambda: asyncio.run(whole_and_adapter(settings, policies, others, models))),
            ]
            wrong = []
            for name, part in parts:
                figures, broken = part()
                print(f"{kind}, {name}: {figures}", flush=True)
                wrong += broken
    end(wrong)


if __name__ == "__main__":
    typer.run(main)
