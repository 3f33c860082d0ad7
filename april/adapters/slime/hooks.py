"""Wraps slime's reward functions, sample hooks and dynamic filter as callbacks of april's scheduler.

The functions run on slime's own event loop, to which its HTTP sessions belong.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

from april.adapters.slime.framework import Framework
from april.adapters.slime.samples import Groups, Held, fill
from april.core.types import Prompt
from april.core.value_checks import float32_reward, wrong_reward
from april.driver.rewards import Response
from april.errors import RolloutError


class SlimeHooks:
    """Loads the hooks that ``args`` names and calls them; ``held`` keeps the scored samples until delivery.

    ``finished`` holds the samples that a custom generate function made; None if april makes them from responses.
    """

    def __init__(self, args: Any, framework: Framework, groups: Groups, finished: Held | None = None) -> None:
        self._args, self._framework, self._groups, self._finished = args, framework, groups, finished
        self.held: Held = {}
        self.dropped: Counter[str] = Counter()
        """Number of groups that the filter has rejected since the last batch, by reason."""
        self.judged: list[list[Any]] = []
        """Groups scored since the last batch, with rejected groups; only for --rollout-all-samples-process-path."""
        self._remaining = 0
        path = getattr(args, "dynamic_sampling_filter_path", None)
        self._filter = framework.load_function(path) if path else None
        self._keeps_judged = bool(getattr(args, "rollout_all_samples_process_path", None))
        self.has_filter = self._filter is not None or self._keeps_judged
        self._has_hooks = bool(getattr(args, "rollout_sample_hook_path", None))
        for path in (args.custom_rm_path, *(getattr(args, "rollout_sample_hook_path", None) or ())):
            if path:
                framework.load_function(path)  # reports a wrong path before anything runs

    def begin(self) -> None:
        """Reset the filter's count of remaining groups at the start of a rollout."""
        self._remaining = self._args.over_sampling_batch_size or self._args.rollout_batch_size

    def drain(self) -> tuple[Counter[str], list[list[Any]]]:
        """Return ``dropped`` and ``judged`` since the last call, and clear both."""
        dropped, self.dropped = self.dropped, Counter()
        judged, self.judged = self.judged, []
        return dropped, sorted(judged, key=lambda group: group[0].index)

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """Return the reward of a response, from slime's ``async_rm`` unless its sample already has one."""
        sample = await self._apply_hooks(self._sample(prompt, response))
        if sample.reward is None:
            sample.reward = await self._framework.on_its_loop(
                self._framework.get("rollout.rm_hub.async_rm")(self._args, sample)
            )
        self.held[response.sample_id] = sample
        return self._value(sample)

    async def group_reward(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """Return the rewards of a group (``--group-rm``), from slime's ``batched_async_rm``."""
        samples = [await self._apply_hooks(self._sample(prompt, response)) for response in responses]
        rewards = await self._framework.on_its_loop(
            self._framework.get("rollout.rm_hub.batched_async_rm")(self._args, samples)
        )
        if len(rewards) != len(samples):
            raise RolloutError(f"the group reward returned {len(rewards)} rewards for {len(samples)} samples")
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
        self.held.update(zip((r.sample_id for r in responses), samples, strict=True))
        return [self._value(sample) for sample in samples]

    async def filter(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        """Return True if ``--dynamic-sampling-filter-path`` keeps the group; count the reason if it does not."""
        group = [self.held[r.sample_id] for r in responses]
        if self._keeps_judged:
            self.judged.append(group)
        if self._filter is None:
            return True

        async def judge() -> Any:
            return self._framework.get("rollout.filter_hub.base_types.call_dynamic_filter")(
                self._filter, self._args, group
            )

        verdict = await self._framework.on_its_loop(judge())
        target = self._args.rollout_batch_size
        if verdict.keep or (getattr(verdict, "keep_when_insufficient", False) and self._remaining <= target):
            return True
        self.dropped[str(verdict.reason or "rejected")] += 1
        self._remaining -= 1
        if self._remaining < target:  # here slime would submit further groups
            self._remaining += self._args.over_sampling_batch_size or target
        return False

    def _sample(self, prompt: Prompt, response: Response) -> Any:
        if self._finished is not None:
            # a copy, because hooks change the sample, and run again if the reward fails and is tried again
            return copy.deepcopy(self._finished[response.sample_id])
        sample = self._groups.begin(prompt, response.sample_id)
        text = response.text(special_tokens=not self._args.rollout_skip_special_tokens)
        if response.output is not None:  # pass the agent's result on to the reward function
            sample.metadata = {**(sample.metadata or {}), "output": response.output}
        prompt_ids = response.conversations[0].prompt_ids if response.conversations else prompt.token_ids
        return fill(sample, prompt_ids, response.tokens, response.logprobs, response.loss_mask, response.finish, text)

    async def _apply_hooks(self, sample: Any) -> Any:
        if not self._has_hooks:
            return sample
        apply = self._framework.get("rollout.sample_hooks.apply_rollout_sample_hooks")
        return await self._framework.on_its_loop(apply(self._args, sample, evaluation=False))

    def _value(self, sample: Any) -> float:
        key = self._args.reward_key
        value = sample.reward[key] if key else sample.reward
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RolloutError(
                f"the reward of sample {sample.index} is {value!r}, which is not a number; if there are several, "
                "choose one with --reward-key"
            ) from None
        if wrong_reward(number) is None:  # round, so that slime's filter sees the same number as april's batch
            number = float32_reward(number)
            sample.reward = {**sample.reward, key: number} if key else number
        return number
