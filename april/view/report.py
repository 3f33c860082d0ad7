"""Renders the HTML page of ``april report``.

The page is self-contained: it has no script and loads nothing, and every text from the record is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from april.auto.question import WorkSettings
from april.core.partial_buffer import IdleCause
from april.core.run_times import bottleneck_of
from april.text.server_text import printable
from april.version import __version__
from april.view import report_figures
from april.view.off_policy_summary import DRIFT, OffPolicySummary, off_policy_summary
from april.view.report_figures import HALF, WIDE, Colour
from april.view.run_data import RunData, RunDistance, limit_distance_of
from april.view.speed_up import SpeedUp, speed_up_of
from april.view.units import short_time

STYLE = """
*{box-sizing:border-box}
:root{--card:#f7f8fa;--text:#1f2328;--soft:#6a737d;--faint:#d5d9de}
body{margin:0;background:#ffffff;color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 20px 60px}
main.two{max-width:none}
h1{font-size:22px;margin:8px 0 2px}
h2{font-size:16px;margin:34px 0 4px}
p{margin:4px 0 10px;max-width:75ch}
.soft,footer{color:var(--soft)}
.advice{background:var(--card);border-left:4px solid #2f7fb8;padding:10px 14px;border-radius:4px;margin:14px 0}
.runs{display:grid;gap:28px;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.run{min-width:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:8px;margin:14px 0;padding:0}
.facts div{background:var(--card);border-radius:6px;padding:8px 12px}
.facts dt{color:var(--soft);font-size:12px;line-height:1.3}
.facts dd{margin:2px 0 0;font-size:19px;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
td,th{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid var(--faint);white-space:nowrap}
td:first-child,th:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:9em}
th{color:var(--soft);font-weight:500}
.bar{display:flex;height:26px;border-radius:4px;overflow:hidden}
.key{list-style:none;margin:6px 0 16px;padding:0;display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px}
.key i{display:inline-block;width:10px;height:10px;margin-right:6px}
svg{width:100%;min-width:440px;height:auto;display:block;font-family:system-ui,sans-serif}
footer{margin-top:40px;font-size:13px}
"""
EQUAL_SPEED = 0.02
"""Two speeds count as equal if they differ by less than this fraction."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
DROPS = {
    "groups_dropped_filtered": "prompts that the filter rejected",
    "groups_dropped_failed": "prompts that failed every try",
    "groups_dropped_stale": "prompts that were too old",
    "groups_put_aside": "unfinished prompts that begin again in a later round",
    "samples_dropped_failed": "responses that failed every try",
    "samples_dropped_stale": "responses that were too old",
    "prompts_too_long": "prompts without room for a response",
    "after_stop_tokens": "tokens after a stop string",
    "no_extras_tokens": "tokens that came without their rows of extras",
    "masked_tokens": "tokens without loss, because they were too old",
    "late_events": "results that came too late",
}


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """Results computed from a run's record before the page is drawn."""

    limit: RunDistance | None
    gain: SpeedUp
    health: OffPolicySummary | None

    @classmethod
    def of(cls, run: RunData) -> ReportFigures:
        """Compute the figures of a run."""
        limit = limit_distance_of(run)
        return cls(limit, speed_up_of(run, limit), off_policy_summary(run))


def page(runs: Sequence[RunData], found: Sequence[ReportFigures] | None = None) -> str:
    """Return the HTML report of one run, or of several runs side by side.

    ``found`` has the figures of the runs; None computes them.
    """
    runs = _distinct_names(runs)
    found = [ReportFigures.of(run) for run in runs] if found is None else found
    title = "april: " + " and ".join(run.name for run in runs)
    width = WIDE if len(runs) == 1 else HALF
    sections = "".join(f'<section class="run">{_run(run, i, found[i], width)}</section>' for i, run in enumerate(runs))
    body = f'<div class="runs">{sections}</div>' if len(runs) > 1 else sections
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{_text(title)}</title>"
        f"<style>{STYLE}</style></head>"
        f'<body><main class="{"two" if len(runs) > 1 else "one"}">{_comparison(runs, found)}{body}'
        f'<footer>Made by april {_text(__version__)} from the record{"s" if len(runs) > 1 else ""} of the run'
        f'{"s" if len(runs) > 1 else ""}.</footer></main></body></html>\n'
    )


def _text(text: str) -> str:
    """Escape the markup and the unprintable characters (direction marks, surrogates) of a text from the record."""
    return escape(printable(text))


def _distinct_names(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs; those that share a name get their path as the name."""
    names = Counter(run.name for run in runs)
    return [replace(run, name=str(run.path)) if names[run.name] > 1 else run for run in runs]


def _run(run: RunData, number: int, findings: ReportFigures, width: float) -> str:
    found = findings.limit
    steps = [batch.metrics for batch in run.batches]
    advice = bottleneck_of(steps, run.settings_at(run.batches[-1])) if steps else ""
    parts = [
        f"<h1>{_text(run.name)}</h1>",
        f'<p class="soft">{_text(_began(run))}; {_text(run.end)}.</p>',
        "<h2>Did april help?</h2>", _answer(speed_up_sentence(findings.gain)), _comparison_note(run, findings.gain),
        "<h2>The health of learning</h2>", _answer(off_policy_sentence(findings.health)), _by_age(findings.health),
        "<h2>What the trainer waited for</h2>" if advice else "",
        _answer(f"{advice[:1].upper() + advice[1:]}.") if advice else "",
        _facts(run, findings),
        "<h2>Busy places</h2>",
        f"<p>Each of the {run.places:,} places generates one response at a time. The colour shows the age of the "
        "response that it continues, in weight updates since the oldest token. Grey means empty.</p>",
        report_figures.busy_places(run, f"p{number}", width),
    ]
    if steps:
        if drawn := report_figures.rewards(run, f"r{number}", width):
            parts += ["<h2>Rewards</h2>", drawn]
        parts += [
            _settings(run),
            "<h2>Where the time went</h2>", _limit(run, found), report_figures.time_shares(run, f"t{number}", width),
            "<h2>How old the trained tokens are</h2>", report_figures.staleness(run, f"s{number}", width),
        ]  # fmt: skip
    if drawn := report_figures.lengths(run, f"l{number}", width):
        parts += ["<h2>Lengths: generated and trained</h2>", _lengths(run), drawn]
    parts += [_dropped(run), _engines(run)]
    return "".join(parts)


def speed_up_sentence(gain: SpeedUp) -> str:
    """Return a sentence that says whether the run was faster than synchronous steps would have been."""
    if gain.synchronous:
        return "The run itself was synchronous: it started no more groups than a step needs."
    if gain.doubt:
        return f"This record does not show it: {gain.doubt}."
    rates = f"{gain.real:,.0f} trained tokens per second against {gain.sync:,.0f}"
    if abs(gain.factor - 1.0) < EQUAL_SPEED:
        return f"Hardly: it is as fast as with synchronous steps ({rates}, simulated)."
    if gain.factor < 1.0:
        return f"No: it has {gain.factor:.2f}x the speed of synchronous steps ({rates}, simulated)."
    return f"Yes: it has {gain.factor:.2f}x the speed of synchronous steps ({rates}, simulated)."


def off_policy_sentence(health: OffPolicySummary | None) -> str:
    """Return a sentence that says how far off-policy the trained tokens were."""
    if health is None:
        return (
            "The record does not show it. Call rollouts.record_report(batch.id, april.off_policy_report(batch, "
            "logprobs)) before each optimizer step, with the trainer's own log-probabilities."
        )
    of_all = health.rows[0]
    figures = [f"KL {of_all.kl:.4f} nats per token"] if of_all.kl is not None else []
    figures += [f"effective sample size {of_all.ess:.0%}"] if of_all.ess is not None else []
    figures += [f"{of_all.clipped:.1%} of the tokens clipped"] if of_all.clipped is not None else []
    words = f"{', '.join(figures)}, over {health.batches:,} batches."
    if health.drifts:
        return f"The latest batches drift: a mean KL of {health.latest:.4f}, above {DRIFT:g}. In all: {words}"
    return f"No drift: the latest batches have a mean KL of {health.latest:.4f}, not above {DRIFT:g}. In all: {words}"


def _answer(sentence: str) -> str:
    return f'<p class="advice">{_text(sentence)}</p>'


def _comparison_note(run: RunData, gain: SpeedUp) -> str:
    if gain.synchronous or gain.doubt:
        return ""
    groups = f"{run.settings.rollout_batch_size:,} groups"
    return (
        f'<p class="soft">Synchronous steps: the responses of this record, {groups} at a time as they were drawn, on '
        "the same engines by their fitted cost, and the same time for training; "
        f"{gain.steps:,} such steps were simulated. None of their tokens is from older weights.</p>"
    )


def _by_age(health: OffPolicySummary | None) -> str:
    """Return an HTML table of how far off-policy the tokens are, with a row for each age; empty without reports."""
    if health is None:
        return ""
    rows = [
        [
            row.name, f"{row.tokens:,.0f}", "" if row.kl is None else f"{row.kl:.4f}",
            "" if row.ess is None else f"{row.ess:.0%}", "" if row.clipped is None else f"{row.clipped:.1%}",
        ]
        for row in health.rows
    ]  # fmt: skip
    return _table(rows, ["tokens", "number", "KL, nats per token", "effective sample size", "clipped"])


def _began(run: RunData) -> str:
    s = run.settings
    words = [f"Began {run.head.get('began')}, {_duration(run.seconds)}"]
    words += [f"N = {s.rollout_batch_size:,}, N' = {s.over_sampling_batch_size:,}"]
    words += [f"{s.n_samples_per_prompt} responses per prompt", f"{s.max_in_flight:,} places", f"refill {s.refill}"]
    words += [f"generation {s.generation}", f"max_staleness {s.max_staleness}, on_stale {s.on_stale}"]
    if s.group_quorum < 1:
        words.append(f"group_quorum {s.group_quorum:g}")
    return ", ".join(words)


def _sums(run: RunData) -> dict[str, float]:
    out: dict[str, float] = {}
    for batch in run.batches:
        for name, value in batch.metrics.items():
            out[name] = out.get(name, 0.0) + value
    return out


def _figures(run: RunData, findings: ReportFigures) -> dict[str, str]:
    found, gain, health = findings.limit, findings.gain, findings.health
    if not run.batches:
        return {"batches": "0", "requests": f"{len(run.engine):,}"}
    sums, steps = _sums(run), [batch.metrics for batch in run.batches]
    seconds, trained, generated = sums["step_s"], sums["trained_tokens"], sums["generated_tokens"]
    out = {"batches": f"{len(steps):,}", "seconds per batch": f"{seconds / len(steps):,.1f}"}
    if seconds:
        out["trained tokens per second"] = f"{trained / seconds:,.0f}"
        out["places busy"] = f"{sum(m['engines_busy'] * m['step_s'] for m in steps) / seconds:.0%}"
    if gain.sync:
        out["speed of synchronous steps"] = f"{gain.factor:.2f}x"
    if found is not None and not found.doubt:
        out["of the engines' limit"] = f"{found.distance.at_limit:.0%}"
    if trained:
        old = sum(m["off_policy_share"] * m["trained_tokens"] for m in steps)
        out["off-policy share"] = f"{old / trained:.0%}"
    oldest = max(m["staleness_max"] for m in steps)
    out["staleness, mean and oldest"] = f"{sums['staleness_mean'] / len(steps):.2f}, {oldest:.0f}"
    if generated:
        out["prefilled again per token"] = f"{sums['reprefill_tokens'] / generated:.2f}"
    if health is not None and health.rows[0].kl is not None:
        out["KL, nats per token"] = f"{health.rows[0].kl:.4f}"
    return out


def _facts(run: RunData, findings: ReportFigures) -> str:
    facts = _figures(run, findings).items()
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(text)}</dd></div>" for name, text in facts)
    return f'<dl class="facts">{cells}</dl>'


def _comparison(runs: Sequence[RunData], findings: Sequence[ReportFigures]) -> str:
    if len(runs) < 2:
        return ""
    tables = [_figures(run, found) for run, found in zip(runs, findings, strict=True)]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [[name, *(table.get(name, "\N{EN DASH}") for table in tables)] for name in names]
    return f"<h1>{len(runs)} runs</h1>{_table(rows, ['', *(_text(run.name) for run in runs)])}"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return an HTML table. ``rows`` are escaped; ``head`` must already be HTML."""
    cells = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    first = f"<tr>{''.join(f'<th>{words}</th>' for words in head)}</tr>" if head else ""
    return f'<div class="scroll"><table>{first}{cells}</table></div>'


def _limit(run: RunData, found: RunDistance | None) -> str:
    if found is None:
        return "<p>The engines' cost could not be fitted: too few requests, or too few batches.</p>"
    of = found.distance
    if found.doubt:
        return (
            f"<p>This record does not show how far the run was from the limit of its engines: {_text(found.doubt)}. An "
            f"estimate is that the limit takes {of.at_limit:.0%} of the time.</p>"
        )
    parts: list[tuple[str, float, str]] = [
        ("at the limit", of.at_limit, Colour.AGE0), ("prefilled again", of.reprefill, Colour.AGE2)
    ]  # fmt: skip
    parts += [
        (report_figures.cause_label(cause), share, report_figures.IDLE[cause][1])
        for cause in IdleCause if (share := of.causes.get(cause, 0.0)) >= 0.005
    ]  # fmt: skip
    if of.unexplained >= 0.005:
        parts.append(("unexplained", of.unexplained, Colour.FAINT))
    words = (
        "The limit is the speed for the same tokens on the same engines with all places busy all the time and nothing "
        "prefilled twice, by the cost that was fitted to their requests. The rest is divided by why places were empty:"
    )
    if found.halves is not None:
        first, second = sorted(found.halves)
        halves = f"{first:.0%} and {second:.0%} by halves of the requests"
        words = f"<b>{of.at_limit:.0%} of the limit</b> ({halves}). {words}"
    bar = "".join(f'<div style="flex:{share:.4f};background:{ink}"></div>' for _, share, ink in parts)
    key = "".join(
        f'<li><i style="background:{ink}"></i>{_text(name)} {share:.0%}</li>'
        for name, share, ink in parts
    )
    return f'<p>{words}</p><div class="bar">{bar}</div><ul class="key">{key}</ul>'


def _settings(run: RunData) -> str:
    """Return an HTML table of the settings over the run; empty if they did not change and none of them is auto."""
    rows: list[list[str]] = []
    last: tuple[Any, ...] = ()
    for batch in run.batches:
        settings, m = run.settings_at(batch), batch.metrics
        now = (WorkSettings.of(settings), settings.max_staleness, *run.engine_history.at(batch.time_s))
        if now == last:
            continue
        last = now
        in_work, bound, engines, places = now
        row = [f"{batch.id:,}", f"{in_work}", f"{bound:,}", f"{engines:,}", f"{places:,}"]
        if run.settings.auto:
            speed, share = (m.get(f"auto_expected_{what}") for what in ("tokens_per_s", "off_policy_share"))
            known = speed is not None and share is not None
            row.append(f"{speed:,.0f} tokens per second, {share:.0%} off-policy" if known else "")
        rows.append(row)
    if len(rows) < 2 and not run.settings.auto:
        return ""
    names = ["from batch", "in work", "max_staleness", "engines", "places"]
    names += ["expected of the best"] if run.settings.auto else []
    return f"<h2>Settings over the run</h2>{_table(rows, names)}"


def _lengths(run: RunData) -> str:
    metrics = run.batches[-1].metrics if run.batches else {}
    made, trained = metrics.get("length_mean_generated"), metrics.get("length_mean_trained")
    if not made or trained is None:
        return ""
    said = (
        f"Responses that were generated to the end have {made:,.0f} tokens on average, those in batches {trained:,.0f}"
    )
    unknown = metrics.get("length_unknown", 0.0)
    return f"<p>{said}{f'; {unknown:.1%} were given up before their end' if unknown else ''}.</p>"


def _dropped(run: RunData) -> str:
    sums = _sums(run)
    rows = [(words, f"{sums[name]:,.0f}") for name, words in DROPS.items() if sums.get(name)]
    rows += [(f"requests that failed: {kind.replace('_', ' ')}", f"{n:,}") for kind, n in run.failures.items()]
    return f"<h2>Dropped and failed</h2>{_table(rows) if rows else '<p>Nothing.</p>'}"


def _engines(run: RunData) -> str:
    rows = []
    order = {name: i for i, name in enumerate(run.engine_history.names)}  # engines that joined later come last
    for number, name in sorted(enumerate(run.engines), key=lambda engine: order.get(engine[1], len(order))):
        mine = run.engine == number
        cost = run.costs.get(name)
        costs = [""] * 5
        if cost is not None:
            c = cost.cost
            costs = [
                *map(short_time, (c.base_s, c.per_sequence_s, 1000 * c.per_kv_token_s, c.per_prefill_token_s)),
                f"{cost.error:.1%}",
            ]  # fmt: skip
        rows.append([name, f"{int(mine.sum()):,}", f"{run.generated[mine].sum():,.0f}", *costs])
    head = (
        "engine", "requests", "tokens", "step", "+ per sequence", "+ per 1,000 tokens in memory", "prefilled token",
        "error of the fit",
    )  # fmt: skip
    return f"<h2>Engines</h2>{_table(rows, head)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
