"""What the doctor found: plain records, from which both the report and the JSON are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from april.engine_limits import Limit

CONFIGURATION = "configuration"
"""Subject of what stands against the configuration."""


class Level(StrEnum):
    """How well a server does one thing."""

    OK = "ok"
    REMARK = "remark"
    """Good to know; exactness does not depend on it."""
    LIMITED = "limited"
    """It works without a promise, which the finding names."""
    MISSING = "missing"
    """april cannot work so."""


class Verdict(StrEnum):
    """Will april be exact with it?"""

    EXACT = "exact"
    """All that april promises: every token's version and log-probability are known, and nothing is lost on an abort."""
    LIMITED = "usable, with limits"
    """Not all of it; the findings name the promises that are not kept."""
    UNUSABLE = "not usable"
    """april refuses to run with it, or cannot reach it."""

    @property
    def usable(self) -> bool:
        """Whether april can run with it."""
        return self is not Verdict.UNUSABLE


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a server can or cannot do."""

    subject: str
    level: Level
    sentence: str
    advice: str = ""
    """What to do about it; empty if nothing."""
    promise: str = ""
    """What april does not promise because of it, in words that end "april does not promise that"; for every limit."""
    flags: tuple[str, ...] = ()
    """Of the server's command line or environment (NAME=value), that change it."""


@dataclass(slots=True, kw_only=True)
class Examined:
    """One server, as far as the examination came."""

    url: str
    kind: str = ""
    """As in ``engine.kind``, or what else it is; empty if it was not reached."""
    version: str | None = None
    model: str | None = None
    findings: list[Finding] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    """What its probe says is not as it should be, what that costs, and what to do."""

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        return verdict_of(self.findings)

    @property
    def changes(self) -> list[str]:
        """The limits, one sentence each."""
        return [limit.sentence for limit in self.limits]

    @property
    def flags(self) -> list[str]:
        """What exactness needs on the server's command line, or in its environment (NAME=value)."""
        return _each_once(finding.flags for finding in self.findings if finding.level is Level.LIMITED)

    @property
    def optional_flags(self) -> list[str]:
        """Those of ``limits`` beyond :attr:`flags`: for speed, or for runs that repeat."""
        return [flag for flag in _each_once(limit.flags for limit in self.limits) if flag not in self.flags]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {
            "verdict": self.verdict.value,
            "changes": self.changes,
            "flags": self.flags,
            "optional_flags": self.optional_flags,
        }


@dataclass(slots=True)
class Report:
    """All servers, and what concerns them together or the configuration."""

    servers: list[Examined]
    together: list[Finding] = field(default_factory=list)
    engine_settings: str = ""
    """The ``engine`` section for the configuration; empty if there is none to recommend."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of all servers and of what concerns them together."""
        return verdict_of(self.all)

    @property
    def all(self) -> list[Finding]:
        """Of all servers, then those that concern them together."""
        return [f for server in self.servers for f in server.findings] + self.together

    @property
    def not_promised(self) -> list[str]:
        """What april does not promise with these servers, each once."""
        return list(dict.fromkeys(f.promise for f in self.all if f.level is Level.LIMITED))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "verdict": self.verdict.value,
            "usable": self.verdict.usable,
            "not_promised": self.not_promised,
            "servers": [server.as_dict() for server in self.servers],
            "together": [asdict(f) for f in self.together],
            "engine_settings": self.engine_settings,
            "seconds": round(self.seconds, 2),
        }


def _each_once(flags: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(flag for some in flags for flag in some))


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The worst level decides."""
    levels = {finding.level for finding in findings}
    if Level.MISSING in levels:
        return Verdict.UNUSABLE
    return Verdict.LIMITED if Level.LIMITED in levels else Verdict.EXACT
