"""Defines the findings of ``april doctor``, plain records from which both the printed report and the JSON are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from april.config.settings import Config
from april.core.engine_limits import Level as Level
from april.core.engine_limits import Limit, LimitCode
from april.engines.abilities import ABILITIES, Capabilities

CONFIGURATION = "configuration"
"""Subject of findings about the configuration."""


class Verdict(StrEnum):
    """Overall result: whether april keeps all its promises with the servers."""

    EXACT = "exact"
    """april keeps all promises: every token's version and log-probability are known, and an abort loses nothing."""
    LIMITED = "usable, with limits"
    """april keeps only some promises; the findings name the others."""
    UNUSABLE = "not usable"
    """april refuses to run with the server, or cannot reach it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement about one thing that a server can or cannot do."""

    subject: str
    level: Level
    sentence: str
    advice: str = ""
    """Advice to the user; empty if there is none."""
    promise: str = ""
    """Promise that april does not keep because of this finding; every finding of level LIMITED has one."""
    flags: tuple[str, ...] = ()
    """The server's flags and environment variables (NAME=value) that would change the finding."""


@dataclass(slots=True, kw_only=True)
class ServerReport:
    """Results of the examination of one server so far."""

    url: str
    kind: str = ""
    """The ``engine.kind`` of the server, or a description of its kind; empty if it was not reached."""
    version: str | None = None
    model: str | None = None
    findings: list[Finding] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    """Limits that the probe of the server found."""

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.findings)

    @property
    def flags(self) -> list[str]:
        """Flags and variables of the server that are needed for exactness, each once."""
        limited = [finding for finding in self.findings if finding.level is Level.LIMITED]
        return list(dict.fromkeys(flag for finding in limited for flag in finding.flags))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict.value, "flags": self.flags}


@dataclass(slots=True)
class Report:
    """Findings about each server, about all servers together, and about their fit with the configuration."""

    servers: list[ServerReport]
    together: list[Finding] = field(default_factory=list)
    engine_settings: str = ""
    """The ``engine`` section for the configuration; empty if there is none to recommend."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.all)

    @property
    def all(self) -> list[Finding]:
        """All findings: those about each server, then those about all together."""
        return [f for server in self.servers for f in server.findings] + self.together

    @property
    def not_promised(self) -> list[str]:
        """The promises that april does not keep with these servers, each once."""
        return list(dict.fromkeys(f.promise for f in self.all if f.level is Level.LIMITED))

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "usable": self.verdict is not Verdict.UNUSABLE,
            "not_promised": self.not_promised,
            "servers": [server.as_dict() for server in self.servers],
            "together": [asdict(f) for f in self.together],
            "engine_settings": self.engine_settings,
            "seconds": round(self.seconds, 2),
        }


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict by the worst level among the findings."""
    levels = {finding.level for finding in findings}
    if Level.MISSING in levels:
        return Verdict.UNUSABLE
    return Verdict.LIMITED if Level.LIMITED in levels else Verdict.EXACT


NO_REMEDY = "servers of this kind do not return it; vLLM and SGLang servers under their own engine.kind do"
_OTHER_SUBJECTS = {
    LimitCode.SEVERAL_COPIES: "copies", LimitCode.SPECULATION: "speculation", LimitCode.CHUNKED_PREFILL: "chunks",
}  # fmt: skip
"""Subjects of limits that no field of the capabilities shows."""


def abilities(c: Capabilities, config: Config | None = None) -> list[Finding]:
    """Return a finding for each ability of a server, the most important first, then for each other limit.

    ``config`` is the configuration that names the server, if there is one.
    """
    found: list[Finding] = []
    for ability in ABILITIES:
        said = ability.shown(c, config)
        if said:
            found.append(Finding(ability.subject, Level.OK, said))
        elif said is None and ability.remark is not None:
            found.append(Finding(ability.subject, Level.REMARK, ability.remark(c)))
        elif said is None:
            why = c.cause(ability.name) or Limit(ability.causes[-1], ability.lacking)
            found.append(_of_limit(ability.subject, why))
    return found + [_of_limit(_OTHER_SUBJECTS[x.code], x) for x in c.limits if x.code in _OTHER_SUBJECTS]


def _of_limit(subject: str, why: Limit) -> Finding:
    return Finding(subject, Level.LIMITED, why.of("It").statement, why.remedy or NO_REMEDY, why.promise, why.flags)
