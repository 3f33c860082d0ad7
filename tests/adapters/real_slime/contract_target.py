"""For slime's contract test of rollout functions, which gives no arguments and no servers: those are given here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from april.adapters.slime import make_generate_rollout
from april.testing import FakeEngine
from benchmarks.slime_surroundings import Trainer


class Tokenizer:
    """Letters are tokens."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1 + ord(c) % 200 for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    """slime's own evaluation would need its servers."""
    (group,) = data_source.get_samples(1)
    rewards = [s.reward for s in group]
    toy = {"rewards": rewards, "truncated": [False] * len(group), "samples": group}
    return SLIME.get("rollout.base_types.RolloutFnEvalOutput")(data={"toy": toy})


SLIME = Trainer("slime")
ARGS = SLIME.arguments(
    "http://127.0.0.1:9", Path(tempfile.gettempdir()),
    ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "50"],
)  # fmt: skip
generate_rollout = make_generate_rollout(
    [FakeEngine(seconds_per_token=1e-4)], args=ARGS, tokenizer=Tokenizer(), evaluate=evaluate, check=True
)
__all__ = ["ARGS", "generate_rollout"]
