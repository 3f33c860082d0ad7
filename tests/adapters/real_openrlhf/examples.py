"""OpenRLHF's own command line takes the flags of the examples."""

from __future__ import annotations

import contextlib
import itertools
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import short_runs

sys.path.insert(0, str(short_runs.HERE / "on_cpu"))  # stands in for flash-attn

from april.adapters import openrlhf as launcher
from april.adapters.openrlhf.arguments import config_of

EXAMPLES = short_runs.ROOT / "examples" / "openrlhf"


PLACES = (
    "openrlhf.trainer.ppo_trainer.PPOTrainer", "openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync",
    "openrlhf.trainer.ray.vllm_engine.RolloutRayActor", "openrlhf.utils.get_strategy",
)  # fmt: skip
"""Where april puts something else; put back for the next command line in this process."""


class Parsed(Exception):
    """OpenRLHF has parsed and checked its flags, april has agreed, and nothing has started."""


def parse(words: list[str]) -> Any:
    """The namespace with which OpenRLHF would train; raises SystemExit where somebody refuses."""
    import openrlhf.utils
    import ray

    kept: list[Any] = []

    def strategy(args: Any) -> Any:
        kept.append(args)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        for path in PLACES:
            patch.setattr(path, pkgutil.resolve_name(path))
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(openrlhf.utils, "get_strategy", strategy)
        patch.setattr(sys, "argv", ["x"])
        with contextlib.suppress(Parsed):
            launcher.main(words)
    return kept[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_the_workloads_of_the_paper(model: str, algorithm: str, mode: str) -> None:
    """Parsed by OpenRLHF itself, and april's settings fit them."""
    for data, platform in itertools.product(("dapo-math-17k", "deepscaler", "deepmath-103k"), ("nvidia", "amd")):
        choices = {"MODEL": model, "ALGORITHM": algorithm, "MODE": mode, "DATA": data, "PLATFORM": platform}
        done = subprocess.run(
            [str(EXAMPLES / "train.sh")], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, text=True,
            check=True, capture_output=True,
        )  # fmt: skip
        args = parse(done.stdout.split()[3:])
        config = config_of(args, args.april)
        assert (config.rollout_batch_size, config.over_sampling_batch_size, config.n_samples_per_prompt) == (32, 64, 8)
        assert (config.max_response_len, config.sampling.temperature) == (16_384, 0.8)
        assert args.actor.policy_loss_type == ("gspo" if algorithm == "gspo" else "ppo")
        assert args.vllm.enable_sleep == args.train.colocate_all == (mode == "sync")
