"""Engine client for servers with the OpenAI completions route that takes and gives token ids.

Such a server knows no abort and no weight versions. So a request is ended by closing its stream, which keeps everything
that came, and no request lives through a weight update: its version is that of its submission.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from april.config.engines import OpenAIEngineConfig
from april.core.versions import PolicyVersion
from april.engines.http.answer_size import answer_bytes
from april.engines.http.http_client import HttpClient
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_pool import connect_all
from april.engines.http.server_process import UNSAID, Confirmation, ServerProcess
from april.engines.http.server_words import is_page
from april.engines.http.wire_arrays import empty_chunk
from april.engines.openai.probe import OpenAIFacts, probe_openai
from april.engines.openai.wire import ROUTE, CompletionStream, completion_body
from april.engines.protocol import Chunk, EngineFinish, Health, Request
from april.errors import EngineError


async def connect_openai(config: OpenAIEngineConfig) -> list[OpenAIEngine]:
    """One engine per configured server, each asked what it can do.

    Raises:
        ConfigError: a server cannot do what april needs, or something is missing that it does not tell itself.
        EngineError: a server could not be asked.
    """

    async def connect(client: HttpClient) -> OpenAIEngine:
        return OpenAIEngine(client, await probe_openai(client, config))

    return await connect_all(config, connect)


class OpenAIEngine(ServerEngine):
    """One server, of which the probe has found ``facts``. Made by :func:`connect_openai`."""

    def __init__(self, client: HttpClient, facts: OpenAIFacts) -> None:
        super().__init__(client.name, facts.capabilities)
        self._client = client
        self.facts = facts
        self._open: dict[str, _Inbox] = {}
        self._process = ServerProcess(client, facts.load_route, facts.started_s)
        self._confirmation = Confirmation(self._has_weights, self.name)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """One streamed completion; see the protocol.

        Raises:
            RequestRefused: what the server must not be asked.
            EngineError: the server failed, the stream broke, or it has numbers that cannot be true.
        """
        self._check(request)
        async with self._admission.request(request.attempt_id) as admitted:
            version = self._version
            if not admitted:
                yield empty_chunk(version, EngineFinish.ABORT)
                return
            stream = CompletionStream(self.facts.token_shape, request.token_ids)
            body = completion_body(self.facts.model, self.facts.token_shape, request)
            inbox = self._open[request.attempt_id] = _Inbox(self._client, body, answer_bytes(request))
            try:
                ended = sure = False
                while not ended:
                    payloads, ended = await inbox.next()
                    error = _read_all(stream, payloads)
                    if chunk := stream.take(version):
                        if not sure:
                            await self._confirm(broken=error is not None or inbox.error is not None)
                            sure = True
                        yield chunk
                    if error is not None:
                        raise error
                yield replace(empty_chunk(version, self._end(stream, inbox)), stopped_at=stream.stopped_at)
            finally:
                self._open.pop(request.attempt_id, None)
                await inbox.close()

    async def _confirm(self, *, broken: bool) -> None:
        """Raises EngineError unless what has come is of the present weights; ``broken``: the server may be gone."""
        if not self._process.keeps_weights:
            now_s = asyncio.get_running_loop().time()
            await self._confirmation.since(now_s, patience_s=0.0 if broken else None)

    async def _has_weights(self) -> bool | None:
        return (await self._process.check())[0]

    def _end(self, stream: CompletionStream, inbox: _Inbox) -> EngineFinish:
        """Why the stream ended; raises if it broke off before."""
        if inbox.closing and stream.finish is None:
            return EngineFinish.ABORT
        # what came first counts: the server's own end, if it was read; what comes after that is not waited for
        if inbox.error is not None and not inbox.closing:
            raise inbox.error
        if stream.finish is None or not (stream.done or inbox.closing):
            missing = "finish reason" if stream.finish is None else "[DONE]"
            raise EngineError(f"the stream of {self.name} ended without {missing} after {stream.count} tokens")
        return stream.finish

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Close the streams; what they have brought so far is still read."""
        self._admission.abort(attempt_ids)
        for attempt_id in list(self._open) if attempt_ids is None else attempt_ids:
            inbox = self._open.get(attempt_id)
            if inbox is not None:
                inbox.stop()

    async def pause(self) -> None:
        """See :class:`ServerEngine`; the server's process is remembered, for the trainer may write weights into it."""
        await super().pause()
        await self._process.pause()

    async def resume(self) -> None:
        """Let requests in again."""
        self._process.resume()
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """From now on the weights are ``version``; the trainer has put them there.

        Raises:
            EngineError: ``path`` is given, requests are running, or the server was started anew since it was paused.
        """
        if path is not None:
            raise EngineError(
                f"engine {self.name}: an OpenAI-compatible server has no route that loads weights from disk; hand them "
                "over with weight_update(transfer=...)"
            )
        self.require_idle()
        await self._process.take(version)
        self._labels.present = version

    async def health(self) -> Health:
        """``/health``, or the list of models where there is no such route; the load where ``/metrics`` tells it."""
        try:
            reply = await self._client.call("GET", "/health", retry=True)
            if reply.status == 404:
                reply = await self._client.call("GET", "/v1/models", retry=True)
        except EngineError as error:
            return Health(False, str(error))
        if not reply.ok or is_page(reply):
            what = "a page" if reply.ok else str(reply.status)
            return Health(False, f"{self._client.url} answers {what} to a health probe")
        same, metrics = await self._process.check()
        detail = {None: UNSAID, False: "the server's process is another one than before", True: ""}[same]
        counters = {"open_streams": float(len(self._open))}
        return Health(same is not None, detail, counters, same is not False, metrics.load)

    async def close(self) -> None:
        """Close all streams and connections."""
        for inbox in self._open.values():
            inbox.stop()
        await self._client.close()


class _Inbox:
    """Reads one stream beside its consumer, so that the consumer can be told to stop while the server is silent."""

    def __init__(self, client: HttpClient, body: bytes, limit: int) -> None:
        self.closing = False
        """No more is wanted."""
        self.error: Exception | None = None
        """What the stream broke with."""
        self._payloads: list[bytes] = []
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read(client, body, limit))

    async def next(self) -> tuple[list[bytes], bool]:
        """The events that came since the last call, and whether they are the last."""
        await self._news.wait()
        self._news.clear()
        if self.closing and not self._reader.done():
            # bytes that are here but were not looked at: the reader's turn comes before ours
            await asyncio.sleep(0)
            await self.close()
        payloads, self._payloads = self._payloads, []
        return payloads, self._reader.done() or self.closing

    def stop(self) -> None:
        """End the stream; what has come is still handed out."""
        self.closing = True
        self._news.set()

    async def close(self) -> None:
        """Close the connection, if it is open."""
        self._reader.cancel()
        await asyncio.wait({self._reader})

    async def _read(self, client: HttpClient, body: bytes, limit: int) -> None:
        try:
            async with client.events(ROUTE, body, limit) as pieces:
                async for payloads in pieces:
                    self._payloads += payloads
                    self._news.set()
        except Exception as error:  # the consumer raises it
            self.error = error
        finally:
            self._news.set()


def _read_all(stream: CompletionStream, payloads: list[bytes]) -> EngineError | None:
    """Read until one is wrong; returns what is wrong with it."""
    try:
        for payload in payloads:
            stream.read(payload)
    except EngineError as error:
        return error
    return None
