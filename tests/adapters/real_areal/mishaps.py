"""AReaL's engine and workflow before a server that answers late, and with episodes that raise: stock beside april."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def results(*words: str) -> dict[str, dict[str, Any]]:
    """Of ``benchmarks.areal_rollouts`` with these words, by arm."""
    command = [sys.executable, "-m", "benchmarks.areal_rollouts", "--json", "--turns", "1", "--bounds", "1", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):  # unless a server or a pool of AReaL's outlived it
                os.killpg(process.pid, signal.SIGKILL)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    print("\n" + "\n".join(map(str, found)))
    return {line["arm"]: line for line in found}


def test_late_answers_are_labelled_with_their_own_weights() -> None:
    """Answers leave 0.15 s late, behind the update: stock takes the version that is there then."""
    found = results("--late-s", "0.15", "--train-s", "0.02", "--warm", "1", "--steps", "6")

    assert found["stock 1"]["mislabelled"] > 0.2
    assert found["april 1"]["mislabelled"] == 0
    assert found["april 1"]["off_policy_share"] > 0
    assert found["april 1"]["staleness_max"] <= 1


def test_failed_episodes_are_tried_again() -> None:
    """Every 9th episode raises: stock drops its group and its prompt, april asks again."""
    found = results("--fail-every", "9", "--train-s", "0.1", "--warm", "1", "--steps", "8")

    assert found["stock 1"]["skipped"] > 0
    assert found["april 1"]["skipped"] == found["april 1"]["twice"] == 0
