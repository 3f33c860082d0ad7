"""The switch: april's classes stand where OpenRLHF looks for its own, in both trainers, and the rest is OpenRLHF's."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_async_llm import FakeAsyncLLM, install_vllm
from real_schedulers import assert_nothing_is_left

from adapters.openrlhf_stand_in import ROWS, SAMPLES, Engine, installed, namespace, row
from april.adapters import openrlhf as launcher
from april.adapters.openrlhf.rollouts import Rollouts
from april.errors import RolloutError

SETTINGS = {"over_sampling_batch_size": 8}


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    with installed() as made:
        yield made
    assert_nothing_is_left()


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With april's settings among the flags, as the switch puts them there."""
    args = namespace()
    args.april = SETTINGS
    return SimpleNamespace(args=args)


def engines_are_engines(actors: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Simulated engines in place of engine actors."""
    engines = [Engine("e0"), Engine("e1")]

    async def opened(handles: Any) -> Any:
        return handles

    monkeypatch.setattr(actors, "Rollouts", lambda *args: Rollouts(*args, open_engines=opened, check=True))
    return engines


def test_the_synchronous_trainer(modules: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's own loop trains april's batches, each prompt once; evaluations stay its own; a checkpoint goes on."""
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    trainer = actors.AprilPPOTrainer(strategy, engines_are_engines(actors, monkeypatch))
    trainer.fit()

    trained = [sample.label for batch in trainer.trained for sample in batch]
    assert Counter(trained) == Counter({row(i)[1]: SAMPLES for i in range(ROWS)})
    assert trainer.samples_generator.stock_calls == len(trainer.trained) == ROWS // 4
    assert trainer.samples_generator.april.ledger["prompts"].held == 0

    again = actors.AprilPPOTrainer(strategy, engines_are_engines(actors, monkeypatch))
    again.start = trainer.checkpoints[2]
    again.fit()
    before = [sample.label for batch in trainer.trained[:3] for sample in batch]
    after = [sample.label for batch in again.trained for sample in batch]
    assert Counter(before + after) == Counter({row(i)[1]: SAMPLES for i in range(ROWS)})


def test_the_asynchronous_trainer(modules: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves are april's, in the processes where they are made; all prompts are trained once."""
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    trainer = actors.AprilPPOTrainerAsync(strategy, engines_are_engines(actors, monkeypatch))
    generator, training = trainer.generator_actor.object_, trainer.trainer_actor.object_
    assert isinstance(generator, actors.AprilGenerateSamplesActor)
    assert isinstance(training, actors.AprilTrainingActor)
    trainer.fit()
    trainer.kill()
    trained = [sample.label for batch in training.trained for sample in batch]
    assert Counter(trained) == Counter({row(i)[1]: SAMPLES for i in range(ROWS)})
    assert not generator.samples_generator.stock_calls


def test_another_number_of_prompts(modules: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """N is that of the flags."""
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    trainer = actors.AprilPPOTrainer(strategy, engines_are_engines(actors, monkeypatch))
    trainer.samples_generator._dataloader_iter = rows = iter(())
    with pytest.raises(RolloutError, match="OpenRLHF asked for 5 prompts"):
        trainer.samples_generator._generate_vllm(rows, 5, False)


@pytest.mark.asyncio
async def test_the_engine_actor(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts whole transfers, refuses those that come while requests run, and asks for rewards as OpenRLHF does."""
    install_vllm(monkeypatch)
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    actor = actors.AprilRolloutRayActor.__new__(actors.AprilRolloutRayActor)
    llm = FakeAsyncLLM(mode="processed_logprobs")
    await actor.__init__(llm)
    assert await actor.update_weight("a", "bf16", (1,)) == "written"
    assert actor.april_pushes() == 0
    await actor.update_weight("b", "bf16", (1,), empty_cache=True)
    await actor.update_weight_cuda_ipc("b", "bf16", (1,), {}, empty_cache=True)
    assert (actor.april_pushes(), actor.written) == (2, ["a", "b", "b"])
    assert await actor.april_update_weights([0, 2]) == ("ok", None)
    assert (await actor.april_health())[0]
    assert actor.april_capabilities()["max_context"] == 1000
    await actor.april_abort(["unknown"])

    assert await actor.april_judge("q", "p", "l") == {"rewards": 2.0}
    actor.executor.reward_func = lambda *lists: {"rewards": lists}
    assert await actor.april_judge("q", "p", "l") == {"rewards": (["q"], ["p"], ["l"])}
    assert llm.output_handler is not None
    llm.output_handler.cancel()


def test_the_switch(modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """OpenRLHF's own command runs, with its own flags, on april's classes; april's settings travel with them."""
    ran: dict[str, Any] = {}

    def command(name: str, run_name: str, alter_sys: bool) -> None:
        args = namespace()
        ran.update(name=name, argv=sys.argv[1:], strategy=modules["openrlhf.utils"].get_strategy(args))

    monkeypatch.setattr(runpy, "run_module", command)
    monkeypatch.setattr(sys, "argv", ["x"])
    launcher.main(["--train.seed", "1", "--april.over_sampling_batch_size", "8", "--help"])

    assert (ran["name"], ran["argv"]) == ("openrlhf.cli.train_ppo_ray", ["--train.seed", "1", "--help"])
    assert ran["strategy"].args.april == {"over_sampling_batch_size": 8}
    assert "--april.config FILE" in capsys.readouterr().out
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    for path, cls in (
        ("ppo_trainer.PPOTrainer", actors.AprilPPOTrainer),
        ("ppo_trainer_async.PPOTrainerAsync", actors.AprilPPOTrainerAsync),
        ("ray.vllm_engine.RolloutRayActor", actors.AprilRolloutRayActor),
    ):
        module, _, name = path.rpartition(".")
        actor = getattr(modules[f"openrlhf.trainer.{module}"], name)
        assert actor.__ray_metadata__.modified_class.__ray_actor_class__ is cls
    assert actor.options_["max_concurrency"] > 10_000  # an abort must never wait for a place


def test_a_refusal_ends_the_command(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, when OpenRLHF has parsed its flags."""

    def command(*args: Any, **kwargs: Any) -> None:
        modules["openrlhf.utils"].get_strategy(namespace(rollout__top_p=0.5))

    monkeypatch.setattr(runpy, "run_module", command)
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit, match=r"april: --rollout.top_p 0.5"):
        launcher.main([])
