"""The whole of ``april profile``: open the server, measure, show, write."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from april.config.settings import Config
from april.engines.kinds.factory import open_servers
from april.errors import ConfigError
from april.simulate.profile import Profile, profile


def profile_server(
    url: str, kind: str, api_key_env: str | None, model: str | None, most: int, tokens: int, out: Path, console: Console
) -> Profile:
    """See ``april profile``.

    Raises:
        ConfigError: an argument is wrong, or the server cannot do what april needs.
        EngineError: the server could not be asked, or failed.
        OSError: nothing can be written there.
    """
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError(f"--api-key-env: the environment variable {api_key_env} is not set")
    engine = {"kind": kind, "urls": [url], "api_key_env": api_key_env, "model": model}
    engine = {name: value for name, value in engine.items() if value is not None}
    config = Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=tokens, engine=engine)
    _require_writable(out)
    columns = (TextColumn("measuring"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn())

    async def measured() -> Profile:
        (opened,) = await open_servers(config.engine)  # type: ignore[arg-type]  # a kind of server, by then
        try:
            with Progress(*columns, console=console, transient=True) as shown:
                bar = shown.add_task("")
                return await profile(
                    opened, min(most, opened.capabilities.max_in_flight or most), tokens,
                    asyncio.get_running_loop().time,
                    lambda done, total: shown.update(bar, completed=done, total=total),
                )  # fmt: skip
        finally:
            await opened.close()

    found = asyncio.run(measured())
    table = Table("in flight", "tokens per second")
    for number, speed in found.speeds.items():
        table.add_row(f"{number:,}", f"{speed:,.0f}")
    console.print(table)
    cost = found.cost
    console.print(
        f"a step takes {cost.base_s * 1e3:.2f} ms, + {cost.per_sequence_s * 1e6:.1f} \N{MICRO SIGN}s per sequence, "
        f"+ {cost.per_kv_token_s * 1e9:.1f} ns per token in memory; a prefilled token "
        f"{cost.per_prefill_token_s * 1e6:.1f} \N{MICRO SIGN}s. Fitted to {found.requests:,} requests, off by "
        f"{found.held_out:.0%} in the last round, which was left out of that", soft_wrap=True,
    )  # fmt: skip
    found.write(out)
    console.print(f"wrote {out}: april plan LENGTHS --cost {out}", soft_wrap=True)
    return found


def _require_writable(out: Path) -> None:
    """What takes minutes to measure must not be lost in the end."""
    there = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.open("a").close()
    if not there:
        out.unlink()
