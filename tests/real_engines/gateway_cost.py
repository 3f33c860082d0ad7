"""``python -m tests.real_engines.gateway_cost vllm``: what april's endpoint costs, beside the server's chat route.

64 sessions of 4 turns, with OpenAI's client and a history that grows: at april's endpoint, at the server's
``/v1/chat/completions``, and there with log-probabilities, without which nobody can train; in turn. All give the same
answers of the same number of tokens. Counted are the CPU seconds of the client's process, of april's (endpoint, core,
driver, the client of the engine), and of the server's processes, of those that run the model apart from the others; and
the server's own counts of prompt tokens that its cache had.

    ratio       (client + april + server) through april / (client + server) at the chat route, the model left out
    with model  the same with it
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

import april
from tests.real_engines.environments import ROOT
from tests.real_engines.gateway import scripted_server
from tests.real_engines.models import EOS, make_models
from tests.real_engines.scripted import ANSWER
from tests.real_engines.servers import Server, emptied, program, ready

SAYS = "the answer is 56, a tiny model counts to 7 and then to 49, then " * 4
MODEL_PROCESSES = ("EngineCore", "sglang::scheduler")
CACHE = {
    "vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "/reset_prefix_cache"),
    "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total", "/flush_cache"),
}
"""By kind: counts of prompt tokens, and of those that were in the cache; the route that empties it."""
ARMS = ("own route", "with logprobs", "april")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds per request of one round, and the cache's counts."""

    client: float
    april: float
    server: float
    model: float
    prompt: float
    cached: float
    digest: str

    def total(self, *, through: bool, model: bool) -> float:
        """Everything; april counts only if requests went ``through`` it."""
        return self.client + self.april * through + self.server + self.model * model


def cpu_s(server: Server) -> tuple[float, float]:
    """CPU seconds of the processes of a server so far: those that run no model, and those that do."""
    model = server.cpu_s(MODEL_PROCESSES)
    return server.cpu_s() - model, model


def counts(server: Server, kind: str) -> tuple[float, float]:
    """Prompt tokens, and those found in the cache, by the server's own count."""
    prompt, cached, _ = CACHE[kind]
    return server.metric(prompt), server.metric(cached)


def empty_cache(server: Server, kind: str) -> None:
    """Before each round."""
    request = urllib.request.Request(server.url + CACHE[kind][2], method="POST")  # noqa: S310 - our own server
    urllib.request.urlopen(request, timeout=30.0).close()  # noqa: S310 - as above


def ask(doors: Sequence[tuple[str, str]], turns: int, **asks: Any) -> dict[str, Any]:
    """Let the agents ask at these addresses."""
    command = [sys.executable, "-m", "tests.real_engines.agents"]
    asked = json.dumps({"doors": doors, "turns": turns, "asks": asks})
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


class Doors:
    """The rollout function: it hands its address out, and waits until the agents have gone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.open: list[tuple[str, str]] = []
        self.all_open = threading.Event()
        self.waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def __call__(self, prompt: april.Prompt, llm: april.LLM) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        self.waiting.append((loop, over))
        self.open.append((llm.base_url, llm.api_key))
        if len(self.open) == self.count:
            self.all_open.set()
        await over

    def end(self) -> None:
        waiting, self.waiting, self.open = self.waiting, [], []
        self.all_open.clear()
        for loop, over in waiting:
            loop.call_soon_threadsafe(over.set_result, None)


def through_april(rollouts: april.RolloutScheduler, doors: Doors, turns: int) -> dict[str, Any]:
    """One step whose samples are the sessions."""
    told: dict[str, Any] = {}

    def serve() -> None:
        doors.all_open.wait()
        told.update(ask(doors.open, turns))
        doors.end()

    beside = threading.Thread(target=serve)
    beside.start()
    batch = rollouts.next_batch()
    beside.join()
    if len(batch) != doors.count:
        raise SystemExit(f"{len(batch)} rows were delivered for {doors.count} sessions")
    return told


def measured(server: Server, kind: str, run: Callable[[], dict[str, Any]]) -> Cost:
    """A round's costs."""
    empty_cache(server, kind)
    own, before, tokens = time.process_time(), cpu_s(server), counts(server, kind)
    told = run()
    own, after, later = time.process_time() - own, cpu_s(server), counts(server, kind)
    each = 1000.0 / told["requests"]
    return Cost(
        client=told["cpu_s"] * each, april=own * each, server=(after[0] - before[0]) * each,
        model=(after[1] - before[1]) * each, prompt=later[0] - tokens[0], cached=later[1] - tokens[1],
        digest=told["digest"],
    )  # fmt: skip


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang")],
    sessions: Annotated[int, typer.Option(min=1)] = 64,
    turns: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of each arm, after one that is not counted.")] = 3,
) -> None:
    """Print a table of medians; everything goes to runs/engines/gateway-cost-KIND.json."""
    out = ROOT / "runs" / "engines" / f"gateway-cost-{kind}"
    emptied(out)
    model = make_models(out / "models")["first"]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    answer = [*tokenizer.encode(SAYS.strip()), EOS]
    with program():
        server = scripted_server(kind, model, out)
        server.environment[ANSWER] = ",".join(map(str, answer))
        with ready(server):
            found = _rounds(kind, server, tokenizer, sessions, turns, rounds)
    _show(kind, found, len(answer), sessions, turns)
    rows = {arm: [{name: getattr(c, name) for name in Cost.__slots__} for c in found[arm]] for arm in ARMS}
    (out / "cost.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _rounds(kind: str, server: Server, tokenizer: Any, sessions: int, turns: int, rounds: int) -> dict[str, list[Cost]]:
    doors = Doors(sessions)
    config = april.Config.from_mapping({
        "rollout_batch_size": sessions, "n_samples_per_prompt": 1, "max_response_len": 2000,
        "max_in_flight": sessions, "engine": {"kind": kind, "urls": [server.url]},
    })  # fmt: skip
    prompts = ({"token_ids": [1, number]} for number in iter(lambda: 5, None))
    found: dict[str, list[Cost]] = {arm: [] for arm in ARMS}
    with april.RolloutScheduler(
        config, prompts=prompts, rollout=doors, reward=None, tokenizer=tokenizer, progress=False
    ) as rollouts:
        own = [(f"{server.url}/v1", "none")] * sessions
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "own route": lambda: ask(own, turns),
            "with logprobs": lambda: ask(own, turns, logprobs=True),
            "april": lambda: through_april(rollouts, doors, turns),
        }
        for number in range(rounds + 1):
            for arm in (*ARMS[number % 3 :], *ARMS[: number % 3]):
                cost = measured(server, kind, runs[arm])
                print(f"  {arm}: {cost}", flush=True)
                if number:
                    found[arm].append(cost)
    if len({cost.digest for costs in found.values() for cost in costs}) != 1:
        raise SystemExit("the arms gave different answers, and cannot be compared")
    return found


def _show(kind: str, found: dict[str, list[Cost]], answer: int, sessions: int, turns: int) -> None:
    print(f"{kind}: {sessions} sessions of {turns} turns, answers of {answer} tokens; CPU ms per request, medians")
    print("arm            client  april  server  model  prompt tokens  in the cache")
    for arm, costs in found.items():
        parts = [statistics.median(getattr(c, name) for c in costs) for name in ("client", "april", "server", "model")]
        parts[1] *= arm == "april"
        prompt, cached = (statistics.median(getattr(c, name) for c in costs) for name in ("prompt", "cached"))
        told = " ".join(f"{part:>6.2f}" for part in parts)
        print(f"{arm:<13} {told} {prompt:>14.0f} {cached:>13.0f} ({cached / prompt:.1%})")
    for arm in ARMS[:2]:
        for name, model in (("ratio", False), ("with model", True)):
            pairs = zip(found["april"], found[arm], strict=True)
            values = sorted(a.total(through=True, model=model) / o.total(through=False, model=model) for a, o in pairs)
            print(f"over {arm}, {name}: {statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    typer.run(main)
