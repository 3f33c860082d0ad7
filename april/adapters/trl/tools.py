"""Runs TRL's tools and environments: reimplements TRL's loop of tool calls as a rollout function for one response.

Invariants:

* a response equals, token for token, the row that TRL's own loop would make of the same sampled tokens;
* a response's note (messages, counts, rewards from an environment) is stored before the rollout function returns, so
  each finished response in a saved state has its note;
* an environment serves one response at a time, and is reused only after the rewards of that response are computed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from april.adapters.trl.data import ROW, DatasetPasses, Message, Row, message_of, scored, scores, weighted
from april.adapters.trl.ranks import of_all_ranks, rows_of_all_ranks
from april.core.types import Prompt
from april.driver.llm import BlockingLLM
from april.errors import CheckpointError

INPUT = "input"
"""Key of the row number, in the data of an evaluation prompt."""


class Note(msgspec.Struct, array_like=True):
    """Facts about a response that TRL needs beside its tokens: messages, tool calls and rewards."""

    prompt: list[Message]
    """Messages of the prompt, with the environment's first observation."""
    messages: list[Message] = msgspec.field(default_factory=list)
    calls: int = 0
    failures: int = 0
    rewards: list[float] = msgspec.field(default_factory=list)
    """One reward per function, NaN if it gave none; empty without an environment, since TRL then computes rewards."""


class ToolLoop:
    """Rollout function for a trainer with tools or environments.

    ``needs_rewards`` makes a missing reward an error, as advantages with ``group_quorum`` below 1 need every reward.
    """

    def __init__(self, trainer: Any, *, needs_rewards: bool) -> None:
        self._trainer = trainer
        self._needs_rewards = needs_rewards
        self._passes = DatasetPasses(trainer)
        self._factories: Mapping[Any, Callable[[], Any]] = trainer.environment_factories or {}
        self._idle: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self._notes: dict[tuple[int, int], Note] = {}
        """Notes of training responses by (group, index); filled on rank 0, which runs the rollout functions."""
        self._inputs: Sequence[Row] = ()
        self._of_inputs: dict[int, Note] = {}
        """Notes of an evaluation's responses by row number."""

    def rollout(self, prompt: Prompt, llm: BlockingLLM) -> None:
        """Generate a response, calling tools and continuing after their results. Runs in a thread."""
        number = prompt.data.get(INPUT)
        row = self._passes.drawn(prompt) if number is None else dict(self._inputs[number])
        name, ids = self._passes.environment_of(row), prompt.token_ids.tolist()
        row, given = row | {"prompt": self._passes.prompt_of(row)}, row
        environment = self._free_environment(name) if self._factories else None
        if environment is not None:
            # the environment does not get the column that contains its name
            observation = environment.reset(**{k: v for k, v in given.items() if name is None or k != "environment"})
            if observation is not None:
                row["prompt"] = _with_observation(row["prompt"], observation)
                ids = self._passes.tokens_of(row)
        note = Note(row["prompt"])
        completion_ids = self._converse(llm, ids, note, environment, name)
        if environment is not None:
            (note.rewards,) = scores(
                self._trainer, row, [note.messages], [completion_ids], environments=[environment],
                log_metric=getattr(self._trainer, "_log_metric", None),
            )  # fmt: skip
            self._idle[name].append(environment)
        if number is None:
            self._notes[llm.sample_id] = note
        else:
            self._of_inputs[number] = note

    def _free_environment(self, name: Any) -> Any:
        try:
            return self._idle[name].popleft()
        except IndexError:
            return self._factories[name]()

    def _converse(self, llm: BlockingLLM, prompt: list[int], note: Note, environment: Any, name: Any) -> list[int]:
        """Do what TRL's ``_tool_call_loop`` does, for one response, and return the tokens after the prompt."""
        trainer = self._trainer
        methods = [] if environment is None else _tools_of(environment)
        tools = {tool.__name__: tool for tool in [*(getattr(trainer, "_standalone_tools", None) or ()), *methods]}
        written: Sequence[Any] = trainer._env_tools[name] if environment is not None else trainer.tools
        ids, rounds = prompt, 0
        while True:
            completion = llm.generate(ids, any_conversation=True)
            generated: list[int] = completion.conversation[len(prompt) :].tolist()
            if not len(completion.tokens):
                return generated  # tool results have left no room in the context
            message = message_of(trainer, completion.tokens.tolist(), ids, written)
            note.messages.append(message)
            calls = message.get("tool_calls")
            if not calls or rounds >= trainer.max_tool_calling_iterations:
                return generated
            results = self._results_of(calls, tools, note)
            ids = [*completion.conversation.tolist(), *trainer._get_tool_suffix_ids(results)]
            longest = trainer.model.config.max_position_embeddings
            if len(ids) - len(prompt) > trainer.max_completion_length or len(ids) >= longest:
                return generated
            note.messages += results
            rounds += 1

    def _results_of(
        self, calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Callable[..., Any]], note: Note
    ) -> list[Message]:
        """Call the tools and return their results as messages. As in TRL, results of async tools come last."""
        results: list[tuple[str, Any]] = []
        running: list[tuple[str, Any]] = []
        for call in calls:
            note.calls += 1
            if call["type"] != "function":
                note.failures += 1
                error = {"error": f"Unsupported tool call type: {call['type']}"}
                results.append((call.get("name", "unknown"), error))
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")  # TRL's text, which the model reads
                value = tools[name](**arguments)
                (running if inspect.iscoroutinefunction(tools[name]) else results).append((name, value))
            except Exception as error:  # as in TRL, the model reads the error's text
                note.failures += 1
                results.append((name, {"error": str(error)}))
        for (name, _), value in zip(running, self._awaited([value for _, value in running]), strict=True):
            if isinstance(value, Exception):
                note.failures += 1
                value = {"error": str(value)}
            results.append((name, value))
        return [
            {"role": "tool", "name": name, "content": value if isinstance(value, list) else str(value)}
            for name, value in results
        ]

    def _awaited(self, running: list[Any]) -> list[Any]:
        """Await async tools on TRL's event loop and return their results or exceptions."""
        if not running:
            return []

        async def together() -> list[Any]:
            return await asyncio.gather(*running, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(together(), self._trainer.async_loop).result()

    def said_of(self, response: Any) -> list[Message] | None:
        """Return the messages of a training response, or None if it has no note."""
        note = self._notes.get(response.sample_id)
        return None if note is None else note.messages

    def reward_of(self, prompt: Prompt, response: Any) -> float:
        """Return the weighted reward from a response's note; 0 if it has no note, such as in evaluations.

        If no function scored the response, return 0, or raise RolloutError if ``needs_rewards`` is set.
        """
        note = self._notes.get(response.sample_id) if ROW in prompt.data else None
        value = 0.0 if note is None else weighted(self._trainer, note.rewards)
        return scored(prompt, value) if self._needs_rewards else 0.0 if math.isnan(value) else value

    def notes_of(self, ids: Iterable[tuple[int, int]]) -> list[Note]:
        """Return the notes of this rank's samples. Must be called on every rank."""
        return self._of_this_rank([self._notes.get(tuple(i)) for i in rows_of_all_ranks(self._trainer, list(ids))])

    def _of_this_rank(self, notes: Sequence[Note | None]) -> list[Note]:
        """Return this rank's equal part of the ``notes`` of rank 0."""
        accelerator = self._trainer.accelerator
        first, *_ = of_all_ranks(self._trainer, notes if accelerator.is_main_process else None)
        found = msgspec.convert(first, list[Note])
        count = len(found) // accelerator.num_processes
        return found[accelerator.process_index * count :][:count]

    def keep(self, groups: frozenset[int]) -> None:
        """Keep the notes of these groups and drop all others."""
        for group, index in list(self._notes):
            if group not in groups:
                self._notes.pop((group, index), None)

    def evaluation(self, inputs: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the evaluation prompts of all ranks; ``inputs`` are this rank's rows. Must be called on every rank."""
        self._of_inputs.clear()
        self._inputs = rows_of_all_ranks(self._trainer, list(inputs))
        tokens_of = self._passes.tokens_of
        return [{"token_ids": tokens_of(row), INPUT: number} for number, row in enumerate(self._inputs)]

    def evaluation_notes(self) -> list[Note]:
        """Return the notes of this rank's evaluation rows. Must be called on every rank."""
        return self._of_this_rank([self._of_inputs.get(number) for number in range(len(self._inputs))])

    def state(self) -> list[Any]:
        """Return the training notes as plain values, for :meth:`load`."""
        return [(*key, msgspec.to_builtins(note)) for key, note in list(self._notes.items())]

    def load(self, state: Sequence[Any]) -> None:
        """Restore the notes that :meth:`state` returned."""
        self._notes = {(group, index): msgspec.convert(note, Note) for group, index, note in state}


def check_notes(state: Any, loop: ToolLoop | None) -> None:
    """Raise CheckpointError if only the saved run (``state``) or only this trainer (``loop``) has tools."""
    if (state is None) != (loop is None):
        had, has = ("none", "some") if state is None else ("some", "none")
        raise CheckpointError(
            f"the checkpoint was saved with {had} of tools and environment_factory, but now there are {has}; its "
            "responses belong to other conversations: use the same tools as before"
        )


def _tools_of(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods of an environment that TRL treats as tools."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, n) for n in names if n not in ("reset", "get_reward") and not n.startswith("_")]


def _with_observation(prompt: Any, observation: Any) -> list[Message]:
    """Return a prompt with an environment's first observation added to its last message."""
    *before, last = prompt
    content = last["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*before, {**last, "content": content + observation}]
