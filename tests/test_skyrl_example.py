"""The example for SkyRL: a generator that its fully asynchronous trainer asks for groups while weights change.

SkyRL needs a newer Python than the tests, so the few names that the example takes from SkyRL are stood in for.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KNOWN, ServerThread

import april
from tests.adapters import modules

EXAMPLE = Path(__file__).parent.parent / "examples" / "skyrl" / "generator.py"
ROLES, BEGIN = {"user": 3, "assistant": 4}, 5
COLUMNS = ("prompts", "env_classes", "env_extras")
GROUPS, SAMPLES, WORKERS = 12, 3, 4


class GeneratorInterface:
    """As SkyRL's."""


@dataclass
class BatchMetadata:
    """As SkyRL's."""

    global_step: int
    training_phase: str


class Words:
    """A tokenizer whose words are numbers; its template writes the role before each message."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> list[int]:
        ids = [t for m in messages for t in (ROLES[m["role"]], *(int(word) for word in m["content"].split()))]
        return [*ids, BEGIN, ROLES["assistant"]] if add_generation_prompt else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class Game:
    """An environment of two turns: each is worth the number of its even tokens."""

    closed = 0

    def __init__(self, env_class: str, env_config: Any, extras: dict[str, Any]) -> None:
        assert (env_class, extras["max_turns"], env_config) == ("game", 2, {"level": 1})
        self._bonus, self._turns = float(extras["bonus"]), 0

    def init(self, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return [*messages, {"role": "user", "content": "9"}], {}

    def step(self, text: str) -> dict[str, Any]:
        self._turns += 1
        even = sum(int(word) % 2 == 0 for word in text.split())
        observations = [{"role": "user", "content": "77 78"}]
        return {"reward": even + self._bonus, "done": self._turns == 2, "observations": observations}

    def close(self) -> None:
        Game.closed += 1


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    found = modules({
        "skyrl_gym": {"make": Game},
        "skyrl.train.generators.base": {
            "GeneratorInterface": GeneratorInterface, "GeneratorInput": dict, "GeneratorOutput": dict,
        },
        "skyrl.train.generators.utils": {
            "encode_messages_subset": lambda messages, tokenizer: tokenizer.apply_chat_template(
                messages, add_generation_prompt=False
            )
        },
    })  # fmt: skip
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("skyrl_generator", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def config(*servers: FakeVllmServer) -> Any:
    """SkyRL's settings."""
    sampling = SimpleNamespace(max_generate_length=60, temperature=1.0)
    engine = SimpleNamespace(external_server_urls=[server.url for server in servers])
    return SimpleNamespace(
        generator=SimpleNamespace(
            n_samples_per_prompt=SAMPLES, sampling_params=sampling, max_input_length=400, inference_engine=engine,
            max_turns=2,
        ),
        trainer=SimpleNamespace(fully_async=SimpleNamespace(num_parallel_generation_workers=WORKERS)),
        environment=SimpleNamespace(skyrl_gym=SimpleNamespace(game={"level": 1})),
    )  # fmt: skip


class Client:
    """SkyRL's inference client; an update gives the servers other weights while they are paused."""

    def __init__(self, *servers: FakeVllmServer) -> None:
        self.servers = servers
        self.paused = self.updates = 0

    async def pause_generation(self, clear_cache: bool = False) -> None:
        self.paused += 1

    async def resume_generation(self) -> None:
        self.paused -= 1

    async def update(self) -> None:
        await self.pause_generation()
        assert not any(server.open_requests for server in self.servers)
        self.updates += 1
        for server in self.servers:
            server.weights = f"w{self.updates}"
            server.stale_cache = False
        await self.resume_generation()


def asked(group: int, phase: str = "train") -> dict[str, Any]:
    """What SkyRL asks for one group."""
    n = SAMPLES if phase == "train" else 1
    return {
        "prompts": [[{"role": "user", "content": f"{20 + group} 21"}]] * n, "env_classes": ["game"] * n,
        "env_extras": [{"bonus": group} for _ in range(n)], "sampling_params": {}, "trajectory_ids": None,
        "batch_metadata": BatchMetadata(0, phase),
    }  # fmt: skip


def check(output: dict[str, Any], group: int, samples: int) -> None:
    """Every list has an entry per trajectory; environment tokens carry no loss; the reward is the environment's."""
    assert len(output["response_ids"]) == samples
    for i, (ids, mask) in enumerate(zip(output["response_ids"], output["loss_masks"], strict=True)):
        assert output["prompt_token_ids"][i] == [3, 20 + group, 21, 3, 9, BEGIN, 4]
        assert len(ids) == len(mask) == len(output["rollout_logprobs"][i])
        between = [token for token, trained in zip(ids, mask, strict=True) if not trained]
        assert between in ([], [3, 77, 78, BEGIN, 4])
        even = sum(token % 2 == 0 for token, trained in zip(ids, mask, strict=True) if trained)
        assert output["rewards"][i] == even + group * (2 if between else 1)
        assert all(p < 0 for p, trained in zip(output["rollout_logprobs"][i], mask, strict=True) if trained)
        assert output["stop_reasons"][i] in ("stop", "length")


async def run(example: ModuleType, *servers: FakeVllmServer) -> None:
    client, Game.closed = Client(*servers), 0
    settings = example.config_of(config(*servers))
    settings = settings.model_copy(update={"engine": settings.engine.model_copy(update=KNOWN)})
    generator = example.AprilGenerator(config(*servers), Words(), client, settings, check=True)
    groups, finished = iter(range(GROUPS)), list[int]()

    async def worker() -> None:
        for group in groups:
            check(await generator.generate(asked(group), disable_tqdm=True), group, SAMPLES)
            finished.append(group)
            if len(finished) in (2, 4, 6):
                await client.update()

    try:
        await asyncio.gather(*(worker() for _ in range(WORKERS)))
        assert sorted(finished) == list(range(GROUPS))
        check(await generator.generate(asked(3, "eval")), 3, 1)
        with pytest.raises(ValueError, match="4 trajectories, which are no groups of 3"):
            await generator.generate({**asked(3), **{name: asked(3)[name] + asked(4)[name][:1] for name in COLUMNS}})
        ledger = generator.rollouts.ledger()["tokens"]
        assert ledger.balanced
        assert generator.rollouts.version.n == 3
    finally:
        await asyncio.to_thread(generator.close)
    assert Game.closed >= GROUPS * SAMPLES + 1


def test_groups_are_made_while_weights_change(example: ModuleType) -> None:
    """Each call gets its own group; an update finds no request of april's at the servers, and nothing is lost."""
    servers = FakeVllmServer(max_running=4, turns=2), FakeVllmServer(max_running=4, turns=2)
    with ServerThread(*servers):
        asyncio.run(run(example, *servers))


def test_an_error_ends_every_call(example: ModuleType) -> None:
    """SkyRL hears why, at once."""

    async def ask() -> None:
        generator = example.AprilGenerator(config(server), Words(), Client(server), settings)
        try:
            calls = [generator.generate({**asked(group), "env_classes": ["chess"] * SAMPLES}) for group in (1, 2)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await asyncio.to_thread(generator.close)
        assert all(isinstance(answer, april.RolloutError) for answer in answers)

    server = FakeVllmServer(max_running=4)
    with ServerThread(server):
        settings = example.config_of(config(server))
        settings = settings.model_copy(update={"engine": settings.engine.model_copy(update=KNOWN)})
        asyncio.run(ask())
