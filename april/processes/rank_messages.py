"""Messages of ranks: each is one frame, msgpack without anything that is executed."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from april import errors
from april.driver.user_code import describe, message_of
from april.errors import AprilError, LinkError, RankError

TOLD_CHARS = 2000
"""The longest error message that goes to other ranks, in characters."""

Told = tuple[str, str, tuple[int, ...]]
"""An error: the name of its type, its message, and whose doing it is."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """Anything that is said."""


class Beat(Message):
    """A sign of life."""


class Joined(Message):
    """The number of its first call, for a rank that is taken."""

    call: int


class Arrive(Message):
    """A rank makes its call number ``call``: its name and arguments as text."""

    call: int
    what: str
    arguments: bytes = b""
    """of rank 0, where it does not carry the call out itself"""


class Leave(Message):
    """An interrupt has taken a rank out of its call; it may make the same one again."""

    call: int


class Done(Message):
    """A rank has carried out a step of a call, or could not."""

    call: int
    step: str
    error: str = ""


class Ask(Message):
    """A rank wants to look at something; no other rank has to."""

    number: int
    method: str
    arguments: list[Any]


class Bye(Message):
    """A rank has closed its scheduler, after an error if there is one."""

    error: str = ""


class Step(Message):
    """Carry this out now, all ranks, in the trainer's thread. ``what``: the call, as they have named it."""

    call: int
    step: str
    content: bytes = b""
    what: str = ""


class Answer(Message):
    """The end of a call, for all ranks. ``what``: as in Step; empty: of whatever the rank calls."""

    call: int
    content: bytes = b""
    error: Told | None = None
    what: str = ""


class Shown(Message):
    """The answer to Ask."""

    number: int
    content: bytes = b""
    error: Told | None = None


class Broken(Message):
    """The ranks do not go on together, by the doing of those named."""

    sentence: str
    ranks: tuple[int, ...]


Said = Beat | Joined | Arrive | Leave | Done | Ask | Bye | Step | Answer | Shown | Broken
_DECODER: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
encode = msgspec.msgpack.Encoder().encode


def decode(frame: bytes) -> Said:
    """The message of a frame; raises LinkError for anything else."""
    try:
        return _DECODER.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise LinkError(f"a rank has sent what is no message: {type(error).__name__}") from None


_TYPES: dict[str, type[AprilError]] = {
    name: kind for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, AprilError) and kind is not errors.OffPolicyError
}  # fmt: skip


def silence(deadline_s: float) -> str:
    """Return what is wrong with a process of which nothing was heard for so long."""
    return (
        f"nothing was heard of it for {deadline_s:g} s (rank_deadline_s); its process is stopped, or does not let "
        "april's thread run"
    )


def told(error: BaseException, who: str = "rank 0") -> Told:
    """An error for another rank: april's keep their type, all others become a RankError that names ``who``."""
    name = type(error).__name__
    if _TYPES.get(name) is type(error):
        return name, message_of(error)[:TOLD_CHARS], error.ranks if isinstance(error, RankError) else ()
    return RankError.__name__, f"{who} raised {describe(error)}"[:TOLD_CHARS], (0,)


def error_of(told: Told) -> AprilError:
    """The error as it was told."""
    name, message, ranks = told
    kind = _TYPES.get(name, RankError)
    return RankError(message, ranks) if kind is RankError else kind(message)
