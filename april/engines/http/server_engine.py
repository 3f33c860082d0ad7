"""Base class of engines that send requests to a server or an engine object: admission, pauses, weight updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np

from april.core.attachments import collapsed
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.base import EngineBase
from april.engines.http.adapter_files import why_refused
from april.engines.http.http_client import HttpClient
from april.engines.http.loaded_adapters import LoadedAdapter, LoadedAdapters
from april.engines.http.server_probe import is_listed, why_not_served
from april.engines.http.weight_directories import is_adapter
from april.engines.http.weight_labels import WeightLabels, start_is_known
from april.engines.protocol import Capabilities, FirstWeights, Request
from april.errors import EngineError, RequestRefused
from april.text.server_text import quoted

log = logging.getLogger("april")


class Admission:
    """Gate that requests pass before they are sent. While weights change it is closed, and requests wait."""

    def __init__(self) -> None:
        self._open = True
        # attempt id -> result of its wait: True if admitted, False if aborted before it was sent
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._inside: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Admission {state}, {len(self._inside)} inside, {len(self._waiting)} waiting>"

    @property
    def inside(self) -> Collection[str]:
        """Ids of attempts that were admitted and have not ended."""
        return self._inside

    @asynccontextmanager
    async def request(self, attempt_id: str) -> AsyncIterator[bool]:
        """Admit a request for the length of the block; yields False if it was aborted first and must not be sent.

        Raises RequestRefused for an id that is in use, because one abort would end both requests with that id.
        """
        admitted = self.is_open or await self.wait(attempt_id)
        if not admitted:
            yield False
            return
        self.enter(attempt_id)
        try:
            yield True
        finally:
            self.leave(attempt_id)

    @property
    def is_open(self) -> bool:
        """Return whether :meth:`enter` may be called now, without waiting."""
        return self._open

    async def wait(self, attempt_id: str) -> bool:
        """Wait until the attempt may enter; False if it was aborted. Raises RequestRefused for an id that is in use."""
        self._require_new(attempt_id)
        while not self._open:
            admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[attempt_id] = admitted
            try:
                if not await admitted:
                    return False
            finally:
                self._waiting.pop(attempt_id, None)
        return True

    def enter(self, attempt_id: str) -> None:
        """Record that the request is being sent. Raises RequestRefused for an id that is in use."""
        self._require_new(attempt_id)
        self._inside.add(attempt_id)
        self._idle.clear()

    def _require_new(self, attempt_id: str) -> None:
        if attempt_id in self._inside or attempt_id in self._waiting:
            raise RequestRefused(f"attempt {attempt_id} is already in flight: give every attempt an id of its own")

    def leave(self, attempt_id: str) -> None:
        """Record that the attempt's request has ended."""
        self._inside.discard(attempt_id)
        if not self._inside:
            self._idle.set()

    def abort(self, attempt_ids: Collection[str] | None) -> None:
        """Abort these attempts if they are waiting (None means all). Admitted attempts are aborted at the server."""
        self._end_waits(list(self._waiting) if attempt_ids is None else attempt_ids, admit=False)

    def close(self) -> None:
        """Stop admitting requests."""
        self._open = False

    def open(self) -> None:
        self._open = True
        self._end_waits(list(self._waiting), admit=True)

    async def until_idle(self) -> None:
        await self._idle.wait()

    def _end_waits(self, attempt_ids: Collection[str], *, admit: bool) -> None:
        for attempt_id in attempt_ids:
            admitted = self._waiting.get(attempt_id)
            if admitted is not None and not admitted.done():
                admitted.set_result(admit)


ABORT_RESEND_S = 1.0
"""Seconds after which a pause repeats its abort, because the first may arrive before the server knows the request."""
PAUSE_DEADLINE_S = 25.0
"""Seconds for a pause; below the driver's own limit of 30 s, so that the driver sees the reason."""
UNLOAD_ALL_S = 5.0
"""Seconds for unloading adapters when an engine is closed."""


class ServerEngine(EngineBase):
    """Base class of engines that send requests to a server or an object, which they can pause and update.

    Subclasses add ``generate``, ``abort`` and ``health``, and the calls that load weights (:meth:`_load_whole`) and
    adapters (:meth:`_load_adapter`, :meth:`_unload`).
    """

    _abort_again_s = ABORT_RESEND_S
    _servers: tuple[HttpClient, ...] = ()
    """Clients of the servers that hold the weights; empty for an engine object in this process."""
    _configured_model: str | None = None
    """Model name from the settings."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        super().__init__(name, capabilities)
        self._labels = WeightLabels()
        self._adapters = LoadedAdapters(self._labels)
        self._admission = Admission()
        self._why_incomplete = ""
        """Reason why the weights match no policy version after a failed update; empty if they do."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} version {self._version} {self._admission!r}>"

    @property
    def _version(self) -> PolicyVersion:
        return self._labels.present

    def set_up_labels(self, labels: Sequence[str | None], *, present: bool) -> str | None:
        """Set up the labels from those that the servers showed on connection; return the label to set on them now.

        If the servers have weights of another run, they keep their labels: a warning is logged, and None is returned.
        ``present`` means that the settings let the run begin with the servers' present weights, whatever they are.
        """
        self._labels.name_first(of_start=not present and all(map(start_is_known, labels)))
        shown = ", ".join(dict.fromkeys(quoted(label) for label in labels if label is not None))
        if self._capabilities.first_weights is FirstWeights.OTHERS:
            self._why_incomplete = (
                f"engine {self.name} has weights of another run of april (with the label {shown}), and has none of "
                "this run before a weight update"
            )
            log.warning("%s", self._why_incomplete)
            return None
        if self._capabilities.first_weights is FirstWeights.UNVERIFIED:
            log.warning(
                "engine %s labels its weights %s, a label that april did not set, so april assumes version %s without "
                "verification. If an earlier run left them there, restart the server; if they are right, set "
                "engine.first_weights: present", self.name, shown, FIRST_VERSION,
            )  # fmt: skip
        return self._labels.of(FIRST_VERSION)

    def _check(self, request: Request) -> None:
        """Refuse requests that servers would silently shorten or crash on.

        Raises:
            EngineError: The weights match no policy version.
            RequestRefused: The request has no ids, an id outside the vocabulary, more tokens than fit, or attachments
                that the server would ignore.
        """
        if self._why_incomplete:
            raise EngineError(self._why_incomplete)
        ids, limit = request.token_ids, self._capabilities
        if not len(ids):
            raise RequestRefused(f"attempt {request.attempt_id} has no token ids; a prompt needs at least one token")
        for placed in request.attached:
            if placed.attachment.kind not in limit.attachments:
                need = f"; {need}" if (need := limit.needs.get("attachments")) else ""
                raise RequestRefused(
                    f"attempt {request.attempt_id} contains {placed.attachment.kind}s, which engine {self.name} would "
                    f"silently ignore{need}"
                )
        if request.attached:
            self._check_places(request)
        # viewed as unsigned, negative ids are too large as well
        unsigned = ids.view(np.uint32)
        if unsigned.item(unsigned.argmax()) >= limit.vocab_size:
            raise RequestRefused(
                f"attempt {request.attempt_id} has a token id outside the vocabulary of {limit.vocab_size} of engine "
                f"{self.name}; does the tokenizer belong to the model?"
            )
        if len(ids) + request.sampling.max_tokens > limit.max_context:
            raise RequestRefused(
                f"attempt {request.attempt_id} needs {len(ids)} + {request.sampling.max_tokens} tokens, but engine "
                f"{self.name} has room for {limit.max_context}; lower max_response_len or set engine.max_len"
            )

    def _check_places(self, request: Request) -> None:
        """Refuse a request whose placeholder tokens do not match its attachments: SGLang would never answer it."""
        sent = collapsed(request.token_ids, request.attached)
        placeholders = [token for placed in request.attached for token in placed.stands]
        found = int(np.isin(sent, placeholders).sum())
        if found != len(placeholders):
            raise RequestRefused(
                f"attempt {request.attempt_id} has {found} placeholder tokens for attachments, but its attachments "
                f"need {len(placeholders)}; were some generated, on an engine that cannot ban them?"
            )

    def _to_abort(self, attempt_ids: Sequence[str] | None) -> list[str]:
        """Abort those of the attempts that wait for admission; return those that the server has. None means all."""
        self._admission.abort(attempt_ids)
        inside = self._admission.inside
        return list(inside) if attempt_ids is None else [i for i in attempt_ids if i in inside]

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        """Close admission, abort the requests in flight, and repeat the abort until all have ended, even if one fails.

        The server itself is not paused: april has no requests left there, and health probes take a paused server for
        dead. Raises EngineError if requests have not ended within PAUSE_DEADLINE_S.
        """
        self._admission.close()
        failure: EngineError | None = None
        try:
            async with asyncio.timeout(PAUSE_DEADLINE_S):
                while self._admission.inside:
                    try:
                        await self.abort(None)
                    except EngineError as error:
                        failure = error  # requests of a dead server end by themselves
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._abort_again_s):
                            await self._admission.until_idle()
        except TimeoutError:
            raise EngineError(
                f"engine {self.name} has not ended {len(self._admission.inside)} aborted requests within "
                f"{PAUSE_DEADLINE_S:g} s; has somebody else paused it?"
            ) from failure

    async def resume(self) -> None:
        self._admission.open()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Load whole weights, or load an adapter under a new name next to the one in use; see the engine protocol.

        Raises:
            EngineError: Requests are running, the directory does not fit, or a server has failed. An engine that may be
                between two versions gets no requests until an update succeeds.
            WeightsGone: A server has lost weights that it had when april connected.
        """
        if path is not None:
            self._require_loadable(path)
            if is_adapter(path):
                adapter = self._adapters.new_adapter(version, path)
                await self._load_adapter(adapter, version)
                await self._set_version(version, adapter)
                return
        await self._load_whole(version, path)
        await self._set_version(version)

    async def _load_whole(self, version: PolicyVersion, path: str | None) -> None:
        """Load whole weights from ``path``. If it is None, the servers already have the weights; only label them."""
        raise NotImplementedError

    async def _load_adapter(self, adapter: LoadedAdapter, version: PolicyVersion) -> None:
        """Load an adapter on all servers. If this raises, requests continue with the weights in use."""
        raise NotImplementedError

    async def _unload(self, adapter: LoadedAdapter) -> bool:
        """Unload an adapter from all servers; False if a server may still have it."""
        raise NotImplementedError

    async def _set_version(self, version: PolicyVersion, adapter: LoadedAdapter | None = None) -> None:
        """Record ``version`` as the one that serves requests from now on, and unload adapters that no request uses.

        If an adapter cannot be unloaded, that is tried again at the next update.
        """
        self._adapters.set_present(adapter, version)
        self._labels.present, self._why_incomplete = version, ""
        for idle in self._adapters.unused(self._admission.inside):
            if await self._unload(idle):
                self._adapters.note_unloaded(idle)

    async def _unload_all(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_ALL_S):
                for adapter in self._adapters.all():
                    await self._unload(adapter)

    async def _why_not_served(self) -> str:
        """Return why a server would not answer with the trained model; empty if there is no sign of that."""
        found = await asyncio.gather(*(why_not_served(server, self._configured_model) for server in self._servers))
        return next(filter(None, found), "")

    async def _require_model(self) -> None:
        if why := await self._why_not_served():
            raise EngineError(why)

    async def _why_version_gone(self) -> tuple[str, bool]:
        """Return why the present version would not answer requests, or "", and whether the server lost its adapter."""
        present = self._adapters.present
        if present is None:
            return await self._why_not_served(), False
        listed = await asyncio.gather(*(is_listed(server, present.name) for server in self._servers))
        lost = False in listed
        return (f"the server no longer has the adapter {present.name}" if lost else ""), lost

    def _require_loadable(self, path: str) -> None:
        if is_adapter(path):
            self._require_adapter(path)
            return
        if not self._capabilities.updates_from_disk:
            cause = self._capabilities.cause("updates_from_disk")
            reason = "no engine here loads weights" if cause is None else cause.sentence
            raise EngineError(f"engine {self.name} cannot load weights from {path}: {reason}")

    def _require_adapter(self, path: str) -> None:
        """Raise EngineError for an adapter that does not fit, or whose base model is only partly updated."""
        can = self._capabilities
        why = why_refused(path, can.adapters)
        if why is not None:
            need = f"; {need}" if can.adapters is None and (need := can.needs.get("adapters")) else ""
            raise EngineError(f"engine {self.name} was not asked to load the weights: {why}{need}")
        if self._why_incomplete:
            raise EngineError(f"{self._why_incomplete}, which an adapter cannot repair; load full weights first")

    @property
    def whole_version(self) -> PolicyVersion:
        """Version of the whole weights, without adapters."""
        return self._adapters.base

    def adapter_paths(self) -> frozenset[str]:
        """Return the adapter directories that the server may have to read again."""
        return self._adapters.paths(self._admission.inside)

    def require_idle(self) -> None:
        """Raise EngineError while requests are running: their tokens would belong to no version."""
        if self._admission.inside:
            raise EngineError(
                f"engine {self.name}: the weights were updated while {len(self._admission.inside)} requests run, so "
                "the versions of their tokens would be unknown; pause the engine first"
            )
