"""The real scheduler over OpenAI-compatible servers: aborts, weight updates, faults; ledger and versions exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

import numpy as np
import pytest
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.openai import FakeOpenAIServer, serving_openai
from openai_servers import PATIENCE_S
from real_schedulers import assert_nothing_is_left, endless, reward

import april
from april.driver.rewards import Response
from april.engines.openai.wire import TokenShape


class Served:
    """A server on a loop of its own, as a process of its own would be."""

    def __init__(self, server: FakeOpenAIServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server")
        self._context = serving_openai(server)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """On the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def reached(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """:meth:`run`, awaited on another loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def __enter__(self) -> Self:
        self._thread.start()
        self.url: str = self.run(self._enter())
        return self

    async def _enter(self) -> str:
        return await self._context.__aenter__()

    async def _exit(self) -> None:
        await self._context.__aexit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.run(self.server.until_closed())
        finally:
            self.run(self._exit())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def config(urls: list[str], **changes: Any) -> april.Config:
    engine = {"kind": "openai", "urls": urls, "vocab_size": 512, "eos_token_ids": [2], "max_len": 4096}
    values: dict[str, Any] = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 6,
        "max_response_len": 200,
        "seed": 1,
        "engine": engine | changes,
    }
    return april.Config(**values)


@pytest.mark.parametrize("shape", list(TokenShape))
def test_steps_with_aborts_and_weight_updates(shape: TokenShape) -> None:
    """Every delivered token has the log-probability of the weights that its version stands for; the ledger has every
    token of an ended stream, and of a closed one no more than were sent."""
    server = FakeOpenAIServer(shape, mean_len=60, tokens_ahead=2)
    # of the first 6 groups, those with even prompts stand still until the others have ended the step
    server.hold(1, lambda prompt: prompt[0] % 2 == 0)
    with Served(server) as served:

        async def late_reward(prompt: april.Prompt, response: Response) -> float:
            if rollouts.version.n == 0:
                await served.reached(server.until_held(6))
            return 0.0

        def transfer() -> None:
            served.run(server.until_closed())
            server.release()
            server.weights += 1

        rollouts = april.RolloutScheduler(
            config=config([served.url]), prompts=endless(), reward=late_reward, check=True
        )
        probes, delivered, continued, aborted = len(server.records), 0, 0, 0
        with rollouts:
            for _ in range(5):
                batch = rollouts.next_batch()
                aborted += int(batch.metrics["aborted_attempts"])
                for sample in batch.samples:
                    weights = sample.versions[:, 1].tolist()
                    expected = [server.logprob(t, n, {}) for t, n in zip(sample.tokens.tolist(), weights, strict=True)]
                    assert sample.logprobs.tolist() == np.array(expected, np.float32).tolist()
                    continued += len(set(weights)) > 1
                    delivered += len(sample.tokens)
                rollouts.weight_update(transfer=transfer)
            tokens = rollouts.ledger()["tokens"]
        assert continued >= 6
        assert tokens.balanced
        assert tokens.delivered == delivered
        served.run(server.until_closed())
        records = server.records[probes:]
        # of a stream that april closed, what was written to the connection may not have been read; a server that had
        # written all of it takes it for ended, and which one that was, only the client knows
        ended = sorted(record.sent for record in records if record.end != "closed")
        taken_for_ended = aborted - (len(records) - len(ended))
        assert 0 <= taken_for_ended < len(ended)
        assert sum(ended[: len(ended) - taken_for_ended]) <= tokens.observed <= sum(record.sent for record in records)
    assert_nothing_is_left()


def test_faults_cost_attempts_and_no_tokens() -> None:
    """Resets, errors inside of streams, refusals and impossible numbers: the steps go on, the books balance."""
    kinds = [
        RequestFault.BREAK_OFF,
        RequestFault.ENGINE_DIES,
        RequestFault.NAN_LOGPROB,
        RequestFault.NO_FINISH,
        RequestFault.TRUNCATED,
        RequestFault.LIMITED,
        RequestFault.FAILS,
    ]
    servers = [FakeOpenAIServer(mean_len=60), FakeOpenAIServer(mean_len=60)]
    with (
        Served(servers[0]) as one,
        Served(servers[1]) as other,
        april.RolloutScheduler(
            config=config([one.url, other.url]), prompts=endless(), reward=reward, check=True
        ) as rollouts,
    ):
        for server in servers:
            server.faults += [PlannedFault(kind) for kind in kinds]
        for _ in range(6):
            assert len(rollouts.next_batch().samples) == 6
            rollouts.weight_update(transfer=lambda: None)
        assert rollouts.ledger()["tokens"].balanced
        assert not [fault for server in servers for fault in server.faults if fault.times]
    assert_nothing_is_left()


def test_a_server_that_cannot_be_used_fails_the_start() -> None:
    """Nothing stays open, not even the connections to the server that could be used."""
    good, bad = FakeOpenAIServer(), FakeOpenAIServer(None)
    with Served(good) as one, Served(bad) as other, pytest.raises(april.ConfigError, match="gives no token ids"):
        april.RolloutScheduler(config=config([one.url, other.url]), prompts=endless(), reward=reward)
    assert_nothing_is_left()
