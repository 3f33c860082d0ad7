"""Examines servers: reaches, identifies and probes them. Each step has a timeout; results so far are always kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from april.config.engines import AddressedEngineConfig, ServerEngineConfig, SglangEngineConfig
from april.config.settings import Config
from april.doctor.findings import CONFIGURATION, Finding, Level, Report, ServerReport, abilities
from april.doctor.reach import (
    missing,
    not_probed,
    paused_finding,
    resting_finding,
    router_settings,
    why_no_http,
    why_unreachable,
)
from april.engines.fit import why_unfit
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import ServerFacts, api_key
from april.engines.kinds.identify import SETTINGS, VERSION_CHARS, Identity, ServerKind, identify, probe, why_silent
from april.engines.sglang.router import require_same_workers
from april.errors import ConfigError, EngineBusy, EngineError
from april.text.server_text import clean


def differences(servers: Mapping[str, ServerFacts]) -> list[Finding]:
    """Return findings on differences between servers (by address) in values that must or should be equal."""
    found: list[Finding] = []
    for what, of, level, advice, promise in _COMMON:
        values = {url: of(facts) for url, facts in servers.items() if of(facts) not in (None, "")}
        if len(set(values.values())) > 1:
            given = ", ".join(f"{clean(value)} ({url})" for url, value in values.items())
            found.append(Finding("several", level, f"the servers differ in their {what}: {given}", advice, promise))
    return found


_SAME_MODEL = "serve the same model everywhere"
_COMMON: tuple[tuple[str, Callable[[ServerFacts], Any], Level, str, str], ...] = (
    ("vocabulary", lambda s: s.capabilities.vocab_size, Level.MISSING, _SAME_MODEL, ""),
    (
        "model", lambda s: s.model, Level.LIMITED, f"{_SAME_MODEL}; if only the names differ, ignore this",
        "all servers have the same weights before the first update",
    ),
    (
        "EOS ids", lambda s: s.capabilities.eos_token_ids, Level.LIMITED, _SAME_MODEL,
        "a response ends in the same way at every server",
    ),
    (
        "log-probabilities", lambda s: s.capabilities.logprob_kind, Level.LIMITED,
        "start all servers with the same flags",
        "log-probabilities are of one kind",
    ),
    (
        "software version", lambda s: s.software, Level.LIMITED,
        "run the same software everywhere, or a response that continues at another server may differ in its last "
        "digits",
        "all servers compute exactly the same values",
    ),
)  # fmt: skip
"""Values in which servers are compared: (name, function that returns the value, level of the finding if they differ,
advice, promise that april cannot keep then)."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of the doctor, in seconds."""

    total_s: float = 15.0
    """Limit for the whole examination."""
    each_s: float = 4.0
    """Limit for opening a connection, and for one response while the kind of the server is being found out."""


async def examine_urls(urls: Sequence[str], key: str | None, time_limits: TimeLimits) -> Report:
    """Examine servers that are given only by their addresses."""
    examinations = [Examination(url, key, None, time_limits) for url in urls]
    report = await _run(examinations, time_limits)
    report.engine_settings = _settings(examinations)
    return report


async def examine_config(config: Config, time_limits: TimeLimits) -> Report:
    """Examine the servers of a configuration, and check whether they fit it."""
    engine = config.engine
    if not isinstance(engine, ServerEngineConfig):
        sentence = f"engine.kind {engine.kind} runs in the trainer's process, so there is no server to examine"
        if isinstance(engine, AddressedEngineConfig):
            sentence = f"engine.kind {engine.kind}: servers of april itself need no examination"
        return Report([], [Finding("engine", Level.OK, sentence)])
    try:
        key = api_key(engine)
    except ConfigError as error:
        return Report([], [missing("key", str(error), f"export {engine.api_key_env}=...")])
    examinations = [Examination(url, key, config, time_limits) for url in engine.urls]
    if isinstance(engine, SglangEngineConfig) and engine.router is not None:
        examinations.append(RouterExamination(engine.router, key, config, time_limits))
    report = await _run(examinations, time_limits)
    engines = {e.name: e.facts.capabilities for e in examinations if e.facts is not None}
    report.together += [Finding(CONFIGURATION, Level.MISSING, sentence) for sentence in why_unfit(config, engines)]
    return report


class Examination:
    """Examines one server. ``found`` is valid at any time, even if the examination is interrupted."""

    def __init__(self, url: str, key: str | None, config: Config | None, time_limits: TimeLimits) -> None:
        self.found = ServerReport(url=url)
        self.name = urlsplit(url).netloc
        self.identity: Identity | None = None
        self.facts: ServerFacts | None = None
        self._key = key
        self._config = config
        self._settings: Any = None if config is None else config.engine
        self._time_limits = time_limits

    async def run(self) -> None:
        client = HttpClient(
            self.found.url, name=self.name, api_key=self._key, connect_timeout_s=self._time_limits.each_s
        )
        try:
            trouble = await self._identify(client)
            if trouble is not None:
                self.found.findings.append(trouble)
                return
            assert self.identity is not None
            self.found.kind, self.found.version = self.identity.kind.value, self.identity.version
            self.found.model = next(iter(self.identity.models), None)
            await self._examine(client, self.identity)
        except ConfigError as error:
            self.found.findings.append(missing("offer", str(error), self._unreported_advice()))
        except EngineError as error:
            advice = "look at the server's log, and run april doctor again"
            self.found.findings.append(missing("offer", str(error), advice))
        finally:
            await client.close()

    def _unreported_advice(self) -> str:
        if self._settings is not None or self.identity is None:
            return ""
        engine = f"engine: {{kind: {self.identity.kind.value}, urls: [{self.found.url}], ...}}"
        return f"set it in a configuration ({engine}), and run april doctor --config FILE"

    def note_timeout(self) -> None:
        """Add a finding that the time limit was reached."""
        sentence = f"{self.found.url} did not report its features within {self._time_limits.total_s:g} s"
        advice = "is it overloaded with requests? look at its log, and run april doctor again"
        self.found.findings.append(missing("time", sentence, advice))

    async def _identify(self, client: HttpClient) -> Finding | None:
        url, each_s = self.found.url, self._time_limits.each_s
        trouble = await why_unreachable(url, each_s)
        if trouble is not None:
            return trouble
        try:
            self.identity = await identify(client, each_s)
        except EngineError as error:
            return why_no_http(url, error, each_s)
        return None

    async def _examine(self, client: HttpClient, identity: Identity) -> None:
        found = self.found
        stop = not_probed(found.url, identity, self._settings, key_given=self._key is not None)
        if stop is not None:
            found.findings.append(stop)
            return
        why = await why_silent(client, identity.kind, self._time_limits.each_s)
        if why:
            found.findings.append(paused_finding(found.url, identity.kind, why))
            return
        settings = self._settings or SETTINGS[identity.kind](urls=(found.url,))
        try:
            self.facts = await probe(client, settings)
        except EngineBusy as error:
            found.findings.append(resting_finding(found.url, str(error)))
            return
        facts = self.facts
        found.version = clean(facts.software, VERSION_CHARS) or found.version
        found.model = clean(facts.model)
        found.findings += abilities(facts.capabilities, self._config)
        found.limits += facts.capabilities.limits


class RouterExamination(Examination):
    """Examines the router that a configuration names."""

    async def _examine(self, client: HttpClient, identity: Identity) -> None:
        await require_same_workers(client, self._settings)
        self.found.findings.append(Finding("workers", Level.OK, "the router's workers are those of engine.urls"))


async def _run(examinations: Sequence[Examination], time_limits: TimeLimits) -> Report:
    """Run all examinations concurrently, until they finish or the time limit is reached."""
    began = time.monotonic()
    tasks = {asyncio.create_task(e.run()): e for e in examinations}
    _, late = await asyncio.wait(tasks, timeout=time_limits.total_s)
    for task in late:
        task.cancel()
        tasks[task].note_timeout()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    together = differences({e.found.url: e.facts for e in examinations if e.facts is not None})
    return Report([e.found for e in examinations], together, seconds=time.monotonic() - began)


def _settings(examinations: Sequence[Examination]) -> str:
    """Return an ``engine`` section for these servers; empty if no single one fits all."""
    known = [(e.found.url, e.identity) for e in examinations if e.identity is not None]
    if [identity.kind for _, identity in known] == [ServerKind.ROUTER]:
        return router_settings(*known[0])
    kinds = {identity.kind for _, identity in known}
    if len(kinds) != 1 or any(e.facts is None for e in examinations):
        return ""
    return f"engine: {{kind: {kinds.pop().value}, urls: [{', '.join(url for url, _ in known)}]}}"
