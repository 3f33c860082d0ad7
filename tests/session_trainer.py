"""A trainer whose samples an orchestrator outside works on: ``python tests/session_trainer.py FOLDER PORT``.

It goes on from FOLDER/state if that is there, writes FOLDER/batch when it has one, and takes orders by lines:
``standing`` says how many requests stand still in the engine, ``save`` writes the state.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from renderers import Qwen3RendererConfig

from april.agents import Sessions
from april.config.settings import Config
from april.core.types import Prompt
from april.scheduler import RolloutScheduler
from tests.gateway_suite.script import TOKENIZER
from tests.gateway_suite.subject import HeldEngine

SESSIONS = 64


def prompts() -> Iterator[Prompt]:
    """Questions that differ."""
    for number in range(10 * SESSIONS):
        yield Prompt(np.array(TOKENIZER.encode(f"{number}?"), np.int32), {"question": f"{number} #hello"})


def main(folder: Path, port: int) -> None:
    """Train on one batch, slowly."""
    state = folder / "state"
    sessions = Sessions(key_file=folder / "key", port=port)
    sessions.start()
    engine = HeldEngine("e0")
    engine.holds = not state.exists()
    rollouts = RolloutScheduler(
        Config(rollout_batch_size=SESSIONS, n_samples_per_prompt=1, max_response_len=4000),
        prompts=prompts(), reward=sessions.reward, rollout=sessions.rollout, engines=[engine], check=True,
        tokenizer=TOKENIZER, renderer=Qwen3RendererConfig(enable_thinking=False), progress=False,
    )  # fmt: skip
    if state.exists():
        rollouts.load_state_dict(msgspec.msgpack.decode(state.read_bytes()), path="/restarted")

    def train() -> None:
        rows = [
            {
                "id": list(s.id), "reward": s.reward, "prompt": list(map(int, s.prompt.token_ids)),
                "tokens": s.tokens.tolist(), "mask": s.loss_mask.tolist(), "versions": s.versions.tolist(),
            }
            for s in rollouts.next_batch().samples
        ]  # fmt: skip
        dropped = {str(why): n for why, n in rollouts.ledger()["tokens"].dropped.items() if n}
        (folder / "batch.part").write_text(json.dumps({"rows": rows, "dropped": dropped}))
        (folder / "batch.part").rename(folder / "batch")

    threading.Thread(target=train, daemon=True).start()
    print(sessions.url, flush=True)
    for line in sys.stdin:
        if line == "standing\n":
            print(rollouts._thread.call(lambda: sum(not w.done() for w in engine.standing.values())), flush=True)
        elif line == "save\n":
            print(state.write_bytes(msgspec.msgpack.encode(rollouts.state_dict())), flush=True)
    rollouts.close()
    sessions.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
