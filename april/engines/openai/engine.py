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
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import ServerFacts, connect_all, is_listed, why_not_served
from april.engines.http.server_process import UNSAID, Confirmation, OwnPauses, ServerProcess
from april.engines.http.weight_labels import start_is_known
from april.engines.openai.probe import OpenAIFacts, probe_openai
from april.engines.openai.wire import ROUTE, CompletionParser, completion_body
from april.engines.protocol import Health, Request
from april.errors import EngineError


async def connect_openai(config: OpenAIEngineConfig) -> list[OpenAIEngine]:
    """Make one engine per configured server, each asked what it can do; raises ConfigError and EngineError."""

    async def connect(client: HttpClient) -> OpenAIEngine:
        return OpenAIEngine(client, await probe_openai(client, config))

    return await connect_all(config, connect)


class CompletionsEngine(ServerEngine):
    """Base of engines before one server whose responses end with a mark, and whose metrics tell its process apart."""

    def __init__(
        self, client: HttpClient, facts: ServerFacts, route: str, metrics_route: str | None,
        attachments: SentAttachments | None = None,
    ) -> None:  # fmt: skip
        super().__init__(client.name, facts.capabilities)
        self._client, self._asked = client, facts.asked
        known = start_is_known(facts.label)
        self._process = ServerProcess(client, metrics_route, facts.started_s, start_is_known=known)
        self._confirmation = Confirmation(self._has_weights, self.name, lambda: not self._process.keeps_weights)
        self._pauses = OwnPauses()
        self._endpoint = Endpoint(
            client=client, route=route, admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=facts.capabilities.abort_means, marks_end=True, confirmation=self._confirmation,
            pauses=self._pauses, attachments=attachments or SentAttachments(),
        )  # fmt: skip

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        """The reader and the body of a request, with data URLs of what is attached; raises EngineError for what must
        not be sent.
        """
        raise NotImplementedError

    async def _has_weights(self) -> bool | None:
        """Return whether the server has the present weights; None means that it does not say."""
        return (await self._process.check())[0]

    async def pause(self) -> None:
        """Pause as :class:`ServerEngine` does, and remember the process, for the trainer may write weights into it."""
        await super().pause()
        await self._process.pause()

    async def resume(self) -> None:
        """Let requests in again."""
        self._process.resume()
        await super().resume()

    async def _require_model(self) -> None:
        """Raise EngineError if requests would not be answered by the model that is trained."""
        if why := await why_not_served(self._client, self._asked):
            raise EngineError(why)

    async def _amiss(self) -> tuple[str, bool]:
        """Return why requests would not be answered by the present version, and whether its adapter has gone."""
        present = self._adapters.present
        if present is None:
            return await why_not_served(self._client, self._asked), False
        lost = await is_listed(self._client, present.name) is False
        return (f"the server has no adapter {present.name} any more" if lost else ""), lost

    async def _refuses_probe(self, *routes: str) -> str:
        """Say what is wrong with the answer to a health probe of the first route that is there; or nothing."""
        for route in routes:
            reply = await self._client.call("GET", route, retry=True)
            if reply.status != 404:
                break
        if reply.ok and not is_page(reply):
            return ""
        return f"{self._client.url} answers {'a page' if reply.ok else reply.status} to a health probe"


class OpenAIEngine(CompletionsEngine):
    """A server, of which the probe has found ``facts``. Made by :func:`connect_openai`."""

    def __init__(self, client: HttpClient, facts: OpenAIFacts) -> None:
        super().__init__(client, facts, ROUTE, facts.load_route)
        self.facts = facts

    def generate(self, request: Request) -> ResponseStream:
        """Make one streamed completion; raises RequestRefused for what the server must not be asked."""
        return ResponseStream(self._endpoint, request, streamed=True)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        shape = self.facts.token_shape
        reader = ResponseReader(CompletionParser(shape, request), self._version, None, len(request.token_ids))
        return reader, completion_body(self.facts.model, shape, request, bans=self._capabilities.bans)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Close the streams; what they have brought so far is still read."""
        self._endpoint.abort(self._to_abort(attempt_ids))

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
        await self._require_model()
        await self._process.take(version)
        self._labels.present = version

    async def health(self) -> Health:
        """``/health``, or the list of models where there is no such route; the load where ``/metrics`` tells it."""
        try:
            wrong = await self._refuses_probe("/health", "/v1/models")
        except EngineError as error:
            wrong = str(error)
        if wrong:
            return Health(ok=False, detail=wrong)
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
