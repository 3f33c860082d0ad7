"""OpenRLHF's own tests pass with april's subclasses in the places of its classes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import openrlhf
import short_runs

FILES = (
    "test_samples_generator.py", "test_ppo_trainer.py", "test_agent.py", "test_experience.py", "test_reward_shaping.py",
    "test_loss_aggregation.py",
)  # fmt: skip


def test_openrlhfs_own_tests() -> None:
    """Those of the generator and of the trainer with april's subclasses, the others as they are."""
    tests = Path(str(openrlhf.__file__)).parents[1] / "tests"
    path = os.pathsep.join([str(short_runs.HERE), str(short_runs.HERE / "on_cpu"), str(short_runs.ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "substituted", "-p", "no:cacheprovider", "--import-mode=importlib",
         "-c", os.devnull, "--rootdir", str(tests), *(str(tests / name) for name in FILES)],
        cwd=tests, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.search(r"substituted SamplesGenerator (\d+) times", done.stdout)[1]) >= 2  # type: ignore[index]
    assert int(re.search(r"substituted PPOTrainer (\d+) times", done.stdout)[1]) >= 2  # type: ignore[index]
