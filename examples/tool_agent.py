"""A tool-using agent with OpenAI's client, trained by GRPO: SmolLM2-135M-Instruct learns to use a calculator.

The agent knows of no steps, cuts or weight updates: it asks at ``llm.base_url``, as it would ask any server. SmolLM2's
chat template writes no tools, so the calculator is described in the messages and a call is a line of text,
``CALC(12 + 5)``. The reward is verifiable: half for a call that asks what was asked, half for the right number at the
end. The trainer is that of real_model.py; its loss leaves out what the calculator and the user have said. Some minutes
on two cores. Run: ``python examples/tool_agent.py --model DIRECTORY_OR_HUB_NAME``.
"""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from real_model import Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

import april

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"\s*CALC\((\d+) ?([-+*]) ?(\d+)\)\s*")
BEGINNING = [
    {"role": "system", "content": "You have a calculator. Write CALC(expression) and you get its result."},
    {"role": "user", "content": "What is 12 + 5?"},
    {"role": "assistant", "content": "CALC(12 + 5)"},
    {"role": "user", "content": "= 17"},
    {"role": "assistant", "content": "17"},
]
TURNS, TURN_TOKENS = 2, 24
HTTP = DefaultAsyncHttpxClient()
"""Shared by all samples: making one takes 40 ms, in which april's event loop does nothing else."""


@dataclass(frozen=True, slots=True)
class Episode:
    """How a rollout went: the expression of its call, and the last thing that was said."""

    called: str
    said: str


async def rollout(prompt: april.Prompt, llm: april.LLM) -> Episode:
    """One sample: the model's call, the calculator's answer, the model's answer."""
    messages: list[Any] = [*BEGINNING, {"role": "user", "content": f"What is {prompt.data['expression']}?"}]
    called = ""
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=HTTP)
    for turn in range(1, TURNS + 1):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=TURN_TOKENS)
        said = reply.choices[0].message.content or ""
        call = CALL.fullmatch(said) if reply.choices[0].finish_reason == "stop" else None
        if call is None or turn == TURNS:
            break
        called = " ".join(call.groups())
        result = {"role": "user", "content": f"= {calculated(called)}"}
        messages += [{"role": "assistant", "content": said}, result]
    return Episode(called, said)


def calculated(expression: str) -> int:
    """The calculator."""
    left, sign, right = expression.split()
    return int(OPERATORS[sign](int(left), int(right)))


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Half for the call, half for the number at the end, which only a call or a good head brings."""
    episode: Episode = response.output
    expression = prompt.data["expression"]
    numbers = re.findall(r"-?\d+", episode.said)
    right = bool(numbers) and int(numbers[-1]) == calculated(expression) and not CALL.fullmatch(episode.said)
    return 0.5 * bool(episode.called == expression) + 0.5 * right


def prompts(tokenizer: Any, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Questions without an end; ``token_ids`` are there for april's books, the agent writes its own messages."""
    rng = np.random.default_rng(seed)
    while True:
        left, right = rng.integers(11, 100, 2)
        expression = f"{left} {rng.choice(list(OPERATORS))} {right}"
        yield {"token_ids": tokenizer.encode(expression), "expression": expression}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and print one line per step; returns the mean rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    trainer = Trainer(model, learning_rate=2e-5, rows=6)
    config = april.Config(
        rollout_batch_size=4,
        n_samples_per_prompt=6,
        over_sampling_batch_size=6,
        max_response_len=160,
        max_in_flight=24,
    )
    rewards = []
    print("step  reward  called  right  tokens  from older weights")
    with april.RolloutScheduler(
        config, prompts=prompts(tokenizer), rollout=rollout, reward=reward, model=model, tokenizer=tokenizer
    ) as rollouts:
        for step in range(options.steps):
            batch = rollouts.next_batch()
            trainer.update(batch)
            rollouts.weight_update()
            called = [any(s.kind is april.SegmentKind.ENVIRONMENT for s in sample.segments) for sample in batch.samples]
            rewards.append(float(batch.rewards.mean()))
            print(
                f"{step:>4} {rewards[-1]:>7.2f} {np.mean(called):>7.0%} {np.mean(batch.rewards == 1.0):>6.0%} "
                f"{batch.lengths.sum():>7} {batch.off_policy_share:>19.0%}",
                flush=True,
            )
    return rewards


if __name__ == "__main__":
    main()
