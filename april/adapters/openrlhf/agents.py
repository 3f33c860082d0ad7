"""Runs OpenRLHF's agents as rollout functions: OpenRLHF's executor gets april in place of its vLLM engine.

Invariants: april trains the tokens that the executor returns, which begin with the conversation that april generated,
in the ranges that the executor returns. An executor and its engine serve one response at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from april.adapters.openrlhf.samples import Held, RewardResult
from april.core.types import FinishReason, Prompt
from april.driver.llm import LLM, Completion
from april.errors import ConfigError, RolloutError

PASSED_ON = ("temperature", "top_p", "min_tokens", "stop", "stop_token_ids")
"""Sampling parameters that an agent may change between its turns."""


def load_executor(path: str) -> Callable[[], Any]:
    """Load the class ``AgentExecutor`` from a Python file. Raises ConfigError if that fails."""
    spec = importlib.util.spec_from_file_location("agent_module", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--train.agent_func_path {path}: expected a Python file with a class AgentExecutor")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: Callable[[], Any] = module.AgentExecutor
    except (OSError, ImportError, SyntaxError, AttributeError) as error:
        raise ConfigError(f"--train.agent_func_path {path}: {type(error).__name__}: {error}") from error
    return found


@dataclass(slots=True)
class AgentEngine:
    """Replacement for the vLLM engine that an executor calls; serves one response at a time."""

    tokenizer: Any
    given: Mapping[str, Any]
    """Sampling parameters of the run; only parameters that an agent has changed are passed to april."""
    llm: LLM = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    last: Completion | None = None

    def begin(self, llm: LLM) -> None:
        """Serve a response from now on. Must be called on april's event loop."""
        self.llm, self.loop, self.last = llm, asyncio.get_running_loop(), None

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Return an output in vLLM's form, with ``token_ids``, ``text``, ``logprobs`` and ``finish_reason``.

        May be called on any event loop, such as that of an executor's own server.
        """
        if multi_modal_data:
            raise RolloutError("the agent sends images, but april resumes from token ids alone; use text")
        answer = self._answer(prompt_token_ids, sampling_params)
        if asyncio.get_running_loop() is self.loop:
            return await answer
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self.loop))

    async def _answer(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        changed = {
            name: value
            for name in PASSED_ON
            if (value := getattr(sampling_params, name, None)) is not None and value != self.given.get(name)
        }
        llm = self.llm
        done = await llm.generate(
            list(prompt_token_ids), max_tokens=sampling_params.max_tokens, any_conversation=True, **changed
        )
        if self.llm is llm:  # else the executor has not waited for this answer, and serves another response
            self.last = done
        ids = done.tokens.tolist()
        said = zip(ids, done.logprobs.tolist(), strict=True)
        output = SimpleNamespace(
            token_ids=ids, text=self._text(ids, done.finish, changed.get("stop") or ()),
            logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in said],
            finish_reason="length" if done.finish is FinishReason.LENGTH else "stop",
        )  # fmt: skip
        return SimpleNamespace(outputs=[output], prompt_token_ids=list(prompt_token_ids))

    def _text(self, ids: list[int], finish: FinishReason, stop: Any) -> str:
        """Decode a response as vLLM does, without the stop string or stop token at its end."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        found = [text.find(s) for s in ((stop,) if isinstance(stop, str) else stop) if s in text]
        if finish is FinishReason.LENGTH:
            return text
        return text[: min(found)] if found else str(self.tokenizer.decode(ids[:-1], skip_special_tokens=False))


class Agents:
    """Provides the rollout function for ``--train.agent_func_path``, which stores results in ``scored``."""

    def __init__(self, args: Any, tokenizer: Any, scored: Held) -> None:
        self._executor = load_executor(args.train.agent_func_path)
        self._free: list[tuple[Any, AgentEngine]] = []
        """Executors that serve no response now, each with its engine, which it may have kept."""
        self._tokenizer, self._scored = tokenizer, scored
        self._max_len: int = args.data.max_len
        self._sampling = {
            "temperature": args.rollout.temperature, "top_p": args.rollout.top_p, "top_k": -1, "min_tokens": 1,
            "skip_special_tokens": False, "logprobs": 1, "max_tokens": args.rollout.max_new_tokens, "stop": None,
            "stop_token_ids": None,
        }  # fmt: skip

    async def rollout(self, prompt: Prompt, llm: LLM) -> None:
        """Run an executor for one response and store its result. An executor that fails is not used again."""
        executor, engine = (
            self._free.pop() if self._free else (self._executor(), AgentEngine(self._tokenizer, self._sampling))
        )
        engine.begin(llm)
        result = await executor.execute(
            prompt.data["prompt"], prompt.data["label"], SimpleNamespace(**self._sampling), self._max_len,
            self._tokenizer, engine,
        )  # fmt: skip
        self._scored[llm.sample_id] = self._result(result, engine.last)
        self._free.append((executor, engine))

    def _result(self, result: Mapping[str, Any], last: Completion | None) -> RewardResult:
        if last is None:
            raise RolloutError("the agent ended without a request; a prompt must leave room in --data.max_len")
        generated, ids = last.conversation.tolist(), list(result["observation_tokens"])
        if ids[: len(generated)] != generated:
            at = next((i for i, (a, b) in enumerate(zip(ids, generated, strict=False)) if a != b), len(ids))
            raise RolloutError(
                "the agent returned observation_tokens that differ from its last request and the answer to it, from "
                f"token {at} on; return what was generated, and append to it"
            )
        logs = result.get("extra_logs") or {}
        answer = RewardResult.of({"rewards": result["reward"], "scores": result.get("scores"), "extra_logs": logs})
        ranges = [[int(start), int(end)] for start, end in result["action_ranges"]]
        truncated = bool(result.get("truncated", False))
        return RewardResult(answer.reward, answer.score, answer.logs, ids[len(generated) :], ranges, truncated)
