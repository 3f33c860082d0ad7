"""april as the generator of SkyRL's fully asynchronous trainer, which asks for groups; your servers make them.

SkyRL keeps its data loader, its environments, its bound on staleness, its weight updates and its loss. april sends the
requests to the vLLM servers that SkyRL updates: a server that dies is left out and its responses go on elsewhere with
their tokens, an update cuts requests and the new weights continue them, and every token keeps the log-probability of
the weights that wrote it. Give SkyRL the servers (``generator.inference_engine.external_server_urls``), and hand over
the generator in an entry point of your own (README.md shows one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import skyrl_gym
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import encode_messages_subset

import april


def config_of(cfg: Any) -> april.Config:
    """SkyRL's settings as april's. SkyRL bounds staleness and the number of groups, so april's own bounds are wide."""
    generator, groups = cfg.generator, cfg.trainer.fully_async.num_parallel_generation_workers
    n, sampling = generator.n_samples_per_prompt, generator.sampling_params
    return april.Config(
        rollout_batch_size=1,  # each group is delivered as soon as it is finished
        n_samples_per_prompt=n,
        max_in_flight=groups * n,
        max_staleness=groups,
        generation="continuous",
        on_data_end="wait",
        on_failed_sample="replace",
        max_response_len=generator.max_input_length + sampling.max_generate_length,
        sampling={"temperature": sampling.temperature},
        engine={"kind": "vllm", "urls": list(generator.inference_engine.external_server_urls)},
    )


class AprilGenerator(GeneratorInterface):  # type: ignore[misc]
    """Answers ``generate`` by a RolloutScheduler whose prompts are what SkyRL asks for.

    Args:
        cfg: SkyRL's configuration.
        tokenizer: tokenizer of the policy.
        client: SkyRL's inference client, which pauses the servers for each weight update.
        config: april's settings; None means those of :func:`config_of`.
        others: further arguments of :class:`april.RolloutScheduler`.
    """

    def __init__(
        self, cfg: Any, tokenizer: Any, client: Any, config: april.Config | None = None, **others: Any
    ) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.config = config_of(cfg) if config is None else config
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Sequence[april.DeliveredSample]]] = {}
        """Groups that SkyRL waits for, by the number of their prompt."""
        self._delivering: asyncio.Task[None] | None = None
        self.rollouts = april.RolloutScheduler(
            self.config, prompts=[], rollout=self.episode, reward=lambda prompt, response: response.output,
            tokenizer=tokenizer, progress=False, **others,
        )  # fmt: skip
        self._follow_updates(client)

    def _follow_updates(self, client: Any) -> None:
        """Let april end its requests before SkyRL pauses the servers, and count a new version when SkyRL resumes."""
        pause, resume = client.pause_generation, client.resume_generation

        async def pause_generation(*args: Any, **kwargs: Any) -> Any:
            await self.rollouts.apause()
            return await pause(*args, **kwargs)

        async def resume_generation() -> Any:
            answer = await resume()
            await self.rollouts.aweight_update(transfer=lambda: None)  # the servers have the weights already
            await self.rollouts.aresume()
            return answer

        client.pause_generation, client.resume_generation = pause_generation, resume_generation

    async def episode(self, prompt: april.Prompt, llm: april.LLM) -> float:
        """Run one trajectory in its environment of SkyRL-Gym and return its reward, summed over the turns."""
        task, total = prompt.data, 0.0
        extras = {**task["extras"], "max_turns": self.cfg.generator.max_turns}
        settings = getattr(self.cfg.environment.skyrl_gym, task["env_class"], {})
        environment = await asyncio.to_thread(skyrl_gym.make, task["env_class"], env_config=settings, extras=extras)
        messages, _ = await asyncio.to_thread(environment.init, task["conversation"])
        template = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        tokens = self.tokenizer.apply_chat_template(messages, **template)
        start = len(self.tokenizer.apply_chat_template(messages, **template | {"add_generation_prompt": False}))
        turn = tokens[start:]  # what the template writes where the model's turn begins
        try:
            while True:
                said = await llm.generate(tokens, max_tokens=self.cfg.generator.sampling_params.max_generate_length)
                text = self.tokenizer.decode(said.tokens.tolist(), skip_special_tokens=True)
                step = await asyncio.to_thread(environment.step, text)
                total += float(step["reward"])
                if step["done"] or said.finish is april.FinishReason.LENGTH:
                    return total
                tokens = [*said.conversation, *encode_messages_subset(step["observations"], self.tokenizer), *turn]
        finally:
            await asyncio.to_thread(environment.close)

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return a trajectory for each that SkyRL asks for, in the same order."""
        columns = zip(
            input_batch["prompts"], input_batch["env_classes"], input_batch["env_extras"] or [{}], strict=True
        )
        tasks = [{"conversation": list(p), "env_class": name, "extras": dict(extras)} for p, name, extras in columns]
        metadata = input_batch.get("batch_metadata")
        if metadata is not None and metadata.training_phase == "eval":
            answers = (await self.rollouts.aevaluate(tasks)).responses
            return output_of([(a.conversations[0].prompt_ids, a, a.output) for (a,) in answers])
        n = self.config.n_samples_per_prompt
        if len(tasks) % n:
            raise ValueError(f"SkyRL asked for {len(tasks)} trajectories, which are no groups of {n}")
        groups = [self._ask(task) for task in tasks[::n]]
        if self._delivering is None or self._delivering.done():
            self._delivering = asyncio.create_task(self._deliver())
        samples = [sample for group in await asyncio.gather(*groups) for sample in group]
        return output_of([(sample.prompt.token_ids, sample, sample.reward) for sample in samples])

    def _ask(self, task: dict[str, Any]) -> asyncio.Future[Sequence[april.DeliveredSample]]:
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.rollouts.extend([{"number": number, **task}])
        return self._asked[number]

    async def _deliver(self) -> None:
        """Hand each finished group to the call that waits for it; an error ends all calls."""
        try:
            while self._asked:
                batch = await self.rollouts.anext_batch()
                self.rollouts.commit(batch.id)  # from here on SkyRL keeps the group
                group = sorted(batch.samples, key=lambda sample: sample.id.index)
                self._asked.pop(group[0].prompt.data["number"]).set_result(group)
        except Exception as error:
            for waiting in self._asked.values():
                waiting.set_exception(error)
            self._asked.clear()

    def close(self) -> None:
        """Close the scheduler."""
        self.rollouts.close()


def output_of(rows: Sequence[tuple[Any, Any, float]]) -> GeneratorOutput:
    """Return (prompt, response, reward) of each trajectory in SkyRL's form."""
    length = april.FinishReason.LENGTH
    return GeneratorOutput(
        prompt_token_ids=[prompt.tolist() for prompt, _, _ in rows],
        response_ids=[response.tokens.tolist() for _, response, _ in rows],
        rewards=[reward for _, _, reward in rows],
        loss_masks=[response.loss_mask.tolist() for _, response, _ in rows],
        stop_reasons=["length" if response.finish is length else "stop" for _, response, _ in rows],
        rollout_logprobs=[response.logprobs.tolist() for _, response, _ in rows],
        rollout_metrics=None,
        rollout_expert_indices=None,
    )  # fmt: skip
