"""Engines as processes of their own, in a whole run: one is killed at work, and comes back at its port."""

from __future__ import annotations

import numpy as np
from served_lives import logprobs_of, says
from served_process import ServedProcess

import april


def test_a_server_that_is_killed_at_work_costs_no_token() -> None:
    """Its requests go on elsewhere; it gets the present weights when it is back, and works again."""
    processes = [ServedProcess("true") for _ in range(2)]
    urls = [process.wait() for process in processes]
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=4, over_sampling_batch_size=8, max_response_len=60,
        generation="continuous", engine={"kind": "april", "urls": urls, "api_key": "key", "interval_s": 0.05},
    )  # fmt: skip
    prompts = [[5, 1 + i % 900, 7 + i // 900] for i in range(4000)]
    named, killed = {(0, 0): "start"}, urls[1].removeprefix("http://")
    back = 0
    try:
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0, check=True) as rollouts:
            for step in range(200):
                batch = rollouts.next_batch()
                for sample in batch.samples:
                    expected, at = says(sample.prompt.token_ids, sample.id, 60), 0
                    assert np.array_equal(sample.tokens, expected)
                    for s in sample.segments:
                        part = slice(at, at := at + s.count)
                        assert np.array_equal(sample.logprobs[part], logprobs_of(sample.tokens[part], named[s.version]))
                        back += step > 4 and s.engine == killed and s.version.n > 4
                if step == 3:
                    processes[1].kill()
                    processes[1] = ServedProcess("true", port=int(urls[1].rsplit(":", 1)[1]))
                    processes[1].wait()
                if back:
                    break
                path = f"weights://{step}"
                named[rollouts.weight_update(path)] = path
            ledger = rollouts.ledger()["tokens"]
    finally:
        for process in processes:
            process.kill()
    assert back, "it never worked again"
    assert ledger.balanced
    assert not sum(ledger.dropped.values())
