"""The trainer of :mod:`tests.real_engines.images`: a process that may be killed, and goes on from its last checkpoint.

It writes every batch that it gets, and how often it has sent each image to each server.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import april
from april.core.attachments import Attachment
from april.core.batch import Batch
from tests.real_engines.servers import NotKept
from tests.tiny_vision import tiny_processor

BATCHES, GROUPS, SAMPLES = 6, 6, 6
RESPONSE_LEN = 160
STOPS = (2, *range(300, 308))
"""Ids that end responses, so that some of a batch are long."""
PROBES = 6
BACK_S = 240.0
"""Longest wait for a server that was started anew, before the last batch."""


def main(where: Path, kind: str, urls: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO)
    prompts = json.loads((where / "prompts.json").read_text("utf-8"))
    for i, prompt in enumerate(prompts):  # every other image by its bytes
        files = [where / name for name in prompt["images"]]
        prompt["images"] = [file.read_bytes() if i % 2 else str(file) for file in files]
    config = april.Config(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=2 * GROUPS,
        max_response_len=RESPONSE_LEN, sampling={"stop_token_ids": STOPS}, max_staleness=BATCHES, on_data_end="wrap",
        engine={"kind": kind, "urls": list(urls), "max_in_flight": 16, "max_token_loss": 8},
    )  # fmt: skip
    with connected(config, prompts) as rollouts:
        done, versions, lives = 0, {str(list(rollouts.version)): 0}, 1
        if state := newest(where):
            done, versions, lives = state["done"], state["versions"], state["lives"] + 1
            version = rollouts.load_state_dict(state["april"], path=str(where / f"v{done}"))
            versions[str(list(version))] = done
        for n in range(done + 1, BATCHES + 1):
            if n == BATCHES:
                until_both(where)
            batch = rollouts.next_batch()
            whole(where / f"batch-{n}.json", json.dumps(rows(where, batch, versions, lives)).encode())
            if n < BATCHES:
                versions[str(list(rollouts.weight_update(path=str(where / f"v{n}"))))] = n
            rollouts.validate()
            whole(where / f"sent-{lives}.json", json.dumps(sent(rollouts)).encode())
            state = {"done": n, "versions": versions, "lives": lives, "april": rollouts.state_dict()}
            whole(where / f"state-{n}", msgspec.msgpack.encode(state))
            print(f"batch {n}", flush=True)


def connected(config: april.Config, prompts: Sequence[Any]) -> april.RolloutScheduler:
    """Servers on a machine that others use may not have answered a probe in time: they are asked again."""
    for _ in range(PROBES):
        with suppress(april.EngineError):
            return april.RolloutScheduler(
                config, prompts=prompts, reward=None, processor=tiny_processor(), progress=False
            )
    raise NotKept(f"the servers could not be asked, {PROBES} times")


def newest(where: Path) -> dict[str, Any] | None:
    """The last checkpoint."""
    numbers = [int(file.name.removeprefix("state-")) for file in where.glob("state-*") if file.suffix != ".part"]
    if not numbers:
        return None
    state: dict[str, Any] = msgspec.msgpack.decode((where / f"state-{max(numbers)}").read_bytes())
    return state


def until_both(where: Path) -> None:
    """Wait for the server that was started anew; the last update was with it, or gives it the weights again."""
    began = time.monotonic()
    while not (where / "both").exists():
        if time.monotonic() - began > BACK_S:
            raise NotKept(f"the server was not back in {BACK_S:g} s")
        time.sleep(0.1)


def rows(where: Path, batch: Batch, versions: dict[str, int], lives: int) -> list[dict[str, Any]]:
    """What is compared of each response; its segments name the weights."""
    files = (where / "images").iterdir()
    names = {Attachment.of("image", file.read_bytes()).digest: f"images/{file.name}" for file in files}
    return [
        {
            "prompt": sample.prompt.token_ids.tolist(), "tokens": sample.tokens.tolist(),
            "logprobs": sample.logprobs.tolist(), "resumes": sample.resumes,
            "segments": [
                {"start": s.start, "count": s.count, "engine": s.engine, "weights": versions[str(list(s.version))]}
                for s in sample.segments
            ],
            "images": [names[placed.attachment.digest] for placed in sample.attached],
            # it was begun before the trainer was killed
            "restarted": lives > 1 and sample.segments[0].version.incarnation == 0,
        }
        for sample in batch.samples
    ]  # fmt: skip


def sent(rollouts: april.RolloutScheduler) -> dict[str, dict[str, int]]:
    """By server: how often each image's bytes went there."""
    return {engine.name: dict(engine.attachments.sendings) for engine in rollouts.engines}  # type: ignore[attr-defined]


def whole(path: Path, data: bytes) -> None:
    """Written whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
