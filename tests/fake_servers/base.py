"""What the fake servers share: requests in a queue, tokens by hash, faults on purpose, and a port that breaks.

The same prefix under the same weights gives the same token, so a request that is cut and continued says what the uncut
one says. There is no randomness and no clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler
from numpy.typing import NDArray

from .adapters import FakeAdapters
from .images import FakeImages


class RequestFault(StrEnum):
    """What goes wrong with one request."""

    SERVER_DIES = "server_dies"
    """All connections break and the port closes, when the request has ``after_tokens`` tokens."""
    BREAK_OFF = "break_off"
    """The request's connection breaks when it has ``after_tokens`` tokens; the server goes on."""
    ENGINE_DIES = "engine_dies"
    """At ``after_tokens`` a stream gets an error line and then its mark, with status 200; a plain request a 500."""
    ABORT_NEVER_ENDS = "abort_never_ends"
    """Aborts are acknowledged, generation stops, and the answer never comes."""
    ABORT_UNSEEN = "abort_unseen"
    """The first abort does nothing, as if the request were not known yet."""
    LOST_PARTIAL = "lost_partial"
    """The answer to an aborted request has no tokens that were not sent before (SGLang before October 2025)."""
    UNASKED_ABORT = "unasked_abort"
    """The server aborts the request itself when it has ``after_tokens`` tokens."""
    TIMED_OUT = "timed_out"
    """The same with status 503: a plain answer is an HTTP error without the tokens."""
    RETRACTED = "retracted"
    """Out of memory: at ``after_tokens`` the request goes back to the queue, and stays there."""
    EXTRA_LOGPROBS = "extra_logprobs"
    WRONG_COUNT = "wrong_count"
    """It counts one token more than came."""
    NULL_LOGPROB = "null_logprob"
    NAN_LOGPROB = "nan_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    CLAMPED_LOGPROB = "clamped_logprob"
    """As which the server writes minus infinity: -9999 by vLLM, the smallest number of the type by SGLang."""
    OTHER_IDS = "other_ids"
    """Log-probabilities of other tokens than those of the answer (vLLM: only the token route says of which)."""
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a token id, not a secret
    TRUNCATED = "truncated"
    """The JSON ends in the middle."""
    OTHER_RID = "other_rid"
    """The answer is that of another request."""
    GAP_IN_SPANS = "gap_in_spans"
    FOREIGN_LABEL = "foreign_label"
    """The weights have a name that april did not give them."""
    REPEATED_LAST = "repeated_last"
    """The last answer of an aborted request repeats the last token, and does not count it."""
    UNCOUNTED_LAST = "uncounted_last"
    """The answer to an aborted request has one token more than it counts."""
    SHRINKS = "shrinks"
    """The last event counts fewer tokens than came before."""
    NO_FINISH = "no_finish"
    """The request ends without a finish reason."""
    EARLY_LENGTH = "early_length"
    """It ends with "length" at ``after_tokens`` (at least 1), and there is room."""
    EARLY_STOP = "early_stop"
    """It ends with "stop" at ``after_tokens`` (at least 1), and not by a stop token."""
    ENDS_TWICE = "ends_twice"
    """The end of a stream comes twice, the second time without tokens."""
    DOUBLED_EVENT = "doubled_event"
    """An event of a stream comes twice; a plain answer has its last token twice."""
    COMMENTS = "comments"
    """From ``after_tokens`` on a stream has comment lines and no token, a plain answer spaces; an abort ends it."""
    PINGS = "pings"
    """The same with events that have a name and no data."""
    EMPTY_EVENTS = "empty_events"
    """The same with events that have no token, and usage alone."""
    OTHER_PROMPT = "other_prompt"
    """It says that the prompt has one token less than were sent."""
    NAN_STOP = "nan_stop"
    """The model gave NaN: the last token is EOS, and it has stopped at a text that says so."""
    NO_DONE = "no_done"
    """The stream ends without its mark; nothing is lost."""
    TRICKLE = "trickle"
    """A stream comes byte by byte, each in a packet of its own; nothing is wrong with it."""
    BUSY = "busy"
    """Status 503."""
    LIMITED = "limited"
    """Status 429 with Retry-After."""
    REFUSED = "refused"
    """Status 400."""
    FAILS = "fails"
    """Status 500, and the connection is closed."""
    GIANT = "giant"
    """Status 500 with a body of 16 MiB."""
    REDIRECT = "redirect"


_NOT_BY_VLLM = (RequestFault.TIMED_OUT, RequestFault.RETRACTED, RequestFault.OTHER_RID, RequestFault.UNCOUNTED_LAST,
                RequestFault.SHRINKS, RequestFault.NAN_STOP)  # fmt: skip
SGLANG_FAULTS = tuple(kind for kind in RequestFault if kind is not RequestFault.ENGINE_DIES)
VLLM_FAULTS = tuple(kind for kind in RequestFault if kind not in _NOT_BY_VLLM)
"""What the fake servers of that kind can do."""
AT_ONCE = (RequestFault.BUSY, RequestFault.LIMITED, RequestFault.REFUSED, RequestFault.FAILS, RequestFault.GIANT,
           RequestFault.REDIRECT)  # fmt: skip
"""The request is answered without being run."""
KEEPS_ALIVE = (RequestFault.COMMENTS, RequestFault.PINGS, RequestFault.EMPTY_EVENTS)
"""Signs of life without tokens."""


@dataclass(slots=True)
class PlannedFault:
    """``kind`` hits request number ``request`` (from 0, in the order of arrival; None: the next), ``times`` times."""

    kind: RequestFault
    request: int | None = None
    after_tokens: int = 0
    times: int = 1


class ControlFault(StrEnum):
    """What goes wrong with one call. All but the restarts are answers in place of the server's own."""

    HTML = "html"
    """Status 200 and a page, as a proxy answers."""
    NULL = "null"
    """Status 200 and ``null``."""
    EMPTY = "empty"
    """Status 200 and nothing."""
    ERROR = "error"
    """Status 200 and an error in JSON."""
    NO_SUCCESS = "no_success"
    """Status 200 and ``{"success": false}``."""
    ECHOED = "echoed"
    """Status 422, and a text that repeats the request, as FastAPI does it."""
    FAILS = "fails"
    """Status 500, and a text that repeats the request."""
    SILENT = "silent"
    """The call is obeyed, and no answer comes."""
    RESTARTS_BEFORE = "restarts_before"
    """The process dies just before the call, and a new one with the weights of the start takes it."""
    RESTARTS_AFTER = "restarts_after"
    """The process obeys, answers and dies; a new one with the weights of the start takes the next call."""


SAYS_NOTHING = (
    ControlFault.HTML, ControlFault.NULL, ControlFault.EMPTY, ControlFault.ERROR, ControlFault.NO_SUCCESS,
)  # fmt: skip
"""Status 200 without a word of success."""


@dataclass(slots=True, kw_only=True)
class PlannedControlFault:
    """``kind`` hits the calls of ``route`` after the next ``later``, ``times`` times; ``obeyed``: done all the same."""

    kind: ControlFault
    route: str
    times: int = 1
    later: int = 0
    obeyed: bool = False


async def wrong_answer(kind: ControlFault, request: web.Request) -> web.Response:
    """The answer in place of the server's own."""
    match kind:
        case ControlFault.HTML:
            return web.Response(text="<html><body>It works</body></html>", content_type="text/html")
        case ControlFault.NULL:
            return web.json_response(None)
        case ControlFault.ERROR:
            return web.json_response({"error": {"message": "worker died", "code": 500}})
        case ControlFault.NO_SUCCESS:
            return web.json_response({"success": False})
        case ControlFault.ECHOED:
            asked = json.loads(await request.read() or b"null")
            return web.json_response({"detail": [{"msg": "Field required", "input": asked}]}, status=422)
        case ControlFault.FAILS:
            asked = (await request.read()).decode()
            return web.json_response({"error": {"message": f"died while handling {asked}"}}, status=500)
        case _:
            return web.Response()


@dataclass(slots=True, eq=False)
class FakeRequest:
    """One request at the server. Subclasses say it in the words of their server."""

    MIN_TOKENS: ClassVar[str]
    MAX_TOKENS: ClassVar[str]
    """Names of these parameters."""
    EOS_ALONE: ClassVar[bool] = False
    """The server holds back no other stop token before the minimum."""

    name: str
    """As the engine knows it; an abort names exactly this."""
    prompt: list[int]
    params: dict[str, Any]
    stream: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(label, start, end) of the tokens."""
    flushed: int = 0
    """Tokens that have left the scheduler."""
    sent: int = 0
    """Tokens that have left the server."""
    running: bool = False
    started: bool = False
    """It was given a place at least once."""
    finish: Any = None
    """Why it ended, as the server says it."""
    matched: str | None = None
    """The stop string at which it has ended."""
    decode: Callable[[Sequence[int]], str] | None = None
    """The server's tokenizer; without one, stop strings are not looked for."""
    frozen: bool = False
    dead: bool = False
    """The caller's connection is gone, or breaks now."""
    failed: bool = False
    """The engine died under it."""
    fault: PlannedFault | None = None
    salt: str = ""
    """Draws other tokens from the same weights."""
    cache_salt: str = ""
    """Only requests with the same one share cached keys."""
    cached: int = 0
    """Tokens of its prompt that were cached when it came."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers with which it came."""
    made_under: list[str] = field(default_factory=list)
    """Weights that made each token."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hit(self, *kinds: RequestFault) -> RequestFault | None:
        """The fault of the request, if it is one of these."""
        return self.fault.kind if self.fault is not None and self.fault.kind in kinds else None

    @property
    def over(self) -> bool:
        """Whether nothing more will be generated."""
        return self.dead or self.failed or (self.finish is not None and not self.running)

    @property
    def due(self) -> bool:
        """Whether the scheduler hands over what it has."""
        return True

    def flush(self) -> None:
        """From the scheduler to the part that talks to the client."""
        self.flushed = len(self.ids)
        self.news.set()

    def parts(self, start: int, label: str = "") -> Parts:
        """What is said of the tokens from ``start`` that have left the scheduler."""
        ids, total = self.ids[start : self.flushed], self.flushed
        spans = [[name, first, min(end, total)] for name, first, end in self.spans if first < total]
        return Parts(
            self.name, label, ids, list(ids), list(self.logprobs[start:total]), spans, self.finish, total,
            len(self.prompt),
        )  # fmt: skip

    def make_token(self, weights: str, label: str, vocab_size: int, eos: int, mean_length: int) -> None:
        """One token more; EOS and stop tokens are in the ids."""
        token, logprob = next_token(weights, self.prompt + self.ids, vocab_size, eos, mean_length)
        stops = {eos, *(self.params.get("stop_token_ids") or ())}
        count = len(self.ids) + 1
        banned = {int(i) for i, bias in (self.params.get("logit_bias") or {}).items() if bias <= -100}
        held_back = {eos} if self.EOS_ALONE else stops
        if token in held_back and (count <= self.params[self.MIN_TOKENS] or self.params.get("ignore_eos")):
            banned |= stops
        token = next_allowed(token, banned, vocab_size)
        self.ids.append(token)
        self.made_under.append(weights)
        self.logprobs.append(self.as_said(logprob))
        if self.spans and self.spans[-1][0] == label:
            self.spans[-1] = (label, self.spans[-1][1], count)
        else:
            self.spans.append((label, count - 1, count))
        if self.decode is not None and count > self.params[self.MIN_TOKENS]:
            text = self.decode(self.ids)
            self.matched = next((stop for stop in self.params.get("stop") or () if stop in text), None)
        if token in stops or self.matched is not None:
            self.finish = self.stopped()
        elif count >= self.params[self.MAX_TOKENS]:
            self.finish = self.used_up()

    def lose_unsent(self) -> None:
        """Drop the tokens that have not left the server."""
        del self.ids[self.sent :], self.logprobs[self.sent :], self.made_under[self.sent :]
        self.spans = [(name, a, min(b, self.sent)) for name, a, b in self.spans if a < self.sent]

    # ---------------------------------------------------------------- in the words of the server

    def as_said(self, logprob: float) -> float:
        """What is said of a log-probability at temperature 1."""
        raise NotImplementedError

    def stopped(self) -> Any:
        """The finish of a request that has stopped at its last token."""
        return "stop"

    def used_up(self) -> Any:
        """The finish of a request whose budget is used."""
        return "length"

    def aborted(self) -> Any:
        return "abort"


@dataclass(slots=True)
class Parts:
    """What one event or answer says, before it is written in the way of the server."""

    name: str
    label: str
    ids: list[int]
    named: list[int]
    """Ids beside the log-probabilities."""
    logprobs: list[Any]
    spans: list[list[Any]]
    """(label, start, end) each."""
    finish: Any
    total: int
    """Its count of the tokens of the response."""
    prompt: int
    """Its count of those before it."""

    def repeat(self, token: int, logprob: Any) -> None:
        self.ids.append(token)
        self.named.append(token)
        self.logprobs.append(logprob)

    def spoil(self, kind: RequestFault, vocab_size: int, *, clamped: float, whole: bool) -> None:
        """Make it wrong; it has tokens. ``clamped``: minus infinity; ``whole``: it is no event of a stream."""
        last = self.finish is not None
        match kind:
            case RequestFault.EXTRA_LOGPROBS:
                self.named.insert(0, self.named[0])
                self.logprobs.insert(0, self.logprobs[0])
            case RequestFault.NULL_LOGPROB:
                self.logprobs[-1] = None
            case RequestFault.NAN_LOGPROB:
                self.logprobs[-1] = float("nan")
            case RequestFault.POSITIVE_LOGPROB:
                self.logprobs[-1] = 0.5
            case RequestFault.CLAMPED_LOGPROB:
                self.logprobs[-1] = clamped
            case RequestFault.WRONG_COUNT:
                self.total += 1
            case RequestFault.OTHER_PROMPT:
                self.prompt -= 1
            case RequestFault.DOUBLED_EVENT if last and whole:
                self.repeat(self.ids[-1], self.logprobs[-1])
            case RequestFault.OTHER_IDS:
                self.named[-1] = (self.named[-1] + 1) % vocab_size
            case RequestFault.UNKNOWN_TOKEN:
                self.ids[-1] = self.named[-1] = vocab_size
            case RequestFault.OTHER_RID:
                self.name = "another"
            case RequestFault.GAP_IN_SPANS if last and self.spans:
                self.spans[0][1] = 1
            case RequestFault.FOREIGN_LABEL:
                self.label = "step-7"
                self.spans = [["step-7", start, end] for _, start, end in self.spans]
            case RequestFault.UNCOUNTED_LAST if last:
                self.repeat(3, -1.0)
            case RequestFault.REPEATED_LAST if last:
                self.ids.append(self.ids[-1])
            case RequestFault.SHRINKS if last:
                self.total -= 1
            case RequestFault.NO_FINISH if last:
                self.finish = None


def next_token(weights: str, prefix: list[int], vocab_size: int, eos: int, mean_length: int) -> tuple[int, float]:
    """(id, log-probability at temperature 1) of what follows ``prefix`` under ``weights``."""
    digest = hashlib.blake2b(np.array(prefix, np.int32).tobytes(), digest_size=24, key=weights.encode()[:64]).digest()
    if int.from_bytes(digest[:8], "big") / 2**64 < 1 / mean_length:
        token = eos
    else:
        token = int.from_bytes(digest[8:16], "big") % (vocab_size - 1)
        token += token >= eos
    return token, float(np.float32(-0.5 - 3 * int.from_bytes(digest[16:], "big") / 2**64))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model without any: each token is read by some, by its conversation and the weights."""

    layers: int = 3
    top_k: int = 2
    count: int = 300

    def rows(self, conversation: Sequence[int], made_under: Sequence[str]) -> NDArray[np.int32]:
        """What is read before the last token, [T - 1, layers, top_k]; ``made_under``: weights of the last tokens.

        A prompt is read under the first of them.
        """
        ids, rows = np.array(conversation, np.int32), []
        prompt = len(ids) - len(made_under)
        for i in range(len(ids) - 1):
            key = made_under[max(i + 1 - prompt, 0)].encode()[:64]
            digest = hashlib.blake2b(ids[: i + 1].tobytes(), digest_size=4 * self.layers * self.top_k, key=key).digest()
            rows.append(np.frombuffer(digest, "<u4") % self.count)
        return np.array(rows, np.int32).reshape(-1, self.layers, self.top_k)


def next_allowed(token: int, banned: Collection[int], vocab_size: int) -> int:
    """The first token from this one on that is not banned."""
    return next(t % vocab_size for t in range(token, token + vocab_size) if t % vocab_size not in banned)


def uncut(
    prompt: Sequence[int], *, weights: str = "w0", max_tokens: int = 64, vocab_size: int = 512, eos: int = 2,
    mean_length: int = 24, banned: Collection[int] = (),
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What a server of any kind says to a prompt when nobody cuts it: ids and log-probabilities at temperature 1."""
    ids, logprobs = list(map(int, prompt)), list[float]()
    while len(logprobs) < max_tokens and (not logprobs or ids[-1] != eos):
        token, logprob = next_token(weights, ids, vocab_size, eos, mean_length)
        ids.append(next_allowed(token, banned, vocab_size))
        logprobs.append(logprob)
    return ids[len(prompt) :], logprobs


KEEP_ALIVE_S = 0.01
"""Between two signs of life of a stream without tokens."""


R = TypeVar("R", bound=FakeRequest)


class PrefixCache:
    """Knows every beginning of the sequences that it was given, by their salt."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def found(self, salt: str, prompt: Sequence[int]) -> int:
        """The number of tokens from the start that are known; an engine computes the last one in any case."""
        return sum(1 for _ in takewhile(self._known.__contains__, _beginnings(salt, prompt[:-1])))

    def add(self, salt: str, ids: Sequence[int]) -> None:
        self._known.update(_beginnings(salt, ids))


def _beginnings(salt: str, ids: Sequence[int]) -> Iterator[int]:
    """A hash of each beginning of a sequence, from one token on."""
    key = hash(salt)
    for token in ids:
        key = hash((key, token))
        yield key


class FakeServer(Generic[R]):
    """A server on a real loopback socket. Subclasses say what it answers.

    Args:
        weights: name of the weights.
        max_running: requests decoded at the same time.
        vocab_size, eos, context: of the model.
        mean_length: mean of the (geometric) response lengths.
        stepped: nothing is generated but by :meth:`step`; may be changed at any time (call :meth:`go_on` to go on).
        turns: of the event loop per token.
        decode: its tokenizer, with which it looks for stop strings; None: ``--skip-tokenizer-init``.
        loras: adapters that may be loaded and unloaded (``--enable-lora``).
        images: its model takes them; None: it is a text model.
    """

    def __init__(
        self, *, weights: str = "w0", vocab_size: int = 512, eos: int = 2, context: int = 4096, mean_length: int = 24,
        max_running: int = 64, stepped: bool = False, turns: int = 1,
        decode: Callable[[Sequence[int]], str] | None = None, loras: FakeAdapters | None = None,
        images: FakeImages | None = None,
    ) -> None:  # fmt: skip
        self.loras, self.images = loras, images
        self.adapters: list[str] = []
        """Names of the adapters that it has besides its model, and that nobody loads or unloads."""
        self.weights, self.label = weights, "default"
        self.vocab_size, self.eos, self.context, self.mean_length = vocab_size, eos, context, mean_length
        self.max_running, self.stepped, self.turns, self.decode = max_running, stepped, turns, decode
        self.turn: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """One turn of the event loop; whoever has clients on other loops may wait for theirs too."""
        self.first_weights = weights
        """Those of every new process."""
        self.coming = "w1"
        """The weights that a transfer brings, once it is whole."""
        self.experts: Experts | None = None
        """It gives the experts of tokens (``--enable-return-routed-experts``)."""
        self.rows_said: Callable[[R, NDArray[np.int32]], Any] = lambda run, rows: rows
        """What it says of the rows of a request in place of them; None: nothing."""
        self.faults: list[PlannedFault] = []
        self.control_faults: list[PlannedControlFault] = []
        self.runs: list[R] = []
        """Every request that was let in, in the order of arrival."""
        self.prefixes = PrefixCache()
        self.violations: list[str] = []
        """What was asked and must not be asked."""
        self.pause_mode: str | None = None
        self.stale_cache = False
        """Keys and values of older weights are in the cache."""
        self.unanswered: dict[str, int] = {}
        """Route -> so many calls are obeyed, and their connections break in place of an answer."""
        self.alive = False
        self.starts = 0
        self._limit = 1 << 30
        self._picks: Callable[[list[int]], bool] = lambda prompt: True
        self._live: list[R] = []
        self._queue: deque[R] = deque()
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._port = 0

    # ---------------------------------------------------------------- what subclasses say

    def _routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def _said(self, run: R) -> str:
        """The next answer as JSON, wrong if the script says so."""
        raise NotImplementedError

    def _fails_by(self, run: R, kind: RequestFault) -> bool:
        """Faults of this server alone that wait for a number of tokens."""
        return False

    def _failure(self, run: R) -> web.Response | None:
        """What a plain request gets in place of an answer."""
        return None

    def _usage(self, run: R) -> list[str]:
        return []

    async def _early(self, request: web.Request) -> web.StreamResponse | None:
        """An answer before the route is looked at."""
        return None

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Open the port (the same one again after a death); returns the URL."""
        self._changed = asyncio.Event()  # of this loop
        app = web.Application(client_max_size=1 << 26, middlewares=[self._see])
        app.add_routes(self._routes())
        # idle connections are closed as early as the real servers do it
        options = {"keepalive_timeout": 5.0, "access_log": None, "shutdown_timeout": 0.1} | self._runner_options()
        self._runner = web.AppRunner(app, **options)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = await asyncio.get_running_loop().create_server(
            self._runner.server, "127.0.0.1", self._port, reuse_address=True
        )
        self._port = self._listener.sockets[0].getsockname()[1]
        self.alive = True
        self.starts += 1
        self._ticker = asyncio.create_task(self._tick())
        return self.url

    def _runner_options(self) -> dict[str, Any]:
        return {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """As :meth:`die`, and wait for the end."""
        self.die()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def die(self) -> None:
        """Break all connections and close the port, as a killed process does."""
        self.alive = False
        if self._listener is not None:
            self._listener.close()
        for run in self._live:
            run.dead = True
            run.news.set()
        for transport in self._transports:
            transport.abort()
        self._transports.clear()
        self._live.clear()
        self._queue.clear()
        self._changed.set()

    async def restart(self, weights: str = "w0") -> None:
        """A new process with weights as given, the default label, and no requests."""
        await self.close()
        self._forget(weights)
        await self.start()

    def _forget(self, weights: str) -> None:
        """What a new process does not have."""
        self.prefixes = PrefixCache()
        self.weights, self.label, self.pause_mode, self.stale_cache = weights, "default", None, False
        if self.loras is not None:
            self.loras.present.clear()
        if self.images is not None:
            self.images.forget()

    @property
    def loaded(self) -> list[str]:
        """Names of all adapters that it has now."""
        return [*self.adapters, *(() if self.loras is None else self.loras.present)]

    def _restart_at_once(self) -> None:
        """Another process behind the same port: requests break, and nobody sees the port closed."""
        for run in list(self._live):
            run.dead = True
            self._leave(run)
        self._forget(self.first_weights)
        self.starts += 1

    # ---------------------------------------------------------------- generation

    def step(self, count: int = 1) -> None:
        """``count`` tokens for every running request; those that wait are given places first."""
        for _ in range(count):
            if self.pause_mode is not None:
                return
            while self._queue and len(self.running) < self.max_running:
                run = self._queue.popleft()
                run.running = run.started = True
            for run in self.running:
                if run.frozen or run.finish is not None or self._stands(run) or self._fault_at(run):
                    continue
                self._make_token(run)
                if run.finish is not None:
                    self._end(run, run.finish)
                elif run.due:
                    run.flush()

    def limit(self, tokens: int = 1 << 30, picks: Callable[[list[int]], bool] = lambda prompt: True) -> None:
        """Requests whose prompts ``picks`` picks stop at so many tokens, until the limit is raised."""
        self._limit, self._picks = tokens, picks
        self._changed.set()

    def _stands(self, run: R) -> bool:
        return len(run.ids) >= self._limit and self._picks(run.prompt)

    @property
    def stopped(self) -> int:
        """Requests that stand at the limit, with what they have at the client."""
        return sum(self._stands(run) and run.sent == run.flushed for run in self.running)

    def _make_token(self, run: R) -> None:
        run.make_token(self.weights + run.salt, self.label, self.vocab_size, self.eos, self.mean_length)

    def _fault_at(self, run: R) -> bool:
        """Faults that wait for a number of tokens."""
        if run.fault is None or len(run.ids) < run.fault.after_tokens:
            return False
        match run.fault.kind:
            case RequestFault.SERVER_DIES:
                self.die()
            case RequestFault.BREAK_OFF:
                run.dead = True
                self._leave(run)
            case RequestFault.UNASKED_ABORT:
                self._end(run, run.aborted())
            case RequestFault.EARLY_LENGTH if run.ids:
                self._end(run, run.used_up())
            case RequestFault.EARLY_STOP if run.ids:
                self._end(run, run.stopped())
            case kind if kind in KEEPS_ALIVE:
                run.frozen = True
                run.flush()
            case kind:
                return self._fails_by(run, kind)
        return True

    def _came(self, run: R, headers: Mapping[str, str]) -> None:
        """Keep the headers of a request, and look for the beginning of its prompt in the cache."""
        run.headers, run.cached = headers, self.prefixes.found(run.cache_salt, run.prompt)
        self.prefixes.add(run.cache_salt, run.prompt)
        run.decode = self.decode
        self.runs.append(run)

    def _end(self, run: R, finish: Any) -> None:
        self.prefixes.add(run.cache_salt, (run.prompt + run.ids)[:-1])  # the last token has no keys yet
        run.finish = finish
        run.flush()
        self._leave(run)

    # ---------------------------------------------------------------- requests

    @property
    def running(self) -> list[R]:
        """Requests that have a place."""
        return [run for run in self._live if run.running]

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def open_requests(self) -> int:
        """Requests that the server has not done with."""
        return len(self._live)

    async def _tick(self) -> None:
        while True:
            running = self.running
            busy = any(not r.frozen and not self._stands(r) for r in running)
            busy = busy or bool(self._queue and len(running) < self.max_running)
            if self.alive and not self.stepped and self.pause_mode is None and busy:
                self.step()
                for _ in range(self.turns):
                    await self.turn()
            else:
                await self._wait()

    def go_on(self) -> None:
        """Generate with the turns of the loop again."""
        self.stepped = False
        self._changed.set()

    def _plan(self) -> PlannedFault | None:
        """The fault of the request that has just come."""
        for fault in self.faults:
            if fault.times and fault.request in (None, len(self.runs)):
                fault.times -= 1
                return fault
        return None

    def _leave(self, run: R) -> None:
        run.running = False
        if run in self._live:
            self._live.remove(run)
        if run in self._queue:
            self._queue.remove(run)
        run.news.set()
        self._changed.set()

    async def _news(self, run: R) -> None:
        run.news.clear()
        await run.news.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # ---------------------------------------------------------------- answers

    async def _plain(self, request: web.Request, run: R) -> web.StreamResponse:
        alive = None
        while not run.over:
            if run.frozen and run.hit(*KEEPS_ALIVE):
                alive = await spaces(request, alive)
            else:
                await self._news(run)
        if run.dead:
            return cut(request)
        failure = self._failure(run)
        if failure is not None:
            return failure
        text = self._said(run)
        run.sent = run.flushed
        if alive is not None:
            await alive.write(text.encode())
            return alive
        return web.Response(text=text, content_type="application/json")

    async def _stream(self, request: web.Request, run: R) -> web.StreamResponse:
        response = await event_stream(request)
        while True:
            while run.flushed == run.sent and not run.over:
                if run.frozen and run.hit(*KEEPS_ALIVE):
                    await response.write(self._alive(run))
                    await asyncio.sleep(KEEP_ALIVE_S)
                else:
                    await self._news(run)
            if run.dead:
                return cut(request)
            ended, event, fresh = run.over, self._said(run), run.sent < run.flushed
            run.sent = run.flushed
            await self._write(response, run, event)
            doubled = run.hit(RequestFault.DOUBLED_EVENT) and fresh and run.fault and run.sent > run.fault.after_tokens
            if doubled or (run.hit(RequestFault.ENDS_TWICE) and ended):
                await self._write(response, run, event if doubled else self._said(run))
                run.fault = None
            if not event.endswith("}"):
                return cut(request)
            if ended:
                break
        for event in [] if run.failed else self._usage(run):
            await self._write(response, run, event)
        if not run.hit(RequestFault.NO_DONE):
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _alive(self, run: R) -> bytes:
        """A sign of life without tokens."""
        if run.hit(RequestFault.COMMENTS):
            return b": ping\n\n"
        if run.hit(RequestFault.PINGS):
            return b"event: ping\n\n"
        return "".join(f"data: {event}\n\n" for event in (self._said(run), *self._usage(run))).encode()

    async def _write(self, response: web.StreamResponse, run: R, event: str) -> None:
        raw = f"data: {event}\n\n".encode()
        if not run.hit(RequestFault.TRICKLE):
            await response.write(raw)
            return
        for i in range(len(raw)):
            await response.write(raw[i : i + 1])
            await asyncio.sleep(0)

    # ---------------------------------------------------------------- control

    @web.middleware
    async def _see(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._transports.add(request.transport)
        early = await self._early(request)
        response = early if early is not None else await self._controlled(request, handler)
        if self.unanswered.get(request.path):
            self.unanswered[request.path] -= 1
            return cut(request)
        return response

    async def _controlled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or what goes wrong with it by the script."""
        for fault in self.control_faults:
            if fault.route != request.path or not fault.times:
                continue
            if fault.later:
                fault.later -= 1
                continue
            fault.times -= 1
            if fault.kind is ControlFault.RESTARTS_BEFORE:
                self._restart_at_once()
                return await handler(request)
            if fault.kind is ControlFault.RESTARTS_AFTER:
                response = await handler(request)
                self._restart_at_once()
                return response
            if fault.kind is ControlFault.SILENT:
                await handler(request)
                while self.alive:
                    await self._wait()
                return cut(request)
            if fault.obeyed:
                await handler(request)
            return await wrong_answer(fault.kind, request)
        return await handler(request)


async def event_stream(request: web.Request) -> web.StreamResponse:
    """The beginning of an answer in events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def events(request: web.Request, *said: str) -> web.StreamResponse:
    """A whole answer in events."""
    response = await event_stream(request)
    await response.write("".join(f"data: {event}\n\n" for event in said).encode())
    await response.write_eof()
    return response


async def spaces(request: web.Request, response: web.StreamResponse | None) -> web.StreamResponse:
    """A sign of life of a plain answer, whose JSON comes later."""
    if response is None:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
    await response.write(b" ")
    await asyncio.sleep(KEEP_ALIVE_S)
    return response


def error(status: int, message: str, *, close: bool = False, param: str | None = None) -> web.Response:
    """An answer in the words of OpenAI's server."""
    said = {"error": {"message": message, "type": "Error", "param": param, "code": status}}
    response = web.json_response(said, status=status)
    if close:
        response.force_close()
    return response


def at_once(kind: RequestFault) -> web.Response:
    """The answer to a request that is not run."""
    match kind:
        case RequestFault.BUSY:
            return error(503, "The engine is starting.")
        case RequestFault.LIMITED:
            response = error(429, "Too many requests.")
            response.headers["Retry-After"] = "2"
            return response
        case RequestFault.REFUSED:
            return error(400, "This request is wrong.")
        case RequestFault.GIANT:
            return web.Response(status=500, body=b"x" * (1 << 24))
        case RequestFault.REDIRECT:
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/elsewhere"})
        case _:
            return error(500, "Internal error", close=True)


def cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
