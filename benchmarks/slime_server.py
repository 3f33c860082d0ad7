"""An SGLang server, and the router before it, for slime and april alike: the timing of a GPU engine, no model.

    python -m benchmarks.slime_server --shorter 8

prints one JSON line, ``{"url": ...}``, and serves on 127.0.0.1 until standard input is closed. ``POST /trainer`` stands
for an update of the weights by the trainer, ``GET /figures`` says what was counted.

Invariant: how long a response is depends only on its prompt and on which of the prompt's n responses it is, over all
its attempts and for every client. The k-th request that begins a prompt gets the k-th length; a request that continues
one is known by its token ids. So two clients that draw the same prompts are given the same lengths.

A log-probability is -1/1024 for each update that the weights of its token had seen, so it tells whose they were.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from aiohttp import web

from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.engines.protocol import EngineFinish, Request
from april.engines.simulated.decode_cost import DecodeCost, roofline
from april.engines.simulated.engine import SimulatedEngine
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from tests.fake_servers.sglang import FakeSglangServer

VOCAB_SIZE, EOS, CONTEXT = 32_000, 1, 1 << 16
PER_UPDATE = 1.0 / 1024
"""Exact in float32, and so is every multiple of it that a run comes to."""
# what slime's client sends besides
SLIME_PARAMS = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "custom_params"}


@dataclass(frozen=True)
class Place:
    """Which response: the k-th one of a prompt, whose ids are the first ``prompt_len`` ones."""

    prompt: int
    k: int
    prompt_len: int


class Responses:
    """Knows the response that a request begins or continues."""

    def __init__(self) -> None:
        self._partials: dict[bytes, list[Place]] = {}
        self._begun: dict[int, set[int]] = {}

    def place_of(self, ids: Int32) -> Place:
        """Of a request with these ids; it is known again only after :meth:`cut`."""
        known = self._partials.get(ids.tobytes())
        if known:
            return known.pop()
        prompt = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=6).digest(), "big")
        begun = self._begun.setdefault(prompt, set())
        place = Place(prompt, next(k for k in count() if k not in begun), len(ids))
        begun.add(place.k)
        return place

    def cut(self, place: Place, ids: Int32) -> None:
        """It was ended early, with these ids so far, the prompt's included."""
        if len(ids) == place.prompt_len:
            self._begun[place.prompt].discard(place.k)
        else:
            self._partials.setdefault(ids.tobytes(), []).append(place)


class TimedSglangServer(FakeSglangServer):
    """Speaks as SGLang; requests take the time that ``cost`` says. Also its own router, so that there is no hop.

    Aborted requests end with the decode step in progress, as SGLang's do.
    """

    def __init__(self, cost: DecodeCost, lengths: ResponseLengths, max_running: int) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, eos=EOS, context=CONTEXT, max_running=max_running, incremental=False)
        self.known_params = self.known_params | SLIME_PARAMS
        self._cost, self._lengths, self._places = cost, lengths, max_running
        self._responses = Responses()
        self._ids = count()
        self._updates = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._served: dict[str, Place] = {}
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    async def start(self) -> str:
        # in the loop: the engine keeps its time
        self.engine = SimulatedEngine(
            "timed", self._cost, self._length_of, max_running=self._places, vocab_size=VOCAB_SIZE, eos_token_id=EOS,
            max_context=CONTEXT,
        )  # fmt: skip
        return await super().start()

    def _runner_options(self) -> dict[str, Any]:
        # longer than any training step: slime's own client knows no other end of a connection
        return super()._runner_options() | {"keepalive_timeout": 3_600.0}

    def _routes(self) -> list[web.RouteDef]:
        return [
            *super()._routes(), web.get("/workers", self._workers), web.get("/readiness", self._ready),
            web.post("/trainer", self._trainer), web.get("/figures", self._figures),
        ]  # fmt: skip

    def _length_of(self, request: Request) -> int:
        place = self._served[request.attempt_id]
        return self._lengths.sample(place.prompt, place.k)

    # ---------------------------------------------------------------- requests

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if str(body.get("rid")).startswith("april-probe"):
            return await super()._generate(request)
        rid = body.setdefault("rid", f"own-{next(self._ids)}")
        refused = self._refusal(body) if rid not in self._served else {"error": {"message": f"Duplicate id {rid}"}}
        if refused is not None:
            self.violations.append(str(refused))
            return web.json_response(refused, status=400)
        ids = np.array(body["input_ids"], np.int32)
        await self._goes_on.wait()
        if request.transport is None or request.transport.is_closing():
            return web.Response()  # its client has left
        place = self._served[rid] = self._responses.place_of(ids)
        wanted = body["sampling_params"]
        asked = Request(
            attempt_id=rid, token_ids=ids,
            sampling=SamplingParams(max_tokens=wanted["max_new_tokens"], temperature=wanted["temperature"]),
            sample_key=(place.prompt, place.k), response_offset=len(ids) - place.prompt_len,
        )  # fmt: skip
        try:
            async for chunk in self.engine.generate(asked):
                tokens, finish = chunk.tokens, chunk.finish
        finally:
            del self._served[rid]
        if finish is EngineFinish.ABORT:
            self._responses.cut(place, np.concatenate([ids, tokens]))
        assert finish is not None
        return web.json_response(self._reply(rid, len(ids), tokens.tolist(), finish))

    def _reply(self, rid: str, prompt_tokens: int, tokens: list[int], finish: EngineFinish) -> dict[str, Any]:
        logprob, n = -PER_UPDATE * (self._updates + 1), len(tokens)
        meta = {
            "id": rid, "finish_reason": {"type": finish.value}, "prompt_tokens": prompt_tokens, "completion_tokens": n,
            "cached_tokens": 0, "weight_version": self.label, "output_token_logprobs_length": n,
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
        }  # fmt: skip
        if n:
            meta["weight_versions"] = [{"version": self.label, "start": 0, "end": n}]
        return {"text": "x" * n, "output_ids": tokens, "meta_info": meta}

    # ---------------------------------------------------------------- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
        named = [rid for rid in self._served if body.get("abort_all") or rid.startswith(str(body.get("rid")))]
        if named:
            task = asyncio.create_task(self._abort_soon(named))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        return web.Response()

    async def _abort_soon(self, rids: list[str]) -> None:
        decoder = self.engine.decoder
        await asyncio.sleep(self._cost.step_s(decoder.running, decoder.kv_tokens))
        await self.engine.abort(rids)

    async def _pause(self, request: web.Request) -> web.Response:
        """As SGLang: by default everything is aborted, and what comes now waits until it goes on."""
        if (await request.json()).get("mode", "abort") != "abort":
            return await super()._pause(request)
        self._goes_on.clear()
        self.pause_mode = "abort"
        while self._served:
            await self._abort_soon(list(self._served))
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._goes_on.set()
        return await super()._continue(request)

    async def _receive(self, request: web.Request) -> web.Response:
        """The trainer's update of paused servers; its names count the weights from 1 on."""
        body = await request.json()
        if self._served or self.pause_mode is None:
            self.violations.append("weights were written while requests ran")
        self.label, self._updates = str(body["weight_version"]), int(body["weight_version"]) - 1
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _relabel(self, request: web.Request) -> web.Response:
        if self._served:
            self.violations.append("the weights were named anew while requests ran")
        return await super()._relabel(request)

    async def _flush(self, request: web.Request) -> web.Response:
        if self._served and self.pause_mode != "retract":
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting")
        return await super()._flush(request)

    async def _v1_loads(self, request: web.Request) -> web.Response:
        decoder = self.engine.decoder
        load = {"num_running_reqs": decoder.running, "num_waiting_reqs": decoder.waiting, "token_usage": 0.0}
        return web.json_response({"loads": [load]})

    async def _workers(self, request: web.Request) -> web.Response:
        worker = {"url": self.url, "is_healthy": True, "worker_type": "regular", "load": 0}
        return web.json_response({"workers": [worker], "total": 1})

    async def _trainer(self, request: web.Request) -> web.Response:
        """New weights, as slime brings them: nothing runs, caches are emptied, the label is the trainer's."""
        body = await request.json()
        if self._served:
            self.violations.append("the trainer found requests at the server")
        self.label, self._updates, self.stale_cache = str(body["label"]), int(body["updates"]), False
        return web.json_response({})

    async def _figures(self, request: web.Request) -> web.Response:
        requests = self.engine.decoder.counters().requests
        return web.json_response({"requests": requests, "violations": self.violations})


async def serve(server: TimedSglangServer) -> None:
    """Until standard input is closed."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    print(json.dumps({"url": await server.start()}), flush=True)
    await over.wait()
    await server.close()


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slime_server")
    parser.add_argument("--model", default="qwen3-4b", help="of april.engines.simulated.decode_cost.MODELS")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--shorter", type=float, default=8.0, help="responses are so many times shorter than meant to")
    parser.add_argument("--median", type=float, default=2500.0, help="of the response lengths that are meant")
    parser.add_argument("--faster", type=float, default=1.0, help="all times are divided by this")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    real = roofline(o.model, o.gpu, o.tensor_parallel)
    # a token of a response that is 8 times shorter stands for 8: in the cache, and where it is prefilled
    cost = DecodeCost(
        real.base_s / o.faster, real.per_sequence_s / o.faster, real.per_kv_token_s * o.shorter / o.faster,
        real.per_prefill_token_s * o.shorter / o.faster, int((real.kv_capacity_tokens or 1 << 40) / o.shorter),
    )  # fmt: skip
    lengths = LognormalLengths(o.median / o.shorter, 0.62, 0.51, seed=o.seed)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(TimedSglangServer(cost, lengths, o.max_running)))


if __name__ == "__main__":
    main()
