"""What the doctor found: plain records, from which both the report and the JSON are made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

_FLAG = re.compile(
    r"--enable-[a-z-]+|--incremental-streaming-output|--logprobs-mode [a-z_]+|--api-server-count \d+"
    r"|--stream-interval|--return-tokens-as-token-ids|\b[A-Z]+(?:_[A-Z]+)+=\d+"
)
"""Flags and variables of servers, as sentences name them."""


CONFIGURATION = "configuration"
"""Subject of what stands against the configuration."""


class Level(StrEnum):
    """How well a server does one thing."""

    OK = "ok"
    REMARK = "remark"
    """Good to know; exactness does not depend on it."""
    LIMITED = "limited"
    """It works, at a price that the finding names."""
    MISSING = "missing"
    """april cannot work so."""


class Verdict(StrEnum):
    """Will april be exact with it?"""

    EXACT = "exact"
    """Every token's version and log-probability are known, and nothing is lost on an abort."""
    LIMITED = "exact, with limits"
    """The same, but something costs time or depends on the server's life; the findings name it."""
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


@dataclass(slots=True)
class Examined:
    """One server, as far as the examination came."""

    url: str
    kind: str = ""
    """As in ``engine.kind``, or what else it is; empty if it was not reached."""
    version: str | None = None
    model: str | None = None
    findings: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """What its probe says is not as it should be, what that costs, and what to do; one sentence each."""

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        return verdict_of(self.findings)

    @property
    def flags(self) -> list[str]:
        """What to add to the server's command line, or to its environment (NAME=value): all that ``changes`` names."""
        return list(dict.fromkeys(_FLAG.findall(" ".join(self.changes))))


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
        return verdict_of([f for server in self.servers for f in server.findings] + self.together)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "verdict": self.verdict.value,
            "usable": self.verdict.usable,
            "servers": [
                asdict(s) | {"verdict": s.verdict.value, "flags": s.flags} for s in self.servers
            ],
            "together": [asdict(f) for f in self.together],
            "engine_settings": self.engine_settings,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The worst level decides."""
    levels = {finding.level for finding in findings}
    if Level.MISSING in levels:
        return Verdict.UNUSABLE
    return Verdict.LIMITED if Level.LIMITED in levels else Verdict.EXACT
