"""The base of engines before a server, or an engine object: a gate for requests, pauses, checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np

from april.core.attachments import collapsed
from april.core.versions import PolicyVersion
from april.engines.http.adapter_files import why_refused
from april.engines.http.own_adapters import OwnAdapters
from april.engines.http.weight_directories import is_adapter
from april.engines.http.weight_labels import WeightLabels
from april.engines.protocol import Capabilities, Request
from april.errors import EngineError, RequestRefused


class Admission:
    """Closed while weights change. Requests wait before it, and can be aborted there."""

    def __init__(self) -> None:
        self._open = True
        # attempts that wait -> True: go on, False: aborted before they were sent
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._inside: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Admission {state}, {len(self._inside)} inside, {len(self._waiting)} waiting>"

    @property
    def inside(self) -> Collection[str]:
        """Attempts that were let in and have not ended."""
        return self._inside

    @asynccontextmanager
    async def request(self, attempt_id: str) -> AsyncIterator[bool]:
        """Be inside for the time of one request; False means that it was aborted while it waited, and must not be sent.

        Raises RequestRefused for an id that is in use: servers end both requests when one of them is aborted.
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
        """Return whether :meth:`enter` is allowed now, without a wait."""
        return self._open

    async def wait(self, attempt_id: str) -> bool:
        """Wait until the attempt may enter; False if it was aborted meanwhile. Raises RequestRefused as above."""
        self._require_new(attempt_id)
        while not self._open:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[attempt_id] = turn
            try:
                if not await turn:
                    return False
            finally:
                self._waiting.pop(attempt_id, None)
        return True

    def enter(self, attempt_id: str) -> None:
        """Record that its request is sent now; raises RequestRefused for an id that is in use."""
        self._require_new(attempt_id)
        self._inside.add(attempt_id)
        self._idle.clear()

    def _require_new(self, attempt_id: str) -> None:
        if attempt_id in self._inside or attempt_id in self._waiting:
            raise RequestRefused(f"attempt {attempt_id} is in flight already: give every attempt an id of its own")

    def leave(self, attempt_id: str) -> None:
        """Record that its request has ended."""
        self._inside.discard(attempt_id)
        if not self._inside:
            self._idle.set()

    def abort(self, attempt_ids: Collection[str] | None) -> None:
        """End the wait of these attempts (None: of all); those inside are the server's affair."""
        self._end_waits(list(self._waiting) if attempt_ids is None else attempt_ids, admit=False)

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False

    def open(self) -> None:
        """Let in who waits and who comes."""
        self._open = True
        self._end_waits(list(self._waiting), admit=True)

    async def until_idle(self) -> None:
        """Until nobody is inside."""
        await self._idle.wait()

    def _end_waits(self, attempt_ids: Collection[str], *, admit: bool) -> None:
        for attempt_id in attempt_ids:
            turn = self._waiting.get(attempt_id)
            if turn is not None and not turn.done():
                turn.set_result(admit)


ABORT_RESEND_S = 1.0
"""While a pause waits for attempts to end; the server may not have known them yet."""
PAUSE_DEADLINE_S = 25.0
"""Below the 30 s after which the driver gives an engine up that does not pause, so that the reason is heard."""


class ServerEngine:
    """Base of engines whose requests pass a gate; subclasses add ``generate``, ``update_weights`` and ``health``."""

    _abort_again_s = ABORT_RESEND_S

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self._name = name
        self._capabilities = capabilities
        self._labels = WeightLabels()
        self._adapters = OwnAdapters(self._labels)
        self._admission = Admission()
        self._not_whole = ""
        """The reason why its weights are those of no version, since an update has failed."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} version {self._version} {self._admission!r}>"

    @property
    def name(self) -> str:
        """Short unique label; host and port of a server."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """As found when it was made."""
        return self._capabilities

    @property
    def _version(self) -> PolicyVersion:
        """The version of the present weights."""
        return self._labels.present

    def _check(self, request: Request) -> None:
        """Refuse what servers shorten without a word, or die of.

        Raises:
            EngineError: the weights are those of no version.
            RequestRefused: no ids, one outside the vocabulary, more tokens than there is room for, or attachments that
                it would leave out.
        """
        if self._not_whole:
            raise EngineError(self._not_whole)
        ids, limit = request.token_ids, self._capabilities
        if not len(ids):
            raise RequestRefused(f"attempt {request.attempt_id} has no token ids; a prompt needs at least one")
        for placed in request.attached:
            if placed.attachment.kind not in limit.attachments:
                need = f"; {limit.attachments_need}" if limit.attachments_need else ""
                raise RequestRefused(
                    f"attempt {request.attempt_id} comes with {placed.attachment.kind}s, and engine {self.name} would "
                    f"leave them out without a word{need}"
                )
        if request.attached:
            self._check_places(request)
        # as unsigned numbers, negative ones are too large as well
        if ids.view(np.uint32).max() >= limit.vocab_size:
            raise RequestRefused(
                f"attempt {request.attempt_id} has a token id outside the vocabulary of {limit.vocab_size} of engine "
                f"{self.name}; is the tokenizer that of the model?"
            )
        if len(ids) + request.sampling.max_tokens > limit.max_context:
            raise RequestRefused(
                f"attempt {request.attempt_id} wants {len(ids)} + {request.sampling.max_tokens} tokens where engine "
                f"{self.name} has room for {limit.max_context}; lower max_response_len or set engine.max_len"
            )

    def _check_places(self, request: Request) -> None:
        """Refuse a request in which more stands for attachments than there are: SGLang would never answer it."""
        sent = collapsed(request.token_ids, request.attached)
        stands = [token for placed in request.attached for token in placed.stands]
        found = int(np.isin(sent, stands).sum())
        if found != len(stands):
            raise RequestRefused(
                f"attempt {request.attempt_id} has {found} tokens that stand for attachments, and {len(stands)} are of "
                "some; were they generated, on an engine that cannot ban them?"
            )

    def _to_abort(self, attempt_ids: Sequence[str] | None) -> list[str]:
        """Return those of the attempts (None: all) that the server has; others that wait are ended here."""
        self._admission.abort(attempt_ids)
        inside = self._admission.inside
        return list(inside) if attempt_ids is None else [i for i in attempt_ids if i in inside]

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask for the end of these attempts (None: of all)."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Close admission and end what is inside, asking again until it has ended; a call that fails is made again.

        The server itself is not paused: nothing of april's is inside any more, and to every probe a paused server is
        dead. Raises EngineError for requests that have not ended in PAUSE_DEADLINE_S.
        """
        self._admission.close()
        failure: EngineError | None = None
        try:
            async with asyncio.timeout(PAUSE_DEADLINE_S):
                while self._admission.inside:
                    try:
                        await self.abort(None)
                    except EngineError as error:
                        failure = error  # requests of a server that died end by themselves
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._abort_again_s):
                            await self._admission.until_idle()
        except TimeoutError:
            raise EngineError(
                f"engine {self.name} has not ended {len(self._admission.inside)} aborted requests in "
                f"{PAUSE_DEADLINE_S:g} s; is it paused by somebody else?"
            ) from failure

    async def resume(self) -> None:
        """Let requests in again."""
        self._admission.open()

    def _require_loadable(self, path: str) -> None:
        """Raises EngineError for a directory that must not be loaded here."""
        if is_adapter(path):
            self._require_adapter(path)
            return
        if not self._capabilities.updates_from_disk:
            cause = self._capabilities.cause("updates_from_disk")
            reason = "nothing here loads weights" if cause is None else cause.sentence
            raise EngineError(f"engine {self.name} cannot load weights from {path}: {reason}")

    def _require_adapter(self, path: str) -> None:
        """Raises EngineError for an adapter that does not fit, or one for a model whose weights are torn."""
        can = self._capabilities
        why = why_refused(path, can.adapters)
        if why is not None:
            need = "" if can.adapters is not None or not can.adapters_need else f"; {can.adapters_need}"
            raise EngineError(f"engine {self.name} was not asked to load its weights: {why}{need}")
        if self._not_whole:
            raise EngineError(f"{self._not_whole}: an adapter does not mend that, so give whole weights first")

    @property
    def whole_version(self) -> PolicyVersion:
        """The version of the whole weights below adapters."""
        return self._adapters.base

    def adapter_paths(self) -> frozenset[str]:
        """Return the directories of adapters that the server may read again."""
        return self._adapters.paths(self._admission.inside)

    def require_idle(self) -> None:
        """Raises EngineError while requests run: their tokens would be of no version."""
        if self._admission.inside:
            raise EngineError(
                f"engine {self.name}: weights were updated while {len(self._admission.inside)} requests run, whose "
                "tokens would be of no version; pause it first"
            )
