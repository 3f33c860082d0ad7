"""april in a loop of one's own: GRPO on a tiny language model, 20 steps, in about a minute on a CPU.

The model, the task and the update are those of ``april demo``; replace them by yours. What april adds are the
lines inside ``with``. Run: ``python examples/own_loop.py``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import april
from april.demo import task
from april.demo.arm import grpo_batch
from april.demo.grpo import GrpoTrainer
from april.demo.warmup import warm_up
from april.driver.rewards import Response


def prompts() -> Iterator[april.Prompt]:
    """An endless stream; a list or a data loader's iterator will do as well."""
    for index in itertools.count():
        yield april.Prompt(task.prompt_ids(seed=0, index=index))


async def reward(prompt: april.Prompt, response: Response) -> float:
    """1 if the answer is right. A plain function works too (it runs in a thread)."""
    return task.reward(prompt.token_ids, response.tokens)


def main() -> None:
    """Train and print one line per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up-steps", type=int, default=None)
    options = parser.parse_args()
    model = warm_up(0) if options.warm_up_steps is None else warm_up(0, steps=options.warm_up_steps)
    trainer = GrpoTrainer(model)
    config = april.Config(
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        over_sampling_batch_size=16,
        max_response_len=task.RESPONSE_CAP,
        max_in_flight=64,
    )
    with april.RolloutScheduler(config, prompts=prompts(), reward=reward, model=model) as rollouts:
        for step in range(options.steps):
            batch = rollouts.next_batch()
            trainer.update(grpo_batch(batch.samples, batch.rewards, config.n_samples_per_prompt))
            rollouts.weight_update()
            print(
                f"step {step}: reward {batch.rewards.mean():.2f}, {int(batch.lengths.sum())} tokens, longest "
                f"{batch.lengths.max()}, {batch.off_policy_share:.0%} from older weights"
            )
        print(rollouts)


if __name__ == "__main__":
    main()
