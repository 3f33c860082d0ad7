"""An agent for ``--train.agent_func_path``: an executor of several turns, as OpenRLHF's own is."""

from __future__ import annotations

import asyncio
import threading
from copy import deepcopy
from typing import Any, ClassVar

FEEDBACK = "8 9"
played: list[dict[str, Any]] = []
"""What the executors have returned."""


class AgentExecutor:
    """Two or three turns of at most 15 tokens, each answered by two words, the last one too; a reward per turn."""

    turns = 2

    async def execute(
        self, prompt: str, label: str, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        tokens = hf_tokenizer(text=f"3 {prompt}", add_special_tokens=False)["input_ids"]
        logprobs, ranges, reward = [0.0] * len(tokens), [], 0.0
        for turn in range(self.turns + int(label) % 2):
            sampling_params.max_tokens = min(15, max_length - len(tokens))
            request = await llm_engine.generate(tokens, deepcopy(sampling_params), multi_modal_data=None)
            (output,) = request.outputs
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            logprobs += [said[token].logprob for token, said in zip(output.token_ids, output.logprobs, strict=True)]
            assert output.text.split() == [str(i) for i in output.token_ids][: len(output.text.split())]
            feedback = hf_tokenizer(text=FEEDBACK, add_special_tokens=False)["input_ids"]
            tokens = tokens + output.token_ids + feedback
            logprobs += [0.0] * len(feedback)
            reward += float(turn + len(output.token_ids))
        result = {
            "prompt": prompt, "label": label, "images": images, "mm_train_inputs": None, "reward": reward,
            "scores": reward / 100, "observation_tokens": tokens, "action_ranges": ranges,
            "rollout_log_probs": logprobs, "truncated": output.finish_reason == "length", "extra_logs": {"turns": 1.0},
        }  # fmt: skip
        played.append(result)
        return result


class TrainsTheEnd(AgentExecutor):
    """Trains the last turn without its first token; leaves ``truncated`` out, as OpenRLHF's MultiTurnAgentExecutor."""

    async def execute(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        result = await super().execute(*arguments, **named)
        start, end = result["action_ranges"][-1]
        del result["truncated"]
        result["action_ranges"] = [(start + 1, end)] if end > start + 1 else []
        return result


class Serves(AgentExecutor):
    """Its server has an event loop of its own, sends the requests, and keeps the engine of its first response."""

    servers: ClassVar[list[Serves]] = []

    def __init__(self) -> None:
        self._engine: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="executor's server")
        self._thread.start()
        self.servers.append(self)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        asked = asyncio.run_coroutine_threadsafe(self._engine.generate(*arguments, **named), self._loop)
        return await asyncio.wrap_future(asked)

    async def execute(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        *others, engine = arguments
        self._engine = self._engine or engine
        return await super().execute(*others, self, **named)


class Rewrites(AgentExecutor):
    """Returns other tokens than were generated."""

    async def execute(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        result = await super().execute(*arguments, **named)
        return result | {"observation_tokens": [0, *result["observation_tokens"][1:]]}
