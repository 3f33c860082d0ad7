"""A rollout with a tool over several turns, cut and continued across six weight updates. Seconds on a CPU.

A tiny untrained language model operates a calculator. The prompt names a target; each turn the model writes a
message, and the operator that ends it (+, - or *) is a tool call: the calculator applies it to its display with the
last two digits of the message, modulo 100, and its answer joins the conversation::

    turn 1: w31 7 w90 3 w12 +     calculator: = 7 3
    turn 2: w54 w61 2 w11 *       calculator: = 4 6      ... until the target, EOS, or the fourth turn

Nothing in ``rollout`` knows of steps, cuts or weight updates: where a step ends in the middle of a message, april
keeps what was written and lets the new weights finish it. Run: ``python examples/multi_turn_tool.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import april
from april import LLM, DeliveredSample, Response, Segment, SegmentKind

BOS, EOS, PAD, PLUS, MINUS, TIMES, RESULT, ERROR = range(8)
OPERATORS = (PLUS, MINUS, TIMES)
DIGIT = 8
"""First of the ten ids of digits; all ids after them are words without a meaning."""
VOCAB_SIZE = 64
NAMES = ("BOS", "EOS", "PAD", "+", "-", "*", "=", "ERROR", *"0123456789")

TURNS = 4
TURN_CAP = 64
"""Most tokens of one message; one that has no operator by then is a call that failed."""
RESPONSE_CAP = TURNS * (TURN_CAP + 3)
UPDATES = 6


# ---------------------------------------------------------------- the task and its tool


@dataclass(frozen=True, slots=True)
class Episode:
    """How a rollout went: the calculator's display at the end, and tool calls made."""

    display: int
    calls: int


def digits(number: int) -> list[int]:
    """Two digit tokens for 0..99."""
    return [DIGIT + number // 10, DIGIT + number % 10]


async def calculator(display: int, message: Sequence[int]) -> int | None:
    """The new display, in 0..99, or None for a message that is no call. A real tool may take as long as it likes."""
    operator = message[-1]
    written = [token - DIGIT for token in message if DIGIT <= token < DIGIT + 10]
    if operator not in OPERATORS or not written:
        return None
    number = 10 * written[-2] + written[-1] if len(written) > 1 else written[-1]
    results = {PLUS: display + number, MINUS: display - number, TIMES: display * number}
    return results[operator] % 100


Tool = Callable[[int, Sequence[int]], Awaitable[int | None]]


async def rollout(prompt: april.Prompt, llm: LLM, tool: Tool = calculator) -> Episode:
    """One sample: up to TURNS messages with a tool call after each."""
    display, calls = 0, 0
    conversation: list[int] | None = None
    for _ in range(TURNS):
        message = await llm.generate(conversation, max_tokens=TURN_CAP, stop_token_ids=OPERATORS)
        if len(message.tokens) == 0 or message.tokens[-1] == EOS:
            break  # max_response_len is used up, or the model is done
        calls += 1
        result = await tool(display, message.tokens.tolist())
        answer = [ERROR] if result is None else [RESULT, *digits(result)]
        display = display if result is None else result
        if display == prompt.data["target"]:
            break
        conversation = [*message.conversation.tolist(), *answer]
    return Episode(display, calls)


async def reward(prompt: april.Prompt, response: Response) -> float:
    """1 at the target, less the farther away; ``response.output`` is what the rollout returned."""
    episode: Episode = response.output
    return 1.0 - abs(episode.display - int(prompt.data["target"])) / 99


def prompts(seed: int = 0) -> Iterator[april.Prompt]:
    """An endless stream of targets; all prompts have the same length."""
    rng = np.random.default_rng(seed)
    while True:
        target = int(rng.integers(1, 100))
        yield april.Prompt(np.array([BOS, *digits(target)], np.int32), {"target": target})


# ---------------------------------------------------------------- the model and its update


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 30,000 parameters in float32; replace it by your own model."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: april.Batch) -> None:
    """One step of the recommended loss, with the mean of the group as baseline.

    ``loss_mask`` leaves the calculator's tokens out; ``logprobs`` are those of the weights that wrote each token, so
    that responses from before a weight update are corrected. All prompts here have the same length; pad others on the
    left.
    """
    arrays = {name: torch.from_numpy(array) for name, array in batch.padded(pad_id=PAD).items()}
    ids = torch.cat([arrays["prompt_ids"], arrays["response_ids"]], 1).long()
    width = arrays["response_ids"].shape[1]
    # Padding is on the right, where causal attention never looks from a real token: no attention mask is needed.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -width:].float()
    now = logits.log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]
    loss = april.policy_loss(now, arrays["logprobs"], arrays["loss_mask"], batch.advantages("dr_grpo"))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------- what happened


def text(tokens: NDArray[np.int32]) -> str:
    """Tokens for people."""
    return " ".join(NAMES[token] if token < len(NAMES) else f"w{token}" for token in tokens)


def cuts(sample: DeliveredSample) -> list[int]:
    """The turn of every cut: where a message goes on in another attempt, nothing of the calculator in between."""
    found, turn = [], 1
    before: Segment | None = None
    for segment in sample.segments:
        if segment.kind is SegmentKind.ENVIRONMENT:
            turn += 1
        elif before is not None and before.kind is SegmentKind.GENERATED and before.attempt_id != segment.attempt_id:
            found.append(turn)
        before = segment
    return found


def report(batch: april.Batch, tool_calls: int) -> None:
    """One line per step."""
    turns = [1 + sum(s.kind is SegmentKind.ENVIRONMENT for s in sample.segments) for sample in batch.samples]
    resumed = sum(bool(cuts(sample)) for sample in batch.samples)
    age, oldest = batch.metrics["staleness_mean"], batch.metrics["staleness_max"]
    print(
        f"{batch.version.n:>7} {len(batch):>8} {resumed:>8} {np.mean(turns):>6.2f} {tool_calls:>11} "
        f"{batch.off_policy_share:>11.0%} {age:>6.2f} (max {oldest:.0f}) {batch.rewards.mean():>7.2f}"
    )


def tell(sample: DeliveredSample) -> None:
    """Who wrote what of one sample, under which version."""
    print(f"\n{sample.id}: {text(sample.prompt.token_ids)}, reward {sample.reward:.2f}, cut in turns {cuts(sample)}")
    for s in sample.segments:
        policy = s.kind is SegmentKind.GENERATED
        who = f"policy, version {s.version.n}" if policy else "calculator"
        print(f"  {s.start:>3} {who:<18} {text(sample.tokens[s.start : s.start + s.count])}")


def main() -> None:
    """Train for six updates; print one line per batch and the story of the sample with the most versions."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    config = april.Config(
        rollout_batch_size=6,
        n_samples_per_prompt=4,
        over_sampling_batch_size=24,
        max_response_len=RESPONSE_CAP,
        max_in_flight=48,
    )
    tool_calls = 0

    async def counted(display: int, message: Sequence[int]) -> int | None:
        nonlocal tool_calls
        tool_calls += 1
        return await calculator(display, message)

    async def run(prompt: april.Prompt, llm: LLM) -> Episode:
        return await rollout(prompt, llm, counted)

    delivered: list[DeliveredSample] = []
    print("version  samples  resumed  turns  tool calls  off-policy  staleness     reward")
    with april.RolloutScheduler(config, prompts=prompts(), reward=reward, rollout=run, model=model) as rollouts:
        for step in range(UPDATES + 1):
            before = tool_calls
            batch = rollouts.next_batch()
            report(batch, tool_calls - before)
            delivered += batch.samples
            if step < UPDATES:
                train(model, optimizer, batch)
                rollouts.weight_update()
    tell(max(delivered, key=lambda sample: (len(set(cuts(sample))), len({s.version for s in sample.segments}))))


if __name__ == "__main__":
    main()
