"""A scripted inference server on loopback, in vLLM's shapes, with all the trouble that the suite asks for.

``/inference/v1/generate`` takes token ids, ``/v1/chat/completions`` messages. Both may stand below ``/s/NAME``, which
names a session. An abort ends a request with what it has and ``finish_reason: abort``, as vLLM's for a weight update.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from typing import Any

from aiohttp import web

from april.core.versions import PolicyVersion
from april.testing.gateway import Attempt
from april.testing.gateway.script import TOKENIZER, reply, word_of
from april.testing.records import fake_logprobs

FIRST_TOKENS = 8
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def rendered(messages: list[dict[str, Any]], tools: Any) -> list[int]:
    """A conversation in Qwen's template, nearly."""
    text = f"<|im_start|>system\n# Tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            said = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
            content += f"<tool_call>\n{said}\n</tool_call>"
        text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    return TOKENIZER.encode(text + "<|im_start|>assistant\n")


class Engine:
    """The server, on the running loop."""

    def __init__(self) -> None:
        self.url = ""
        self.version = PolicyVersion(0, 0)
        self.refuses = self.holds = False
        self.refused = 0
        self.attempts: dict[str, list[Attempt]] = defaultdict(list)
        self.standing: dict[asyncio.Future[str], web.Request] = {}

    async def start(self) -> None:
        """Begin to listen."""
        app = web.Application()
        for base in ("", "/s/{session}", "/s/{session}/v1", "/v1"):
            app.router.add_get(base + "/models", self._models)
            app.router.add_post(base + "/chat/completions", self._chat)
            app.router.add_post(base + "/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End."""
        self._go_on("")
        await self._runner.cleanup()

    def release(self) -> None:
        """Hold nothing any more."""
        self.holds = False
        self._go_on("")

    def abort(self) -> None:
        """End what stands with what it has."""
        self._go_on("abort")

    def die(self) -> None:
        """Cut the connections of what stands."""
        for request in self.standing.values():
            if request.transport is not None:
                request.transport.abort()
        self._go_on("dead")

    def update(self) -> None:
        """New weights, and what stands is aborted."""
        self.version = PolicyVersion(0, self.version.n + 1)
        self.abort()

    def _go_on(self, how: str) -> None:
        for waiting in list(self.standing):
            if not waiting.done():
                waiting.set_result(how)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 8192}]})

    async def _made(
        self, request: web.Request, context: list[int], budget: int | None
    ) -> tuple[list[int], list[float], str]:
        """Tokens, log-probabilities and the reason of the end; raises HTTPException for a refusal."""
        if self.refuses:
            self.refused += 1
            error = {"message": "Generation is paused. Please retry after it resumes.", "code": 503}
            raise web.HTTPServiceUnavailable(text=json.dumps({"error": error}), content_type="application/json")
        tokens, finish, version = reply(context), "stop", self.version
        if budget is not None and len(tokens) > budget:
            tokens, finish = tokens[:budget], "length"
        if self.holds and word_of(context).startswith("long") and len(tokens) > FIRST_TOKENS:
            waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.standing[waiting] = request
            try:
                how = await waiting
            finally:
                del self.standing[waiting]
            if how:
                tokens, finish = tokens[:FIRST_TOKENS], how
        logprobs = fake_logprobs(tokens, version).tolist()
        session = request.match_info.get("session") or request.headers.get("X-Session-ID", "")
        made = Attempt(context=context, tokens=tokens, logprobs=logprobs, versions=[version] * len(tokens))
        self.attempts[session].append(made)
        return tokens, logprobs, finish

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        budget = (body.get("sampling_params") or {}).get("max_tokens")
        tokens, logprobs, finish = await self._made(request, body["token_ids"], budget)
        choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": finish}
        choice["logprobs"] = {"content": _content(tokens, logprobs)}
        return web.json_response({"request_id": f"r{id(request):x}", "choices": [choice]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        context = rendered(body["messages"], body.get("tools"))
        budget = body.get("max_tokens") or body.get("max_completion_tokens")
        tokens, logprobs, finish = await self._made(request, context, budget)
        text = TOKENIZER.decode(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text.removesuffix("<|im_end|>")}
        if (found := CALL.findall(text)) and body.get("tools"):
            called = [json.loads(call) for call in found]
            message["content"] = text.split("<tool_call>")[0]
            message["tool_calls"] = [
                {"id": f"call_{len(context)}_{i}", "type": "function",
                 "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
                for i, c in enumerate(called)
            ]  # fmt: skip
            finish = "tool_calls" if finish == "stop" else finish
        count = {"prompt_tokens": len(context), "completion_tokens": len(tokens)}
        return web.json_response({
            "id": f"c{id(request):x}", "object": "chat.completion", "created": 0, "model": "tiny",
            "prompt_token_ids": context, "usage": {**count, "total_tokens": sum(count.values())},
            "choices": [{"index": 0, "finish_reason": finish, "token_ids": tokens, "message": message,
                         "logprobs": {"content": _content(tokens, logprobs)}}],
        })  # fmt: skip


def _content(tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    pairs = zip(tokens, logprobs, strict=True)
    return [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]
