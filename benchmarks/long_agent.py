"""What does a turn of a long conversation at ``llm.base_url`` cost april, early and late in the conversation?

One agent asks turn after turn and sends its whole history each time, before an engine that costs nothing. The benchmark
prints the CPU time that april spends on a turn (endpoint, driver, core; the client's thread is left out) and the number
of Python calls, as means over the turns of each tenth of the conversation: once with a renderer of the package
``renderers``, and once with the chat template alone. Run: ``python -m benchmarks.long_agent --turns 200``.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from renderers import DefaultRendererConfig, Qwen3RendererConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import april
from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health

MARKS = [
    "<pad>", "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
]  # fmt: skip
EOS = MARKS.index("<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERERS = {"renderer": Qwen3RendererConfig(enable_thinking=False), "template": DefaultRendererConfig()}
ANSWER = "the answer is 56, a tiny model counts to 7 and then to 49, then " * 4
QUESTION = "question {}: a tiny model counts to {}, and the answer is what? " * 6


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with Qwen's marks, trained on sentences like those of the conversation."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator((QUESTION.format(n, n, *range(10)) + ANSWER for n in range(200)), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, eos_token=MARKS[EOS], pad_token=MARKS[0], chat_template=TEMPLATE
    )


class FreeEngine:
    """Gives each request the same answer, at next to no cost."""

    name = "free"
    version: PolicyVersion = FIRST_VERSION

    def __init__(self, answer: Iterable[int], vocab_size: int) -> None:
        self._tokens = np.array([*answer, EOS], np.int32)
        self._logprobs = np.full(len(self._tokens), -0.5, np.float32)
        self.capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=vocab_size, max_context=1 << 20, eos_token_ids=(EOS,),
            max_in_flight=16,
        )  # fmt: skip

    async def generate(self, request: Any) -> AsyncIterator[Chunk]:
        yield Chunk(self._tokens, self._logprobs, self.version, EngineFinish.STOP)

    async def abort(self, ids: Any = None) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, version: PolicyVersion, path: Any = None) -> None:
        self.version = version

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None: ...


class CallCounter:
    """Counts the calls of Python functions in the threads in which :meth:`begin` was called."""

    def __init__(self) -> None:
        self.count = 0

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"

    def begin(self) -> None:
        sys.setprofile(self._called)

    @staticmethod
    def end() -> None:
        sys.setprofile(None)


def ask(url: str, key: str, turns: int, counted: range, counter: CallCounter, loops: list[Any]) -> list[dict[str, Any]]:
    """Make the requests of one conversation; returns for each turn april's CPU seconds and, if counted, its calls."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    messages: list[dict[str, str]] = []
    costs = []
    with closing(http.client.HTTPConnection(parts.hostname, parts.port or 80)) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": QUESTION.format(turn, *range(11)).strip()})
            body = json.dumps({"model": "m", "messages": messages, "max_tokens": 400})
            for loop in loops if turn in counted else ():
                loop.call_soon_threadsafe(counter.begin)
            calls = counter.count
            cpu, own = time.process_time(), time.thread_time()
            client.request("POST", f"{parts.path}/chat/completions", body, headers)
            answer = json.load(client.getresponse())
            spent = time.process_time() - cpu - (time.thread_time() - own)
            for loop in loops if turn in counted else ():
                loop.call_soon_threadsafe(counter.end)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            costs.append({"calls": counter.count - calls} if turn in counted else {"cpu_s": spent})
    return costs


def measure(renderer: str, turns: int) -> tuple[list[dict[str, Any]], int]:
    """Return the costs of each turn of one conversation, and the number of rows that it became."""
    tokenizer = make_tokenizer()
    engine = FreeEngine(tokenizer.encode(ANSWER.strip()), len(tokenizer))
    costs: list[dict[str, Any]] = []
    counter = CallCounter()

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        door: Any = llm.endpoint()
        counted = range(turns // 20, turns, turns // 10)
        loops = [asyncio.get_running_loop(), door.endpoint._loop]
        costs.extend(await asyncio.to_thread(ask, door.url, door.key, turns, counted, counter, loops))

    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=1 << 19, max_in_flight=1)
    with april.RolloutScheduler(
        config, prompts=[{"token_ids": [20]}], rollout=rollout, reward=None, tokenizer=tokenizer, progress=False,
        renderer=RENDERERS[renderer], engines=[engine],
    ) as rollouts:  # fmt: skip
        batch = rollouts.next_batch()
    return costs, len(batch.samples)


def main(arguments: list[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="conversations for each renderer; the best counts")
    options = parser.parse_args(arguments)
    tenth = options.turns // 10
    print(f"{options.turns} turns; CPU ms and Python calls of april per turn, by tenths of the conversation")
    for renderer in RENDERERS:
        found = [measure(renderer, options.turns) for _ in range(options.rounds)]
        rows = {rows for _, rows in found}
        for name, factor, form in (("cpu_s", 1000, "{:7.2f}"), ("calls", 1, "{:7.0f}")):
            tenths = [
                min(mean(c[name] for c in costs[i * tenth : (i + 1) * tenth] if name in c) for costs, _ in found)
                for i in range(10)
            ]
            print(f"{renderer}, {name}, {rows} rows: " + " ".join(form.format(factor * value) for value in tenths))


if __name__ == "__main__":
    main()
