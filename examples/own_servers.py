"""GRPO on servers that you have started: april generates there, and hands your trainer's weights over.

Start the servers (docs/servers.md says how), then run this with the directory of the model that they serve:

    python examples/own_servers.py --kind vllm --urls http://127.0.0.1:8000 --model MODEL --shared-dir /shared/run

``--shared-dir`` must have the same name on every server's machine. With ``--weights collective`` the servers get their
weights from this process (docs/weights.md), and the directory is this machine's affair. What is yours is below "yours":
here it is a stand-in that leaves the weights as they are, so that everything else can be tried first. ``--resume`` goes
on after the last step of a run that has ended or died, whatever the servers hold by then. ``--continuous``: they
generate while you train (docs/staleness.md).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import april

STATE = "april_state.msgpack"
"""Everything unfinished, beside the weights of each step."""

# ---------------------------------------------------------------- yours


def prompts() -> Iterator[dict[str, Any]]:
    """Token ids of your questions; the rest is ``prompt.data`` in the reward. A list will do as well."""
    for number in itertools.count():
        yield {"token_ids": [3 + number % 97, 5, 7], "number": number}


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Your verifier. Here: the share of different tokens."""
    return len(set(response.tokens.tolist())) / len(response.tokens)


class Trainer:
    """Your model and optimizer. This one computes what a GRPO step needs, and takes none."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def update(self, batch: april.Batch) -> float:
        """One step on a batch; returns the mean size of its advantages."""
        advantages = batch.advantages("grpo")  # [B]; batch.padded(): input_ids, logprobs, loss_mask, rewards, ...
        # here: forward pass, ratio to "logprobs", loss over "loss_mask", optimizer.step()
        return float(abs(advantages).mean())

    def save(self, directory: Path) -> None:
        """Everything that a server needs to load the model: ``model.save_pretrained(directory)`` does it.

        Of a PEFT model it writes the adapter alone, which servers take that were started with --enable-lora.
        """
        shutil.copytree(self.model, directory)

    def weights(self) -> Any:
        """Only for ``--weights collective``: your model, or an iterable of (name in the checkpoint, tensor)."""
        # here, and not above: nothing else needs it
        from safetensors.torch import load_file

        return load_file(self.model / "model.safetensors")

    def load(self, directory: Path) -> None:
        """With ``--resume``: model and optimizer as they were when ``directory`` was saved."""

    def hand_over(self, directory: Path) -> None:
        """Only for ``--kind openai``: make every server load ``directory`` and empty its cache, in its own way."""


# ---------------------------------------------------------------- april


def publish(rollouts: april.RolloutScheduler, trainer: Trainer, directory: Path, route: str) -> None:
    """The servers get the trainer's weights; raises EngineError if they did not take them."""
    trainer.save(directory)
    if route == "disk":
        rollouts.weight_update(path=str(directory))
    elif route == "collective":
        rollouts.weight_update(weights=trainer.weights())
    else:
        rollouts.weight_update(transfer=lambda: trainer.hand_over(directory))


def go_on(rollouts: april.RolloutScheduler, trainer: Trainer, directory: Path, route: str) -> None:
    """The servers get the weights of ``directory``, and april goes on where it stood when they were new."""
    trainer.load(directory)
    state = msgspec.msgpack.decode((directory / STATE).read_bytes())
    if route == "disk":
        rollouts.load_state_dict(state, path=str(directory))
    elif route == "collective":
        rollouts.load_state_dict(state, weights=trainer.weights())
    else:
        rollouts.load_state_dict(state, transfer=lambda: trainer.hand_over(directory))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Written whole or not at all, and readable by its owner only: it holds prompts and responses."""
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(state))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def last_step(shared: Path) -> int:
    """The newest step whose weights and state are both there; 0: none."""
    return max((int(file.parent.name.removeprefix("step_")) for file in shared.glob(f"step_*/{STATE}")), default=0)


def train(config: april.Config, trainer: Trainer, shared: Path, steps: int, route: str, after: int = 0) -> None:
    """Batches up to step ``steps``, with a weight update after each; ``after`` the last one of an earlier run."""
    previous = shared / f"step_{after}" if after else None
    with april.RolloutScheduler(config, prompts=prompts(), reward=reward) as rollouts:
        if previous is not None:
            go_on(rollouts, trainer, previous, route)
        for step in range(after + 1, steps + 1):
            batch = rollouts.next_batch()
            size = trainer.update(batch)
            directory = shared / f"step_{step}"
            shutil.rmtree(directory, ignore_errors=True)  # of a run that died before the step was complete
            publish(rollouts, trainer, directory, route)
            save_state(directory / STATE, rollouts.state_dict())
            # a server that is started anew may get its weights from the directory of the last update, so that one stays
            if previous is not None:
                shutil.rmtree(previous)
            previous = directory
            print(
                f"step {step}: reward {batch.rewards.mean():.3f}, advantages {size:.3f}, {int(batch.lengths.sum())} "
                f"tokens, {batch.off_policy_share:.0%} from older weights, now version {rollouts.version}"
            )
        tokens = rollouts.ledger()["tokens"]
        print(f"tokens: {tokens}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["vllm", "sglang", "openai"], required=True)
    parser.add_argument("--urls", nargs="+", required=True, help="one per server")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model that the servers serve")
    parser.add_argument("--shared-dir", type=Path, required=True, help="for weights, seen by every server as here")
    parser.add_argument("--weights", choices=["disk", "collective"], default="disk", help="their way to the servers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--continuous", action="store_true", help="the servers go on while the trainer trains")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --shared-dir")
    parser.add_argument("--max-response-len", type=int, default=64)
    # what a server may not tell; `april doctor` says whether it does
    parser.add_argument("--eos-token-ids", type=int, nargs="+")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--max-len", type=int)
    options = parser.parse_args(arguments)
    shared = options.shared_dir.resolve()
    after = last_step(shared) if options.resume else 0
    if options.resume and not after:
        parser.error(f"--resume: --shared-dir {shared} has no complete step")
    if not options.resume and any(shared.glob("step_*")):
        parser.error(f"--shared-dir {shared} has weights of an earlier run; remove them, choose another, or --resume")
    engine: dict[str, Any] = {"kind": options.kind, "urls": options.urls}
    for name in ("eos_token_ids", "vocab_size", "max_len"):
        if getattr(options, name) is not None:
            engine[name] = getattr(options, name)
    config = april.Config(
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        over_sampling_batch_size=8,
        max_response_len=options.max_response_len,
        max_staleness=2,
        generation="continuous" if options.continuous else "stepwise",
        engine=engine,
    )
    route = "yours" if options.kind == "openai" else options.weights
    train(config, Trainer(options.model), shared, options.steps, route, after)


if __name__ == "__main__":
    main()
