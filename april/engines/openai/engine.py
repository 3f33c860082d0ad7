"""Engine client for servers with the OpenAI completions route that takes and gives token ids.

Such a server knows no abort and no weight versions. So a request is ended by closing its stream, which keeps everything
that came, and no request lives through a weight update: its version is that of its submission.
"""

from __future__ import annotations

from collections.abc import Sequence

from april.config.engines import OpenAIEngineConfig
from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient, is_page
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import Endpoint, ResponseStream
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import connect_all, why_not_served
from april.engines.http.server_process import UNSAID, Confirmation, ServerProcess
from april.engines.openai.probe import OpenAIFacts, probe_openai
from april.engines.openai.wire import ROUTE, CompletionParser, completion_body
from april.engines.protocol import AbortMeans, Health, Request
from april.errors import EngineError


async def connect_openai(config: OpenAIEngineConfig) -> list[OpenAIEngine]:
    """Make one engine per configured server, each asked what it can do; raises ConfigError and EngineError."""

    async def connect(client: HttpClient) -> OpenAIEngine:
        return OpenAIEngine(client, await probe_openai(client, config))

    return await connect_all(config, connect)


class OpenAIEngine(ServerEngine):
    """One server, of which the probe has found ``facts``. Made by :func:`connect_openai`."""

    def __init__(self, client: HttpClient, facts: OpenAIFacts) -> None:
        super().__init__(client.name, facts.capabilities)
        self._client = client
        self.facts = facts
        self._process = ServerProcess(client, facts.load_route, facts.started_s)
        self._confirmation = Confirmation(self._has_weights, self.name, lambda: not self._process.keeps_weights)
        self._endpoint = Endpoint(
            client=client, route=ROUTE, admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=AbortMeans.CLOSE, marks_end=True, confirmation=self._confirmation,
        )  # fmt: skip

    def generate(self, request: Request) -> ResponseStream:
        """One streamed completion; raises RequestRefused for what the server must not be asked."""
        return ResponseStream(self._endpoint, request, streamed=True)

    def _prepare(self, request: Request, streamed: bool) -> tuple[ResponseReader, bytes]:
        self._check(request)
        shape = self.facts.token_shape
        reader = ResponseReader(CompletionParser(shape, request), self._version, None, len(request.token_ids))
        return reader, completion_body(self.facts.model, shape, request)

    async def _has_weights(self) -> bool | None:
        return (await self._process.check())[0]

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Close the streams; what they have brought so far is still read."""
        self._endpoint.abort(self._to_abort(attempt_ids))

    async def pause(self) -> None:
        """See :class:`ServerEngine`; the server's process is remembered, for the trainer may write weights into it."""
        await super().pause()
        await self._process.pause()

    async def resume(self) -> None:
        """Let requests in again."""
        self._process.resume()
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Record that the trainer has put the weights ``version`` there.

        Raises EngineError where ``path`` is given, requests run, another model would answer, or the server was started
        anew.
        """
        if path is not None:
            raise EngineError(
                f"engine {self.name}: an OpenAI-compatible server has no route that loads weights from disk; hand them "
                "over with weight_update(transfer=...)"
            )
        self.require_idle()
        if why := await why_not_served(self._client, self.facts.asked):
            raise EngineError(why)
        await self._process.take(version)
        self._labels.present = version

    async def health(self) -> Health:
        """``/health``, or the list of models where there is no such route; the load where ``/metrics`` tells it."""
        try:
            reply = await self._client.call("GET", "/health", retry=True)
            if reply.status == 404:
                reply = await self._client.call("GET", "/v1/models", retry=True)
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        if not reply.ok or is_page(reply):
            what = "a page" if reply.ok else str(reply.status)
            return Health(ok=False, detail=f"{self._client.url} answers {what} to a health probe")
        amiss = await why_not_served(self._client, self.facts.asked)
        same, metrics = await self._process.check()
        detail = amiss or {None: UNSAID, False: "the server's process is another one than before", True: ""}[same]
        counters = {"open_streams": float(len(self._endpoint.open))}
        return Health(
            ok=same is not None and not amiss, detail=detail, counters=counters, current=same is not False,
            load=metrics.load,
        )  # fmt: skip

    async def close(self) -> None:
        """Close all streams and connections."""
        self._endpoint.abort(self._endpoint.open)
        await self._client.close()
