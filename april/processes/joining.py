"""How a host joins: what it says of itself, why it may not, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from april.config.engine_fit import why_unfit
from april.config.settings import Config
from april.core.sampling import LogprobKind
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.driver.local_host import limits_from
from april.driver.sample_functions import UserFunctions
from april.engines.protocol import Capabilities, Engine
from april.processes.link import Link
from april.processes.messages import (
    PROTOCOL,
    EngineCard,
    Joined,
    ProtocolError,
    Welcome,
    decode_from_host,
    encode,
)

BEATS = 4
"""Heartbeats of either side within the deadline."""


@dataclass(frozen=True, slots=True, eq=False)
class Guest:
    """A host that wants to join, or has joined."""

    link: Link
    joined: Joined
    engines: Mapping[str, Capabilities]
    """By global name."""

    @property
    def name(self) -> str:
        """Its own."""
        return self.joined.name

    @property
    def limits(self) -> list[EngineLimits]:
        """What the core must know of its engines."""
        written = {f"{self.name}/{card.name}" for card in self.joined.engines if card.written}
        return [replace(limits_from(n, c), written=n in written) for n, c in self.engines.items()]


# -------------------------------------------------------------------- the host


def joined_frame(
    name: str, life: str, engines: Sequence[Engine], functions: UserFunctions | None, *, tokenizer: bool,
    written: Collection[str] = (),
) -> bytes:  # fmt: skip
    """The first frame of a host; without ``functions`` it runs none; ``written``: engines that an update has paused."""
    f = functions
    joined = Joined(
        protocol=PROTOCOL,
        name=name,
        life=life,
        engines=tuple(
            EngineCard(name=e.name, capabilities=_plain(e.capabilities), written=f"{name}/{e.name}" in written)
            for e in engines
        ),
        functions=f is not None,
        reward=f is not None and f.reward is not None,
        group_reward=f is not None and f.group_reward is not None,
        filter=f is not None and f.filter is not None,
        tokenizer=tokenizer,
    )
    return encode([joined])


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    """Without the sentences, which are for whoever looks at the engine itself."""
    plain: dict[str, Any] = msgspec.to_builtins(replace(capabilities, limits=()))
    return plain


# -------------------------------------------------------------------- the core's process


def guest_of(link: Link, frame: bytes) -> Guest:
    """Who has sent this first frame; raises ProtocolError."""
    messages = decode_from_host(frame)
    joined = messages[0] if len(messages) == 1 else None
    if not isinstance(joined, Joined):
        raise ProtocolError("it does not say who it is")
    if joined.protocol != PROTOCOL:
        raise ProtocolError(f"host {joined.name} is of another version of april; install the same on both sides")
    known = {f.name for f in fields(Capabilities)}
    try:
        engines = {
            f"{joined.name}/{card.name}": msgspec.convert(
                {k: v for k, v in card.capabilities.items() if k in known}, Capabilities
            )
            for card in joined.engines
        }
    except msgspec.ValidationError as error:
        raise ProtocolError(f"host {joined.name}: an engine's capabilities cannot be read: {error}") from None
    return Guest(link, joined, engines)


def why_not(guest: Guest, config: Config, core: RolloutCore | None, *, tokenizer: bool) -> Iterator[str]:
    """What stands against a host, one sentence each; without a ``core`` (yet) only what is known of it.

    ``tokenizer``: whether the scheduler has one.
    """
    joined, name = guest.joined, f"host {guest.name}"
    if not joined.name or "/" in joined.name or not joined.name.isprintable():
        yield f"host {joined.name!r}: its name must be printable, and without a slash"
    if not guest.engines and not joined.functions:
        yield f"{name} has neither engines nor functions"
    if len(guest.engines) < len(joined.engines):
        yield f"{name}: names of engines must be unique, got {[card.name for card in joined.engines]}"
    if tokenizer and not joined.tokenizer:
        yield f"{name} needs a tokenizer, as the scheduler has one"
    yield from why_unfit(config, guest.engines)
    if core is None:
        return
    for limits in guest.limits:
        if (why := core.engines.unfit(limits)) is not None:
            yield why
    if joined.functions:
        s = core.settings
        here = (s.has_reward and not s.group_reward, s.group_reward, s.has_filter)
        there = (joined.reward, joined.group_reward, joined.filter)
        for function, mine, theirs in zip(("reward", "group_reward", "filter"), here, there, strict=True):
            if mine != theirs:
                has, lacks = ("the scheduler", "it") if mine else ("it", "the scheduler")
                yield f"{name}: {has} has a function {function}, and {lacks} has none; give both the same"


def welcome_of(name: str, core: RolloutCore, config: Config, deadline_s: float) -> Welcome:
    """What a host that joins is told."""
    s, table = core.settings, core.engines
    return Welcome(
        name=name,
        version=core.clock.current,
        eos_token_ids=tuple(sorted(table.eos_token_ids)),
        vocab_size=table.vocab_size,
        max_context=table.max_context,
        max_response_len=s.max_response_len,
        abort_resend_s=s.abort_resend_s,
        abort_deadline_s=s.abort_deadline_s,
        heartbeat_s=deadline_s / BEATS,
        deadline_s=deadline_s,
        sampling=config.sampling_params(),
        any_temperature=all(LogprobKind(e.limits.logprob_kind).follows_temperature for e in table.states.values()),
        allow_mismatch=config.allow_mismatch,
        function_timeout_s=config.function_timeout_s,
        warn_after_s=config.warned_after_s,
        stall_timeout_s=config.stall_timeout_s,
    )

