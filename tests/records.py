"""Records for tests: of simulated runs, and with lines that were changed and checks that fit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from april.cli import app
from april.record.file import RunRecord
from april.simulate.simulation import Simulation
from april.simulate.workload import Schedule, Workload

SMALL = Workload(groups=8, samples=4, engines=2, max_response_len=4000)


def recorded(
    path: Path, schedule: str | Schedule = "april", steps: int = 12, *, workload: Workload = SMALL,
    train_s: float = 20.0, fetch_ahead: int = 0,
) -> Simulation:  # fmt: skip
    """A simulation with the record that a real run has; the schedule may be the name of a mode."""
    wanted = workload.modes[schedule] if isinstance(schedule, str) else schedule
    simulation = Simulation(
        workload.core_settings(wanted), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len, train_s=train_s, fetch_ahead=fetch_ahead, most_in_flight=4 * wanted.in_flight,
        record=RunRecord(path), config=workload.config(wanted).to_mapping(),
    )  # fmt: skip
    simulation.run(steps)
    simulation.close()
    return simulation


def raw_lines(path: Path) -> list[list[Any]]:
    """The lines of a record without their checks, each [time in s, what, its parts, digest]."""
    return [json.loads(line)[:-1] for line in path.read_bytes().splitlines()]


def written(path: Path, lines: Iterable[Any]) -> Path:
    """A record with these lines, and checks that fit."""
    check, out = 0, []
    for line in lines:
        body = json.dumps(line, separators=(",", ":"))[:-1].encode()
        check = zlib.crc32(body, check)
        out.append(b'%b,"%08x"]\n' % (body, check))
    path.write_bytes(b"".join(out))
    return path


def rewritten(path: Path, target: Path, change: Callable[[list[Any]], list[Any]]) -> Path:
    """A record whose lines were changed."""
    return written(target, map(change, raw_lines(path)))


def command(*arguments: object) -> tuple[int, str]:
    """The exit code of a command of april's, and what it says, without line ends and frames."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())
