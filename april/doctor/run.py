"""Implements the command ``april doctor``: arguments, report on the terminal (rich) and exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from april.config.engines import checked_url, key_of_variable
from april.config.settings import Config
from april.doctor.examine import TimeLimits, examine_config, examine_urls
from april.doctor.findings import CONFIGURATION, Finding, Level, Report, ServerReport, Verdict
from april.errors import ConfigError

_STYLE = {Verdict.EXACT: "bold green", Verdict.LIMITED: "bold yellow", Verdict.UNUSABLE: "bold red"}
_MARK = {
    Level.OK: ("ok", "green"),
    Level.REMARK: ("note", "cyan"),
    Level.LIMITED: ("limit", "yellow"),
    Level.MISSING: ("no", "red"),
}


def show(report: Report, console: Console) -> None:
    for part in parts(report):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def parts(report: Report) -> Iterator[RenderableType]:
    yield Text(_headline(report), style=_STYLE[report.verdict])
    if report.verdict is Verdict.LIMITED:
        for promise in report.not_promised:
            yield Padding(Text(f"- {promise}"), (0, 0, 0, 2))
    several = len(report.servers) > 1
    for server in report.servers:
        yield ""
        yield _who(server, with_verdict=several)
        yield _table(server.findings)
        shown = {finding.sentence for finding in server.findings}
        remarks = [limit.of("It") for limit in server.limits if limit.of("It").statement not in shown]
        if remarks:
            yield Text("  Besides:")
            yield from (Padding(Text(remark.sentence), (0, 0, 0, 3)) for remark in remarks)
        if server.flags:
            yield Text(f"  Flags and variables that exact results need: {' '.join(server.flags)}")
    if report.together:
        yield ""
        configured = any(finding.subject == CONFIGURATION for finding in report.together)
        yield Text("With this configuration" if configured else "Together", style="bold")
        yield _table(report.together)
    if report.engine_settings:
        yield ""
        yield Text(f"In april's configuration: {report.engine_settings}")


def _headline(report: Report) -> str:
    if not report.servers:
        return report.together[0].sentence
    several = len(report.servers) > 1
    what = f"these {len(report.servers)} servers" if several else "this server"
    match report.verdict:
        case Verdict.EXACT:
            return f"exact: april gives exact results with {what}"
        case Verdict.LIMITED:
            return f"usable, with limits: april can use {what}, but does not promise that"
        case _:
            return f"not usable: april cannot use {what} as {'they are' if several else 'it is'}"


def _who(server: ServerReport, with_verdict: bool) -> Text:
    words = [server.url]
    if server.kind:
        words.append(" ".join(filter(None, (server.kind, server.version))))
    if server.model:
        words.append(f"model {server.model}")
    text = Text("  ".join(words), style="bold")
    if with_verdict:
        text.append(f"  {server.verdict.value}", style=_STYLE[server.verdict])
    return text


def _table(findings: list[Finding]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        word, colour = _MARK[finding.level]
        text = Text(finding.sentence)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", style="bold")
        table.add_row(Text(word, style=colour), finding.subject, text)
    return table


def examine(urls: Sequence[str], config: Path | None, api_key_env: str | None, time_limits: TimeLimits) -> Report:
    """Examine the servers or the configuration that the command line names.

    Raises:
        ConfigError: neither or both are named, an address is not valid, or the configuration is wrong.
    """
    if bool(urls) == (config is not None):
        raise ConfigError("give servers (april doctor http://127.0.0.1:8000) or a configuration (--config april.yaml)")
    if config is not None:
        if api_key_env is not None:
            raise ConfigError(
                "--api-key-env is for servers given by address; in a configuration, set engine.api_key_env"
            )
        return asyncio.run(examine_config(Config.from_yaml(config), time_limits))
    key = None if api_key_env is None else key_of_variable(api_key_env, "--api-key-env")
    return asyncio.run(examine_urls(list(dict.fromkeys(map(checked_url, urls))), key, time_limits))


def present(report: Report, as_json: bool) -> int:
    """Print the report and return the exit code: 0 if april can use the servers, else 1."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, Console())
    return 1 if report.verdict is Verdict.UNUSABLE else 0
