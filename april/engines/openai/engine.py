"""Engine for servers with an OpenAI-compatible completions route that takes and returns token ids.

These servers can neither abort a request by its id nor say which weights made its tokens. So april aborts a request by
closing its stream, and reads what has arrived. All requests end before a weight update, so their tokens get the version
at which the request was sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from april.config.engines import OpenAIEngineConfig
from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient, refuses_probe
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute, ResponseStream
from april.engines.http.sent_attachments import Urls
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import connect_all
from april.engines.http.server_process import UNSAID, Confirmation, ServerProcess
from april.engines.openai.probe import OpenAIFacts, probe_openai
from april.engines.openai.wire import ROUTE, CompletionParser, completion_body
from april.engines.protocol import Health, Request
from april.errors import EngineError


async def connect_openai(config: OpenAIEngineConfig) -> list[OpenAIEngine]:
    """Make one engine per configured server, and probe each. Raises ConfigError and EngineError."""

    async def connect(client: HttpClient) -> OpenAIEngine:
        return OpenAIEngine(client, await probe_openai(client, config))

    return await connect_all(config, connect)


class OpenAIEngine(ServerEngine):
    """Engine for one OpenAI-compatible server, whose metrics reveal a restart."""

    def __init__(self, client: HttpClient, facts: OpenAIFacts) -> None:
        super().__init__(client.name, facts.capabilities)
        self._client, self._servers, self._configured_model = client, (client,), facts.asked
        self.facts = facts
        self._process = ServerProcess(client, facts.started_s, facts.metrics_route)
        self._endpoint = GenerateRoute(
            client=client, route=ROUTE, admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=facts.capabilities.abort_means, marks_end=True, routing_key=facts.routing_key,
            confirmation=Confirmation(self._has_weights, self.name, lambda: not self._process.keeps_weights),
        )  # fmt: skip

    def generate(self, request: Request) -> ResponseStream:
        """Start one streamed completion. Raises RequestRefused for a request that the server must not get."""
        return ResponseStream(self._endpoint, request, streamed=True)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        reader = ResponseReader(CompletionParser(request), self._version)
        # TensorRT-LLM gets seeds although it does not honour them: without seeds, requests may share one random stream
        return reader, completion_body(
            self.facts.model, request, is_trtllm=self.facts.is_trtllm, bans=self._capabilities.bans,
            seeds=self._capabilities.honours_seeds or self.facts.is_trtllm, salt=self._labels.salt(self._version),
        )  # fmt: skip

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Close the streams of these attempts (None means all); what has arrived is still read."""
        self._endpoint.abort(self._to_abort(attempt_ids))

    async def _has_weights(self) -> bool | None:
        return (await self._process.check())[0]

    async def pause(self) -> None:
        """Pause like :class:`ServerEngine`, and note the server's start time, to notice a restart."""
        await super().pause()
        await self._process.pause()

    async def resume(self) -> None:
        self._process.resume()
        await super().resume()

    async def _load_whole(self, version: PolicyVersion, path: str | None) -> None:
        """Check that the server was not restarted since the pause in which the trainer has loaded the weights."""
        self.require_idle()
        await self._require_model()
        await self._process.note_weights(version)

    async def health(self) -> Health:
        """Check ``/health``, or the list of models if that route is missing; the load comes from the metrics."""
        try:
            wrong = await refuses_probe(self._client, "/health", "/v1/models")
        except EngineError as error:
            wrong = str(error)
        if wrong:
            return Health(ok=False, detail=wrong)
        amiss = await self._why_not_served()
        same, metrics = await self._process.check()
        detail = amiss or {None: UNSAID, False: "the server's process is not the same as before", True: ""}[same]
        return Health(ok=same is not None and not amiss, detail=detail, current=same is not False, load=metrics.load)

    async def close(self) -> None:
        self._endpoint.abort(self._endpoint.open_streams)
        await self._client.close()
