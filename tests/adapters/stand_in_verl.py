"""A trainer, a server and agent loops of a few lines that call as verl's do, on a virtual clock, without verl and Ray.

As in verl, the trainer is synchronous and its rollouts are not: agent loops move only while it waits for april.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from april.adapters.verl.agent_calls import (
    AgentLoopSession,
    LLMCall,
    LLMResult,
    Message,
    WorkerCalls,
    fields_of,
)
from april.adapters.verl.rollouts import DeliveredRows, VerlRollouts
from april.adapters.verl.settings import RunSettings, settings_of
from april.core.attachments import Placed
from april.core.rollout_core import RolloutCore
from april.core.versions import PolicyVersion
from april.engines.simulated.synthetic_rows import synthetic_rows
from april.testing import VirtualClockLoop, rollouts

EOS = 1
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 3, "max_prompt_length": 8, "max_response_length": 40},
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm", "n": 2, "temperature": 1.0, "top_p": 1, "top_k": -1,
            "prompt_length": 8, "response_length": 40,
            "calculate_log_probs": True, "logprobs_mode": "processed_logprobs", "max_num_seqs": 256,
            "tensor_model_parallel_size": 1, "enable_rollout_routing_replay": False,
            "agent": {"agent_loop_manager_class": "april.adapters.verl.AgentLoopManager"},
        }
    },
    "algorithm": {
        "adv_estimator": "grpo", "filter_groups": {"enable": False, "metric": "reward"},
        "rollout_correction": {"rollout_is": "token", "bypass_mode": False},
    },
    "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
    "skip": {"rollout_tq": {"enable": False}},
    "trainer": {
        "use_v1": True, "n_gpus_per_node": 1, "nnodes": 1,
        "checkpoint_callback_class": "april.adapters.verl.Checkpoints", "v1": {"trainer_mode": "colocate_async"},
    },
    "april": {"max_staleness": 5},
}  # fmt: skip
"""What verl's configuration looks like with +april=verl, as far as april reads it."""


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with values at dotted paths (``__`` for a dot) replaced."""
    made = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *above, last = path.split("__")
        place = made
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return made


class Server:
    """One token per virtual second and request; a gate as verl's servers have; every request is remembered.

    Token k of a response is ``100 + k``; it ends with EOS at its length, which ``length_of`` says of (prompt, sample).
    Its log-probability is -k - label / 1000.

    Args:
        length_of: tokens of (prompt, sample).
    """

    def __init__(self, length_of: Callable[[int, int], int]) -> None:
        self._length_of = length_of
        self.label = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.rejects = False
        self.live: dict[asyncio.Event, None] = {}
        self.generated = 0
        self.fails: list[Exception] = []
        """Raised by the next requests."""
        self.wrong: list[dict[str, Any]] = []
        """Changes to the next outputs."""
        self.experts = False
        """Outputs have the experts of their tokens."""

    async def generate(self, token_ids: list[int], max_tokens: int) -> Any:
        while not self.gate.is_set():
            if self.rejects:
                return self._output([], [], "aborted")
            await self.gate.wait()
        if self.fails:
            raise self.fails.pop()
        aborted = asyncio.Event()
        self.live[aborted] = None
        row, sample = token_ids[1], token_ids[2]
        held, end = len(token_ids) - 3, self._length_of(row, sample)
        tokens: list[int] = []
        reason = "completed"
        try:
            while len(tokens) < max_tokens and not (tokens and tokens[-1] == EOS):
                try:
                    await asyncio.wait_for(aborted.wait(), 1.0)
                    reason = "aborted"
                    break
                except TimeoutError:
                    k = held + len(tokens) + 1
                    tokens.append(EOS if k >= end else 100 + k)
        finally:
            self.live.pop(aborted, None)
            self.generated += len(tokens)
        logprobs = [-float(held + i + 1) - self.label / 1000 for i in range(len(tokens))]
        return self._output(tokens, logprobs, reason, token_ids)

    def _experts(self, ids: list[int]) -> Any:
        """Of all tokens but the last, int32 as verl's SGLang gives them: all read under the present weights."""
        whole = np.array(ids, np.int32)
        return synthetic_rows("routed_experts", whole, [(PolicyVersion(0, self.label), len(ids) - 1)]).astype(np.int32)

    def _output(self, tokens: list[int], logprobs: list[float], reason: str, before: Sequence[int] = ()) -> Any:
        made = {"token_ids": tokens, "log_probs": logprobs, "stop_reason": reason}
        made["extra_fields"] = {"global_steps": self.label}
        if self.experts and tokens:
            made["routed_experts"] = self._experts([*before, *tokens])
        return SimpleNamespace(**(made | (self.wrong.pop() if self.wrong and tokens else {})))

    def abort(self, *, rejects: bool) -> None:
        self.gate.clear()
        self.rejects = rejects
        for aborted in self.live:
            aborted.set()

    def resume(self) -> None:
        self.gate.set()


AgentLoop = Callable[[AgentLoopSession, list[int]], Awaitable[list[int]]]


class Worker:
    """One of verl's workers, in this process: what april calls of it, and the agent loops of its samples."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._calls = WorkerCalls()
        self.tasks: set[asyncio.Task[None]] = set()

    async def begin(self, row: str, number: int, uid: str, index: int, stored: Sequence[str]) -> None:
        self._calls.begin(number, uid, index, stored)
        task = asyncio.get_running_loop().create_task(self._calls.run(number, self._agent_loop, self._forget))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def messages(self) -> list[Message]:
        return await self._calls.messages()

    async def answer(self, answers: Sequence[tuple[int, LLMResult | str | None]]) -> None:
        self._calls.answer(answers)

    async def _agent_loop(self, session: AgentLoopSession) -> None:
        trainer, uid = self._trainer, session.uid
        row = trainer.queue[uid]
        prompt = [50, row, session.index]
        response = await trainer.agent_loop(session, prompt)
        session.reward = session.value = trainer.reward_of(row, session.index, response)
        key = f"{uid}_{session.index}_0"
        spans = session.provenance(len(prompt), len(response))[0]
        trainer.stored[key] = {"tokens": response, "spans": spans, "resumes": session.resumes}
        if trainer.settings.config.extras:
            trainer.stored[key]["experts"] = OUTPUTS.pop((uid, session.index))["routed_experts"]
        session.keys.append(key)

    async def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._trainer.stored.pop(key, None)


class Trainer:
    """verl's trainer as far as april sees it: draws rows, asks for batches, updates weights, saves.

    Args:
        length_of: tokens of (row, sample).
        reward_of: reward of (row, sample, response).
        rows: of the data set; it begins again when it has ended.
        rejects: the server turns requests away while its gate is closed; otherwise they wait there.
        changes: to CONFIG.
    """

    def __init__(
        self, length_of: Callable[[int, int], int], reward_of: Callable[[int, int, list[int]], float] | None = None,
        *, rows: int = 1000, rejects: bool = True, **changes: Any,
    ) -> None:  # fmt: skip
        self.loop = VirtualClockLoop()
        self.settings: RunSettings = settings_of(config(**changes, april__check=True))
        rollout = config(**changes)["actor_rollout_ref"]["rollout"]
        self.server = self._in_loop(lambda: Server(length_of))
        self.server.experts = bool(rollout["enable_rollout_routing_replay"])
        self.worker = self._in_loop(lambda: Worker(self))
        self.run = VerlRollouts(self.settings, self._send, self._abort, (EOS,), self.fetch, [self.worker])
        self.april = self._in_loop(lambda: rollouts(self.settings.config, **self.run.parts))
        self.way_s = 0.0
        """Between a request's start and its server's hearing of it."""
        self.delay_s = 0.0
        """Between a server's end of a request and its client's hearing of it."""
        self.rejects = rejects
        self.reward_of = reward_of or (lambda row, sample, response: float(sample))
        self.agent_loop: AgentLoop = single_turn
        self.n = self.settings.config.n_samples_per_prompt
        self.rows, self.drawn, self.step_number = rows, 0, 1
        self.queue: dict[str, int] = {}
        """Prompts in verl's queue: row by uid."""
        self.stored: dict[str, dict[str, Any]] = {}
        """Trajectories in verl's queue by key."""
        self.trained: list[tuple[int, int]] = []
        """(row, sample) of everything trained."""

    def _in_loop(self, make: Callable[[], Any]) -> Any:
        async def made() -> Any:
            return make()

        return self.loop.run_until_complete(made())

    @property
    def core(self) -> RolloutCore:
        return self.april.scheduler._driver.core  # type: ignore[no-any-return]

    def ledgers(self) -> dict[str, dict[str, Any]]:
        return {name: book.as_dict() for name, book in self.april.ledger().items()}

    # ---------------------------------------------------------------- hands

    def fetch(self, count: int) -> None:
        offered = []
        for _ in range(count):
            uid, row = f"u{self.drawn}", self.drawn % self.rows
            self.drawn += 1
            self.queue[uid] = row
            offered.append((uid, uid))
        self.run.prompts.offer(offered)

    async def _send(self, asked: LLMCall, token_ids: list[int], max_tokens: int) -> Any:
        if self.way_s:
            await asyncio.sleep(self.way_s)
        output = await self.server.generate(token_ids, max_tokens)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return output

    async def _abort(self) -> None:
        """As verl's, it returns when the requests have ended."""
        self.server.abort(rejects=self.rejects)
        for _ in range(10):
            await asyncio.sleep(0)

    # ---------------------------------------------------------------- training

    def step(self) -> DeliveredRows:
        """Rollouts, training, new weights."""
        self.fetch(self.settings.config.rollout_batch_size)
        delivery = self.loop.run_until_complete(self._next_batch(self.step_number - 1))
        self.last = {}
        for uid, rollout in delivery.rollouts:
            key = f"{uid}_{rollout}_0"
            self.last[key] = self.stored[key]
            self.trained.append((self.queue[uid], rollout))
        self._sweep(delivery.held)
        for uid in delivery.settled:
            del self.queue[uid]
        return delivery

    async def _next_batch(self, label: int) -> DeliveredRows:
        if label != self.april.version.n:
            await self.april.weight_update(trained=self.run.deliveries.last, label=label)
        batch = await self.april.next_batch()
        await self._abort()  # before verl puts its servers to sleep
        assert not self.server.live
        return self.run.delivered(batch, self.april.scheduler)

    def _sweep(self, held: Collection[str]) -> None:
        """Trajectories of prompts that april holds, and what it trains now, stay in the queue."""
        for key in [*self.stored]:
            if key.split("_")[0] not in held and key not in self.last:
                del self.stored[key]

    def update(self) -> None:
        """What follows a step: the batch leaves the queue, the weights change, the servers go on."""
        for key in self.last:
            del self.stored[key]
        self.server.label = self.step_number
        self.step_number += 1
        self._in_loop(self.server.resume)

    def steps(self, count: int) -> dict[str, dict[str, Any]]:
        """So many steps, each with its update; what was trained in them, by key."""
        seen: dict[str, dict[str, Any]] = {}
        for _ in range(count):
            self.step()
            seen |= self.last
            self.update()
        return seen

    def validate(self, seconds: float) -> None:
        """Between two steps: agent loops and servers may do what they can."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def save(self, folder: Path) -> dict[str, Any]:
        """verl's own part of a checkpoint; april writes its file."""
        mine = {"queue": dict(self.queue), "stored": dict(self.stored), "drawn": self.drawn, "step": self.step_number}
        self.run.save(folder, self.april.scheduler)
        return mine

    def load(self, folder: Path, mine: dict[str, Any]) -> Collection[str]:
        """As after a restart; what april holds."""
        self.drawn, self.step_number = mine["drawn"], mine["step"] + 1
        self.server.label = mine["step"]
        self.queue = dict(mine["queue"])
        self.stored = {k: t for k, t in mine["stored"].items() if k.split("_")[0] in self.queue}
        there: dict[str, dict[int, list[str]]] = {uid: {} for uid in self.queue}
        for key in self.stored:
            uid, index, _ = key.split("_")
            there[uid][int(index)] = [key]
        state, waiting = self.run.read(folder, there)
        self.loop.run_until_complete(self.april.load_state_dict(state))
        held = self.run.restored(self.april.scheduler, lambda uids: uids, waiting)
        self.queue = {uid: row for uid, row in self.queue.items() if uid in held or uid in waiting}
        self.last = {}
        self._sweep(held)
        return held

    def close(self) -> None:
        async def end() -> None:
            await self.april.close()
            tasks = [*self.worker.tasks, *self.run.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()


OUTPUTS: dict[tuple[str, int], dict[str, Any]] = {}
"""What verl's agent loop got last for each rollout."""


async def generate(
    session: AgentLoopSession, prompt: list[int], max_tokens: int, attached: tuple[Placed, ...] = (),
    banned_ids: tuple[int, ...] = (),
) -> LLMResult:  # fmt: skip
    """A call, as verl's client makes it."""
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "banned_ids": banned_ids}
    return await session.generate(LLMCall(token_ids=prompt, sampling=sampling, attached=attached))


async def single_turn(session: AgentLoopSession, prompt: list[int]) -> list[int]:
    """One call, as verl's single-turn agent loop makes it."""
    done = await generate(session, prompt, 40)
    OUTPUTS[session.uid, session.index] = fields_of(done, session.spans)
    return [int(token) for token in done.tokens]
