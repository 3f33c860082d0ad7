"""Run by CI in an environment with the base install only: april works there, and says what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import april
from april.text.install_command import install

for package in ("torch", "transformers", "typer", "rich", "matplotlib", "yaml"):
    assert importlib.util.find_spec(package) is None, f"{package} is in the base install"

config = april.Config(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    over_sampling_batch_size=4,
    max_response_len=40,
    engine={"kind": "simulated", "median_len": 10},
)
with april.RolloutScheduler(config, prompts=([1, 2, 3] for _ in range(100)), reward=lambda p, r: 1.0) as rollouts:
    batch = rollouts.next_batch()
    rollouts.weight_update()
assert len(batch) == 4

refusal = ""
try:
    april.RolloutScheduler(april.Config(rollout_batch_size=1, max_response_len=4), prompts=[], model=object())
except april.ConfigError as error:
    refusal = str(error)
assert f"needs torch: {install('transformers')}" in refusal, refusal
assert install("transformers").endswith("[transformers]'"), refusal

run = subprocess.run([sys.executable, "-m", "april", "simulate"], capture_output=True, text=True, check=False)
assert run.returncode == 1, run
assert install("cli") in run.stderr, run.stderr
print("base install: ok")
