"""TRL's tools and environments: its loop of calls and answers, as a rollout function for one response.

Invariants:

* a response is, token for token, the row that TRL's own loop makes of the same sampled tokens: the template, the
  parser, the order of results and the limits are TRL's;
* what the tokens do not say (messages, counts, rewards by an environment) is noted before the function returns, so a
  state with a finished response comes with its note;
* an environment serves one response at a time, and the next one once that has its rewards.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from april.adapters.trl.data import ROW, DatasetPasses, Message, Row, message_of, scored, scores, weighted
from april.adapters.trl.ranks import of_all_ranks
from april.core.types import Prompt
from april.driver.llm import BlockingLLM
from april.errors import CheckpointError, RolloutError

INPUT = "input"
"""Key of a prompt's data in an evaluation: the number of its row among those that were asked."""


class Note(msgspec.Struct, array_like=True):
    """What a response's tokens do not say."""

    prompt: list[Message]
    """with what its environment has added"""
    messages: list[Message]
    calls: int
    failures: int
    rewards: list[float]
    """By reward function, NaN where it gives none; empty where TRL asks, as there is no environment."""


@dataclass(slots=True)
class Turns:
    """A response as it grows."""

    ids: list[int]
    """tokens of the prompt"""
    messages: list[Message] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    calls: int = 0
    failures: int = 0


class ToolLoop:
    """The rollout function of a trainer with tools or environments.

    ``needs_rewards``: advantages are made of single responses' rewards.
    """

    def __init__(self, trainer: Any, *, needs_rewards: bool) -> None:
        self._trainer = trainer
        self._needs_rewards = needs_rewards
        self._passes = DatasetPasses(trainer)
        self._factories: Mapping[Any, Callable[[], Any]] = trainer.environment_factories or {}
        self._idle: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self._notes: dict[tuple[int, int], Note] = {}
        """By group and index, in the process that runs the functions."""
        self._inputs: Sequence[Row] = ()
        self._of_inputs: dict[int, Note] = {}
        """Notes of an evaluation, by the number of its row."""

    # ---------------------------------------------------------------- one response

    def rollout(self, prompt: Prompt, llm: BlockingLLM) -> None:
        """Generate, call the tools, go on behind their results; runs in a thread, as do the tools."""
        number = prompt.data.get(INPUT)
        row = self._passes.drawn(prompt) if number is None else dict(self._inputs[number])
        name, turns = self._passes.templates.environment_of(row), Turns(prompt.token_ids.tolist())
        row, given = row | {"prompt": self._passes.templates.prompt_of(row)}, row
        environment = self._free_environment(name) if self._factories else None
        if environment is not None:
            # the name chose the environment, which does not hear of it
            observation = environment.reset(**{k: v for k, v in given.items() if name is None or k != "environment"})
            if observation is not None:
                row["prompt"] = _with_observation(row["prompt"], observation)
                turns.ids = self._passes.templates.tokens_of(row)
        self._converse(llm, turns, environment, name)
        rewards: list[float] = []
        if environment is not None:
            (rewards,) = scores(
                self._trainer, row, [turns.messages], [turns.completion_ids], environments=[environment],
                log_metric=getattr(self._trainer, "_log_metric", None),
            )  # fmt: skip
            self._idle[name].append(environment)
        note = Note(row["prompt"], turns.messages, turns.calls, turns.failures, rewards)
        if number is None:
            self._notes[llm.sample_id] = note
        else:
            self._of_inputs[number] = note

    def _free_environment(self, name: Any) -> Any:
        try:
            return self._idle[name].popleft()
        except IndexError:
            return self._factories[name]()

    def _converse(self, llm: BlockingLLM, turns: Turns, environment: Any, name: Any) -> None:
        """TRL's ``_tool_call_loop``, for one response."""
        trainer = self._trainer
        methods = [] if environment is None else _tools_of(environment)
        tools = {tool.__name__: tool for tool in [*self._standalone, *methods]}
        written: Sequence[Any] = trainer._env_tools[name] if environment is not None else trainer.tools
        ids, rounds = turns.ids, 0
        while True:
            completion = llm.generate(ids, any_conversation=True)
            turns.completion_ids = completion.conversation[len(turns.ids) :].tolist()
            if not len(completion.tokens):
                return  # there was room for the results only
            message = message_of(trainer, completion.tokens.tolist(), ids, written)
            turns.messages.append(message)
            calls = message.get("tool_calls")
            if not calls or rounds >= trainer.max_tool_calling_iterations:
                return
            results = self._results_of(calls, tools, turns)
            ids = [*completion.conversation.tolist(), *trainer._get_tool_suffix_ids(results)]
            longest = trainer.model.config.max_position_embeddings
            if len(ids) - len(turns.ids) > trainer.max_completion_length or len(ids) >= longest:
                return
            turns.messages += results
            rounds += 1

    @property
    def _standalone(self) -> list[Callable[..., Any]]:
        """Tools that belong to no environment."""
        return list(getattr(self._trainer, "_standalone_tools", None) or ())

    def _results_of(
        self, calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Callable[..., Any]], turns: Turns
    ) -> list[Message]:
        """The results as messages: those of plain tools in their order, behind them those of async ones."""
        results: list[tuple[str, Any]] = []
        running: list[tuple[str, Any]] = []
        for call in calls:
            turns.calls += 1
            if call["type"] != "function":
                turns.failures += 1
                error = {"error": f"Unsupported tool call type: {call['type']}"}
                results.append((call.get("name", "unknown"), error))
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")  # the words that TRL's model sees
                value = tools[name](**arguments)
                (running if inspect.iscoroutinefunction(tools[name]) else results).append((name, value))
            except Exception as error:  # whatever a tool raises, the model is told
                turns.failures += 1
                results.append((name, {"error": str(error)}))
        for (name, _), value in zip(running, self._awaited([value for _, value in running]), strict=True):
            if isinstance(value, Exception):
                turns.failures += 1
                value = {"error": str(value)}
            results.append((name, value))
        return [
            {"role": "tool", "name": name, "content": value if isinstance(value, list) else str(value)}
            for name, value in results
        ]

    def _awaited(self, running: list[Any]) -> list[Any]:
        """The results of async tools, on TRL's loop for them."""
        if not running:
            return []

        async def together() -> list[Any]:
            return await asyncio.gather(*running, return_exceptions=True)

        return asyncio.run_coroutine_threadsafe(together(), self._trainer.async_loop).result()

    # ---------------------------------------------------------------- what is noted

    def said_of(self, response: Any) -> list[Message] | None:
        """The messages of a response to the train dataset."""
        note = self._notes.get(response.sample_id)
        return None if note is None else note.messages

    def reward_of(self, prompt: Prompt, response: Any) -> float:
        """The reward that a response was given beside its environment.

        Raises RolloutError for one that no function scores, where the advantages of its siblings are made of it.
        """
        note = self._notes.get(response.sample_id) if ROW in prompt.data else None
        value = 0.0 if note is None else weighted(self._trainer, note.rewards)
        return scored(prompt, value) if self._needs_rewards else 0.0 if math.isnan(value) else value

    def notes_of(self, ids: Iterable[tuple[int, int]]) -> list[Note]:
        """Those of a batch's samples, of which each rank names its own; called on every rank."""
        everybodys = [tuple(i) for of_rank in of_all_ranks(self._trainer, list(ids)) for i in of_rank]
        return self._of_this_rank([self._notes.get(i) for i in everybodys])

    def _of_this_rank(self, notes: Sequence[Note | None]) -> list[Note]:
        """This rank's part of notes that are on rank 0."""
        accelerator = self._trainer.accelerator
        first, *_ = of_all_ranks(self._trainer, notes if accelerator.is_main_process else None)
        if None in first:
            raise RolloutError("a response has come without what its tools have said; report this")
        found = msgspec.convert(first, list[Note])
        count = len(found) // accelerator.num_processes
        return found[accelerator.process_index * count :][:count]

    def keep(self, groups: frozenset[int]) -> None:
        """Forget the notes of all other groups."""
        for group, index in list(self._notes):
            if group not in groups:
                self._notes.pop((group, index), None)

    def evaluation(self, inputs: Sequence[Row]) -> list[dict[str, Any]]:
        """The prompts of an evaluation, whose rows each rank names its own of; called on every rank."""
        self._of_inputs.clear()
        self._inputs = [row for of_rank in of_all_ranks(self._trainer, list(inputs)) for row in of_rank]
        tokens_of = self._passes.templates.tokens_of
        return [{"token_ids": tokens_of(row), INPUT: number} for number, row in enumerate(self._inputs)]

    def evaluated(self) -> list[Note]:
        """The notes of the evaluation; called on every rank."""
        return self._of_this_rank([self._of_inputs.get(number) for number in range(len(self._inputs))])

    def state(self) -> list[Any]:
        """The notes as plain values, of which :meth:`load` makes them again."""
        return [(*key, msgspec.to_builtins(note)) for key, note in list(self._notes.items())]

    def load(self, state: Sequence[Any]) -> None:
        """Go on from :meth:`state`."""
        self._notes = {(group, index): msgspec.convert(note, Note) for group, index, note in state}


def check_notes(state: Any, loop: ToolLoop | None) -> None:
    """Raise CheckpointError for a checkpoint of a trainer with tools where there are none now, or the other way."""
    if (state is None) != (loop is None):
        had, has = ("none", "some") if state is None else ("some", "none")
        raise CheckpointError(
            f"the checkpoint was saved with {had} of tools and environment_factory, and now there are {has}; its "
            "responses are of other conversations: give what there was"
        )


def _tools_of(environment: Any) -> list[Callable[..., Any]]:
    """An environment's methods that are tools, as TRL finds them."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, n) for n in names if n not in ("reset", "get_reward") and not n.startswith("_")]


def _with_observation(prompt: Any, observation: Any) -> list[Message]:
    """A prompt with what an environment says at its beginning, at the end of the last message."""
    *before, last = prompt
    content = last["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*before, {**last, "content": content + observation}]
