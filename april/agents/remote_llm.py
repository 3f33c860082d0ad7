"""The ``llm`` of a rollout function in another process; it sends calls to the scheduler's process over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import aiohttp
from aiohttp import web

from april import errors
from april.agents.chat import Answer, RequestError
from april.agents.endpoint import Endpoint, check_key
from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.core.types import SampleId
from april.driver.llm import AFTER_ITS_END, LLM, Completion, SampleRun, SamplingArguments
from april.driver.user_code import message_of
from april.errors import RolloutError, UsageError
from april.serialization.own_values import pack, unpack


@dataclass(frozen=True, slots=True)
class RemoteLLM:
    """A handle of an ``llm`` that is sent to the process in which the rollout function runs."""

    url: str
    """Base URL for the calls of the ``llm``."""
    key: str = field(repr=False)
    sample_id: SampleId
    sampling: SamplingParams
    sample_run: SampleRun

    def open(self, http: aiohttp.ClientSession) -> LLM:
        """Return an ``LLM`` for the process that has received this handle."""
        client = _LLMClient(self, http)
        return LLM(
            self.sample_id, self.sampling, client.generate, client.open_endpoint, lambda: client, lambda runs: None,
            self.sample_run,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _EndpointAddress:
    url: str
    key: str = field(repr=False)


class LLMServer:
    """The server that answers calls of :class:`RemoteLLM`; it also has the endpoints for clients.

    Args:
        host: address to listen on, reachable from the other processes.
    """

    def __init__(self, host: str) -> None:
        self._llms: dict[str, tuple[str, LLM, asyncio.AbstractEventLoop]] = {}
        self.endpoint = Endpoint(host=host, add_routes=self._add_route)
        self.endpoint.start()

    def _add_route(self, router: web.UrlDispatcher) -> None:
        router.add_post("/{path}/llm/{method}", self._answer)

    @contextmanager
    def serve(self, llm: LLM) -> Iterator[RemoteLLM]:
        """Answer the calls of an ``llm`` of the running event loop while the ``with`` block runs."""
        path, key = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._llms[path] = key, llm, asyncio.get_running_loop()
        try:
            yield RemoteLLM(f"{self.endpoint.url}/{path}/llm/", key, llm.sample_id, llm.sampling, llm.sample_run)
        finally:
            del self._llms[path]

    async def _answer(self, request: web.Request) -> web.Response:
        found = self._llms.get(request.match_info["path"])
        if found is None:
            return _error_response(RolloutError(AFTER_ITS_END))
        key, llm, loop = found
        check_key(request, key, "the key does not belong to this llm")
        arguments = unpack(await request.read(), dict[str, Any])
        call = asyncio.run_coroutine_threadsafe(self._call(llm, request.match_info["method"], arguments), loop)
        try:
            # a broken connection does not end the call: the rollout function's process reports when the function ends
            return web.Response(body=pack(await asyncio.shield(asyncio.wrap_future(call))))
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            return _error_response(RolloutError("this sample was given up, so its requests are no longer answered"))
        except Exception as error:
            return _error_response(error)

    async def _call(self, llm: LLM, method: str, arguments: dict[str, Any]) -> Any:
        if method == "generate":
            return await llm.generate(**arguments)
        if method == "chat":
            return await llm.chat(**arguments)
        if method != "endpoint":
            raise RequestError(f"llm has no method {method!r:.50}", 404)
        endpoint = llm.endpoint(self.endpoint.serve)
        return _EndpointAddress(endpoint.url, endpoint.key)


def _error_response(error: Exception) -> web.Response:
    return web.Response(status=422, body=pack((type(error).__name__, message_of(error))))


def _unpack_error(content: bytes) -> Exception:
    name, message = unpack(content, tuple[str, str])
    kind = getattr(errors, name, RolloutError)
    return kind(message)


class _LLMClient:
    def __init__(self, remote: RemoteLLM, http: aiohttp.ClientSession) -> None:
        self._url, self._http = remote.url, http
        self._headers = {"Authorization": f"Bearer {remote.key}", "Content-Type": "application/octet-stream"}

    async def generate(
        self, sampling: SamplingParams, token_ids: Int32 | None, *, any_chain: bool = False, images: Sequence[Any] = (),
        **others: Any,
    ) -> Completion:  # fmt: skip
        arguments = {name: getattr(sampling, name) for name in SamplingArguments.__annotations__}
        ids = None if token_ids is None else token_ids.tolist()
        arguments |= {"token_ids": ids, "any_conversation": any_chain, "images": images}
        return await self._post("generate", arguments, Completion)  # type: ignore[no-any-return]

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
    ) -> Answer:
        arguments = {"messages": messages, "tools": tools, **sampling}
        return await self._post("chat", arguments, Answer)  # type: ignore[no-any-return]

    def close(self) -> Sequence[int]:
        return ()

    def open_endpoint(self, serve: Any = None) -> _EndpointAddress:
        """Open an endpoint; blocks this process's event loop for a moment, because callers are not coroutines."""
        request = Request(self._url + "endpoint", pack({}), self._headers)  # noqa: S310 - a URL of april's server
        try:
            with build_opener(ProxyHandler({})).open(request) as answer:
                return unpack(answer.read(), _EndpointAddress)
        except HTTPError as error:
            raise _unpack_error(error.read()) from None

    async def _post(self, method: str, arguments: Mapping[str, Any], kind: Any) -> Any:
        try:
            content = pack(arguments)
        except TypeError as error:
            raise UsageError(f"llm.{method}: an argument cannot be sent to the scheduler's process: {error}") from None
        async with self._http.post(self._url + method, data=content, headers=self._headers) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise _unpack_error(content)
        return unpack(content, kind)
