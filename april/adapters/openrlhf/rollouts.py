"""Runs the rollouts of an OpenRLHF training: opens april's scheduler, delivers a batch per step, saves april's state.

Invariant: no engine has a request from april while OpenRLHF changes weights. With the setting ``generation: stepwise``
there is no request between two calls of :meth:`OpenRLHFRollouts.next`, so engines may sleep then. With ``continuous``,
:meth:`OpenRLHFRollouts.hand_over` pauses the engines during a weight update.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from april.adapters.common.data_loader import KEY
from april.adapters.common.deliveries import KeptSamples, checkpoint_errors, closing_on_error, saved_groups
from april.adapters.openrlhf.agents import Agents
from april.adapters.openrlhf.samples import (
    Held,
    OpenRLHFPrompts,
    PromptImages,
    RewardResult,
    judged_text,
    prompt_ids,
    responses_of,
)  # fmt: skip
from april.concurrency.daemon_threads import DaemonPool
from april.config.settings import Config
from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import GenerationMode, Prompt, SampleId
from april.driver.llm import single_turn
from april.driver.rewards import Response
from april.engines.vllm.actor import ActorEngine, capabilities_of
from april.errors import DataExhausted, RolloutError
from april.scheduler import RolloutScheduler
from april.serialization.state_file import pack, unpack


class OpenRLHFEngine(ActorEngine):
    """april's engine for one :class:`april.adapters.openrlhf.actors.AprilRolloutRayActor`."""

    async def pushes(self) -> int:
        """Return the number of weight transfers into this engine that the trainer has completed."""
        return int(await self._call("april_pushes"))

    async def judge(self, query: str, prompt: str, label: Any) -> Any:
        """Return the answer of OpenRLHF's reward function or reward server, which the actor calls."""
        return await self._call("april_judge", query, prompt, label)


async def connect(actors: Sequence[Any]) -> list[OpenRLHFEngine]:
    """Ask each actor for its capabilities and make an engine for it."""
    capabilities = await asyncio.gather(*(actor.april_capabilities.remote() for actor in actors))
    pairs = enumerate(zip(actors, capabilities, strict=True))
    return [OpenRLHFEngine(actor, f"vllm{i}", capabilities_of(plain)) for i, (actor, plain) in pairs]


class TransferThread:
    """Splits a weight update into two calls, :meth:`begin` and :meth:`end`, for the process that writes the weights.

    ``hand_over(transfer)`` must pause generation, call ``transfer``, and resume when that returns.
    """

    def __init__(self, hand_over: Callable[[Callable[[], None]], Any]) -> None:
        self._hand_over = hand_over
        self._pool = DaemonPool("april-transfer")
        self._may_write: Future[None] = Future()
        self._written: Future[bool] = Future()
        self._ended: Future[Any] = Future()

    def begin(self) -> None:
        """Pause generation and return once weights may be written. Raises the error of a pause that fails."""
        self._may_write, self._written = Future(), Future()
        self._ended = self._pool.submit(self._hand_over, self._transfer)
        wait((self._may_write, self._ended), return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    def end(self, *, written: bool) -> None:
        """Resume generation. Raises RolloutError unless ``written``, EngineError if an engine does not resume."""
        self._written.set_result(written)
        self._ended.result()

    def _transfer(self) -> None:
        self._may_write.set_result(None)
        if not self._written.result():
            raise RolloutError("the trainer's transfer of weights failed; its own error says why")


log = logging.getLogger("april")

KIND, CARRY = "openrlhf", "april's carry in the checkpoint"


class OpenRLHFRollouts:
    """Makes the training batches of one OpenRLHF trainer.

    Args:
        tokenizer: the trainer's tokenizer, or processor for a vision model.
        actors: Ray handles of the engine actors.
        open_engines: coroutine function that makes an engine like :class:`OpenRLHFEngine` for each of the actors.
    """

    def __init__(
        self, args: Any, config: Config, tokenizer: Any, actors: Sequence[Any], *,
        open_engines: Callable[[Sequence[Any]], Any] = connect, check: bool = False,
    ) -> None:  # fmt: skip
        self._args, self._config, self._actors = args, config, actors
        self._images = PromptImages(tokenizer, config.images) if args.data.max_images_per_prompt else None
        self._tokenizer = tokenizer if self._images is None else self._images.tokenizer
        self._open_engines, self._check = open_engines, check
        self._engines: list[Any] = []
        self.scheduler: RolloutScheduler | None = None
        """april's scheduler; None before the first batch and after :meth:`close`."""
        self.batch: Batch | None = None
        self.ledger: dict[str, Ledger] = {}
        """april's counts of prompts and tokens (delivered, dropped, held) at the end of the run; empty before."""
        self._prompts = OpenRLHFPrompts(self._encode, None if self._images is None else self._images.kept)
        self._scored: Held = {}
        self._agents = Agents(args, self._tokenizer, self._scored) if args.train.agent_func_path else None
        self._rows: Iterator[Any] | None = None
        self._kept = KeptSamples(self._scored)
        self._saved: dict[str, Any] | None = None
        self._pushes = 0
        self._handing_over = threading.Lock()
        """Lock held during a weight transfer, so that :meth:`close` waits for its end."""

    @property
    def continuous(self) -> bool:
        """True if generation continues between two batches."""
        return self._config.generation is GenerationMode.CONTINUOUS

    @property
    def _has_rewards(self) -> bool:
        """True if an agent, function or server gives rewards; False if the trainer's reward model gives them later."""
        return bool(self._args.reward.remote_url or self._agents)

    # ---------------------------------------------------------------- a step

    def next(self, rows: Iterator[Any]) -> tuple[list[dict[str, Any]], int, bool]:
        """Return the next batch, the number of prompts drawn for it, and True if the episode is over.

        ``rows`` is the loader's iterator for the current episode. Responses have the form of OpenRLHF's executor.
        """
        begins = rows is not self._rows
        if begins:
            self._rows = rows
            self._prompts.begin(rows)
        if self.scheduler is None:
            self.scheduler = self._open()
        elif begins:
            self.scheduler.extend(self._prompts)
        if not self.continuous:
            self._follow_weights()
        before = self._prompts.carried.drawn
        try:
            batch = self.scheduler.next_batch()
        except DataExhausted:
            self._rows = None  # a loader with worker processes reuses its iterator for the next episode
            return [], self._prompts.carried.drawn - before, True
        self.batch = batch
        of_images = {} if self._images is None else {"inputs_of": self._images.inputs_of}
        responses = list(responses_of(batch, self._scored, with_rewards=self._has_rewards, **of_images))
        for sample in batch.samples:
            self._scored.pop(sample.id, None)
        self._kept.forget_dropped(self.scheduler.held_groups())
        metrics = {name: round(value, 4) for name, value in batch.metrics.items()}
        log.info("april: batch %d under weights %s: %s", batch.id, batch.version, metrics)
        return responses, self._prompts.carried.drawn - before, False

    def _follow_weights(self) -> None:
        """Report each weight transfer since the last step to the scheduler."""
        assert self.scheduler is not None
        now = self._updates_of_engines()
        while self._pushes < now:
            # the engines have the weights already, but must drop KV caches of the old weights
            self.scheduler.weight_update(transfer=lambda: None)
            self._pushes += 1

    def hand_over(self, transfer: Callable[[], None]) -> None:
        """Run ``transfer``, which sends weights to the engines; the oldest batch in training then counts as trained.

        Continuous generation is paused during the transfer. May be called in another thread than :meth:`next`. Raises
        RolloutError unless all engines got the weights, EngineError if an engine does not resume.
        """
        if not self.continuous:
            transfer()
            return
        with self._handing_over:
            if self.scheduler is None:  # before the first batch, or after the last one
                transfer()
            else:
                self.scheduler.weight_update(transfer=transfer)
                self._pushes = self._updates_of_engines()

    def _updates_of_engines(self) -> int:
        async def all_engines() -> list[int]:
            return list(await asyncio.gather(*(engine.pushes() for engine in self._engines)))

        counts = asyncio.run(all_engines())
        if len(set(counts)) > 1:
            raise RolloutError(
                f"the engines got weights {counts} times: one of them was restarted, or a transfer failed; restart the "
                "run from its checkpoint"
            )
        return counts[0]

    # ---------------------------------------------------------------- the scheduler

    def _open(self) -> RolloutScheduler:
        self._engines = asyncio.run(self._open_engines(self._actors))
        self._pushes = self._updates_of_engines()
        filters = bool(self._args.algo.dynamic_filtering_enable)
        scheduler = RolloutScheduler(
            self._config, prompts=self._prompts, engines=self._engines, tokenizer=self._tokenizer, check=self._check,
            reward=self._reward if self._has_rewards else None, filter=self._in_range if filters else None,
            rollout=single_turn if self._agents is None else self._agents.rollout,
            processor=None if self._images is None else self._images.processor,
        )  # fmt: skip
        if self._saved is not None:
            with closing_on_error(scheduler.close):
                self._restore(scheduler, self._saved)
            self._saved = None
        if not self._config.leaves_partials and not self._config.tail_batching:
            log.warning(
                "april runs without over-sampling, so every step waits for its longest response; set "
                "--april.over_sampling_batch_size above --rollout.batch_size"
            )
        return scheduler

    def _encode(self, text: str, whole: bool) -> list[int]:
        if whole:  # cutting could remove the tokens of an image
            return list(self._tokenizer(text=text, add_special_tokens=False)["input_ids"])
        return prompt_ids(self._tokenizer, text, self._args.data.max_len, self._args.rollout.max_new_tokens)

    async def _reward(self, prompt: Prompt, response: Response) -> float:
        """Return a reward from the agent, or from an engine's actor, where OpenRLHF has loaded the reward function."""
        if self._agents is not None:
            return self._scored[response.sample_id].reward
        engine = self._engines[(response.sample_id.group + response.sample_id.index) % len(self._engines)]
        query = judged_text(self._tokenizer, prompt, response)
        answer = await engine.judge(query, prompt.data["prompt"], prompt.data["label"])
        scored = self._scored[response.sample_id] = RewardResult.of(answer)
        return scored.reward

    def _in_range(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        """Return True if a group's mean score is within ``--algo.dynamic_filtering_range`` (OpenRLHF's filter)."""
        low, high = self._args.algo.dynamic_filtering_range
        scores = [self._scored[response.sample_id].score for response in responses]
        return bool(low < sum(scores) / len(scores) < high)

    def close(self) -> None:
        """Close the scheduler; unfinished samples that are in no checkpoint are lost."""
        with self._handing_over:
            scheduler, self.scheduler = self.scheduler, None
        if scheduler is None:
            return
        try:
            self.ledger = scheduler.ledger()
            log.info("april: at the end, %s", self.ledger)
        finally:
            scheduler.close()

    # ---------------------------------------------------------------- checkpoints

    def save(self, loader_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the loader's state, with april's state of the same moment. The last batch counts as trained.

        april's state is packed into a uint8 tensor, which prints short: OpenRLHF logs every state that it loads.
        """
        if self.scheduler is None:
            return loader_state()
        through = None if self.batch is None else self.batch.id
        state = self.scheduler.state_dict(through)
        theirs, drawn = self._prompts.save(state["prompts"]["position"], loader_state)
        groups = {group["id"] for group in saved_groups(state)}
        scored = {i: s for i, s in self._scored.copy().items() if i.group in groups}
        content = {
            "state": state, "prompts": drawn,
            "scored": [[*i, s.reward, s.score, s.logs, s.behind, s.ranges, s.truncated] for i, s in scored.items()],
        }  # fmt: skip
        import torch

        return {**theirs, KEY: torch.frombuffer(bytearray(pack(KIND, content)), dtype=torch.uint8)}

    def load(self, saved: Any) -> bool:
        """Unpack a saved state, to restore it at the next batch. Returns True if its episode had ended."""
        if saved is None:
            log.warning(
                "the checkpoint was written without april, so it has no unfinished samples, and april starts new ones"
            )
            return False
        with checkpoint_errors(CARRY):
            data = np.asarray(saved, np.uint8).tobytes()
        self._saved = unpack(KIND, data, "the loader's state")
        return bool(self._saved["prompts"]["ended"])

    def _restore(self, scheduler: RolloutScheduler, saved: dict[str, Any]) -> None:
        with checkpoint_errors(CARRY):
            self._prompts.restore(saved["state"]["prompts"]["position"], saved["prompts"])
            self._scored |= {SampleId(group, index): RewardResult(*said) for group, index, *said in saved["scored"]}
        scheduler.load_state_dict(saved["state"], transfer=lambda: None)  # the trainer has already loaded the weights
