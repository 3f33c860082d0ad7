"""Messages between the core's process and its hosts: MessagePack, no code.

The core's commands and events travel as they are where they refer to no live object; the others have messages of their
own here. A frame is a list of messages, in order, and no longer than need be: each is a sign of life. Arrays travel as
little-endian bytes, read as bytearrays so that nothing is copied again. Both sides are of one version of april, which a
host says first.

An attachment travels once to each side that has not got it, for a group, by a message of its own before the first one
that names it by its digest; it is forgotten with the group. Its bytes travel, also of one that is kept as the path of a
file: no two processes need to have a disk in common. Where the core's process cannot read that file its path travels,
for the host that can; a host names none. Rows of tokens travel from the host that has made them, once, in pieces before
the end of their attempt, and to no host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.tape import Float32, Int32
from april.core.types import AttemptFailure, EngineFinish, FinishReason, OnWeightUpdate
from april.core.versions import PolicyVersion
from april.errors import LinkError

PROTOCOL = 8
"""Raised whenever a message changes."""


FRAME_BYTES = 16 << 20
"""Bytes that end a frame: what follows goes into the next one."""


class ProtocolError(LinkError):
    """The other side says what cannot be: it is cut off."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages; a tag names the type."""


# -------------------------------------------------------------------- attachments, of either side


class Attach(Message, tag=15):
    """An attachment of a group that the other side has not got: its bytes, or the path of a file that has them."""

    group: int
    kind: str
    digest: str
    size: int
    data: bytes | None
    path: str


class Place(msgspec.Struct, array_like=True, gc=False):
    """An attachment at its place in a conversation, as :class:`april.core.attachments.Placed`, by its digest."""

    digest: str
    at: int
    count: int
    stands: tuple[int, ...]


# -------------------------------------------------------------------- the core's process to a host


class Welcome(Message, tag=0, kw_only=True):
    """The first frame: what a host must know of the run."""

    name: str
    version: PolicyVersion
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    max_response_len: int
    abort_resend_s: float
    abort_deadline_s: float
    deadline_s: float
    """Either side takes the other for lost when it has heard nothing for so long."""
    sampling: SamplingParams
    any_temperature: bool
    allow_mismatch: bool
    function_timeout_s: float | None
    stall_timeout_s: float | None
    warn_after_s: float | None = None


class Refusal(Message, tag=1):
    """Instead of a welcome."""

    why: str


class Now(Message, tag=2):
    """The policy version from here on."""

    version: PolicyVersion


class NewPrompt(Message, tag=3):
    """A group that the host has not heard of. ``evaluation``: its number, its first group, samples per prompt, and the
    sampling of its calls."""

    group: int
    tokens: bytearray
    data: dict[str, Any]
    epoch: int
    position: int
    evaluation: tuple[int, int, int, SamplingParams] | None = None
    attached: tuple[Place, ...] = ()


class OwnPart(Message, tag=4):
    """Tokens of a response that an attempt on this very host has brought."""

    attempt_id: str


class Part(Message, tag=5):
    """A segment of a response, as :class:`april.core.tape.Segment`."""

    version: PolicyVersion
    generated: bool
    attempt_id: str
    engine: str
    temperature: float
    tokens: bytearray
    logprobs: bytearray
    over: PolicyVersion | None = None


class Tape(Message, tag=6):
    """A response as it stands: its first ``keep`` segments are those that the host has; these follow.

    Of a response of several conversations it is one, ``chain``. ``prompt``: its own, where the host has another.
    ``attached``: all that is attached to the conversation, where the host knows it otherwise.
    """

    group: int
    index: int
    keep: int
    more: tuple[OwnPart | Part, ...]
    chain: int = 0
    prompt: bytearray | None = None
    attached: tuple[Place, ...] | None = None


class NoTape(Message, tag=9):
    """A response does not have this conversation any more."""

    group: int
    index: int
    chain: int


class Run(Message, tag=7):
    """Submit."""

    attempt_id: str
    group: int
    index: int
    engine: str
    call_start: int
    sampling: SamplingParams
    end_ids: tuple[int, ...] | None
    """None: those that end every response."""
    oldest: PolicyVersion | None
    urgent: bool
    chain: int = 0
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    extras: tuple[str, ...] = ()
    """Names of the rows that are wanted."""
    extras_from: int = 0


class Start(Message, tag=10):
    """StartSample; ``run`` goes with everything that its functions say."""

    group: int
    index: int
    run: int
    restarts: int = 0


class Answer(Message, tag=11):
    """CallCompleted: (start, end, finish) of the call with this ``number``, in its conversation."""

    group: int
    index: int
    start: int
    end: int
    finish: FinishReason
    number: int = 0
    chain: int = 0


class Score(Message, tag=12):
    """ScoreSample, or ``together`` ScoreGroup: (index, finish) of the samples; ``run`` is the first one's."""

    group: int
    run: int
    together: bool
    samples: tuple[tuple[int, FinishReason], ...]


class Judge(Message, tag=13):
    """JudgeGroup: (index, finish, reward) of its first finishers."""

    group: int
    judgement: int
    samples: tuple[tuple[int, FinishReason, float], ...]


class Cancel(Message, tag=14):
    """CancelSample."""

    group: int
    index: int


class Do(Message, tag=8):
    """A command of the core's that refers to no live object."""

    command: do.Abort | do.Fence | do.ProbeEngine | do.PauseEngine | do.LoadEngine | do.ResumeEngine


class Forget(Message, tag=19):
    """This group is settled; or, with ``indices``, only these samples of it."""

    group: int
    indices: tuple[int, ...] | None = None


class AskTapes(Message, tag=20):
    """Report what running requests have brought so far; answered by TapesSent."""

    number: int


class AskQuiet(Message, tag=21):
    """Say when nothing computes on the trainer's model any more; answered by Quieted."""

    number: int


class Goodbye(Message, tag=22):
    """The meant end of a connection, of either side."""

    why: str


# -------------------------------------------------------------------- a host to the core's process


class EngineCard(Message, tag=39, kw_only=True):
    """An engine's name and :class:`april.engines.protocol.Capabilities`, by fields."""

    name: str
    capabilities: dict[str, Any]
    written: bool
    """A weight update has paused it since the host began: it may have other weights than those of its start."""


class Joined(Message, tag=40, kw_only=True):
    """The first frame of a host."""

    protocol: int
    name: str
    life: str
    """A name that is the same at every connection of one host object, and no other's."""
    engines: tuple[EngineCard, ...]
    functions: bool
    """True if it runs rollout and reward functions."""
    reward: bool
    group_reward: bool
    filter: bool
    tokenizer: bool


class Heartbeat(Message, tag=41):
    """A sign of life."""


class Came(Message, tag=42):
    """Tokens of a running attempt from its token ``at`` on: their spans are (version, count), run-length."""

    attempt_id: str
    at: int
    tokens: bytearray
    logprobs: bytearray
    spans: tuple[tuple[PolicyVersion, int], ...]
    stopped: bool = False
    after_stop: int = 0
    """Tokens after a stop string, of all that came so far."""
    unknown: int = 0
    """Tokens that are left out, as nobody has named their weights."""
    bare: int = 0
    """Tokens that are left out, as they came without their rows."""


class Rows(Message, tag=52):
    """A piece of the rows of one name that an attempt brings, from row ``at`` of them on; it ends after the last one.

    ``dtype``: as numpy writes it; ``shape``: of one row.
    """

    attempt_id: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    data: bytearray


class Ended(Message, tag=43):
    """AttemptEnded; what it brought came before: ``count`` tokens, those after a stop string among them."""

    attempt_id: str
    finish: EngineFinish
    fenced: bool = False
    count: int = 0


class Failed(Message, tag=44):
    """AttemptFailed; what it brought came before, as in Ended."""

    attempt_id: str
    error: str
    kind: AttemptFailure
    rejected: int
    busy_s: float
    count: int = 0


class Called(Message, tag=47):
    """CallMade: the conversation is the first ``seen`` tokens of the response, and ``added`` (None: as it is).

    ``turn`` counts the calls of this run, from 1, and is the call's number. ``any_chain``: it may be of any
    conversation; ``chain`` is one that it extends, or None: all of it is in ``added``. ``attached``: all that is
    attached to it, where it is ``added`` to.
    """

    group: int
    index: int
    run: int
    turn: int
    sampling: SamplingParams
    seen: int
    added: bytearray | None
    any_chain: bool = False
    chain: int | None = 0
    attached: tuple[Place, ...] = ()


class Unheard(Message, tag=51):
    """CallUnheard, in this run."""

    group: int
    index: int
    run: int
    number: int


class Returned(Message, tag=48):
    """SampleReturned; in an evaluation with what the function returned, MessagePack, or why that cannot travel."""

    group: int
    index: int
    run: int
    output: bytes | None = None
    why_not: str = ""


class Raised(Message, tag=49):
    """SampleFailed."""

    group: int
    index: int
    run: int
    error: str
    kind: str


class Rewards(Message, tag=50):
    """Scored; ``index`` and ``run`` are those of the first sample that was to be scored."""

    group: int
    index: int
    run: int
    rewards: tuple[tuple[int, float], ...]


class Happened(Message, tag=45):
    """An event for the core that refers to no live object."""

    event: ev.StopFound | ev.AttemptStalled | ev.GroupJudged | ev.EngineCallEnded | ev.EngineProbed | ev.WeightsWritten


class TapesSent(Message, tag=56):
    """All that running requests had brought when AskTapes came was told."""

    number: int


class Quieted(Message, tag=57):
    """Answer to AskQuiet."""

    number: int


ToHost = (
    Welcome | Refusal | Now | Attach | NewPrompt | Tape | NoTape | Run | Do | Start | Answer | Score | Judge | Cancel
    | Forget | AskTapes | AskQuiet | Goodbye
)  # fmt: skip
FromHost = (
    Joined | Heartbeat | Came | Rows | Attach | Ended | Failed | Called | Unheard | Returned | Raised | Rewards
    | Happened | TapesSent | Quieted | Goodbye
)  # fmt: skip

_LARGE = frozenset({Attach, Rows})
"""Messages that may be longer than a frame should be."""
_BIG_ENDIAN = sys.byteorder == "big"


def _number(value: Any) -> int | float:
    """Turn numpy's numbers, which users may have given for sampling, into plain ones."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise TypeError(f"a value of type {type(value).__name__}")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_number)
_TO_HOST = msgspec.msgpack.Decoder(list[ToHost])
_FROM_HOST = msgspec.msgpack.Decoder(list[FromHost])


def encode(messages: Sequence[Message]) -> bytes:
    """A frame.

    Raises:
        ProtocolError: the data of a prompt are no plain numbers, strings, bytes, lists and mappings.
    """
    try:
        return ENCODER.encode(messages)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"this cannot travel between processes: {error}") from None


def first_frame(messages: Sequence[Message]) -> tuple[bytes, int]:
    """A frame of the first messages, and how many they are: all, but where some are large; as :func:`encode`."""
    if not any(type(message) in _LARGE for message in messages):
        return encode(messages), len(messages)
    parts, size = [], 0
    for message in messages:
        parts.append(encode([message])[1:])  # one byte says that the list has one item
        size += len(parts[-1])
        if size >= FRAME_BYTES:
            break
    return b"".join((b"\xdd", len(parts).to_bytes(4, "big"), *parts)), len(parts)


def decode_to_host(frame: bytes) -> list[ToHost]:
    """The messages of a frame of the core's process; raises ProtocolError."""
    try:
        return _TO_HOST.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the core's process sent what cannot be read: {error}") from None


def decode_from_host(frame: bytes) -> list[FromHost]:
    """The messages of a frame of a host; raises ProtocolError."""
    try:
        return _FROM_HOST.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a host sent what cannot be read: {error}") from None


# -------------------------------------------------------------------- plain forms


def ids_of(data: bytearray) -> Int32:
    """int32 [k], writable, of the same memory; raises ProtocolError."""
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no token ids")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def logprobs_of(data: bytearray) -> Float32:
    """float32 [k], writable, of the same memory; raises ProtocolError."""
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no log-probabilities")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def packed(array: Int32 | Float32) -> bytearray:
    """As little-endian bytes."""
    return bytearray(array.astype(array.dtype.newbyteorder("<"), copy=False) if _BIG_ENDIAN else array)
