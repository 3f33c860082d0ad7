"""The report on a terminal (rich): the verdict first, then what each server can do, then what to change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from april.doctor.findings import CONFIGURATION, Examined, Finding, Level, Report, Verdict

_STYLE = {Verdict.EXACT: "bold green", Verdict.LIMITED: "bold yellow", Verdict.UNUSABLE: "bold red"}
_MARK = {
    Level.OK: ("ok", "green"),
    Level.REMARK: ("note", "cyan"),
    Level.LIMITED: ("limit", "yellow"),
    Level.MISSING: ("no", "red"),
}


def show(report: Report, console: Console) -> None:
    """Print it."""
    for part in parts(report):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def parts(report: Report) -> Iterator[RenderableType]:
    """From top to bottom."""
    yield Text(_headline(report), style=_STYLE[report.verdict])
    if report.verdict is Verdict.LIMITED:
        for promise in report.not_promised:
            yield Padding(Text(f"- {promise}"), (0, 0, 0, 2))
    several = len(report.servers) > 1
    for server in report.servers:
        yield ""
        yield _who(server, with_verdict=several)
        yield _table(server.findings)
        if server.limits:
            yield Padding(_changes(server), (0, 0, 0, 2))
        if server.flags:
            yield Text(f"  Flags and variables that exactness needs: {' '.join(server.flags)}")
        if server.optional_flags:
            yield Text(f"  Optional, for speed or for runs that repeat: {' '.join(server.optional_flags)}")
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
            return f"exact: april will be exact with {what}"
        case Verdict.LIMITED:
            return f"usable, with limits: april can use {what}, but does not promise that"
        case _:
            return f"not usable: april cannot use {what} as {'they are' if several else 'it is'}"


def _who(server: Examined, with_verdict: bool) -> Text:
    said = [server.url]
    if server.kind:
        said.append(" ".join(filter(None, (server.kind, server.version))))
    if server.model:
        said.append(f"model {server.model}")
    text = Text("  ".join(said), style="bold")
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
        said = Text(finding.sentence)
        if finding.advice:
            said.append(f"\n-> {finding.advice}", style="bold")
        table.add_row(Text(word, style=colour), finding.subject, said)
    return table


def _changes(server: Examined) -> RenderableType:
    lines: list[RenderableType] = [Text("In full:")]
    for i, limit in enumerate(server.limits, 1):
        # the address stands above
        lines.append(Padding(Text(f"{i}. {limit.of('It').sentence}"), (0, 0, 0, 1)))
    return Group(*lines)
