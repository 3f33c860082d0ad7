"""april in OpenRLHF: the rollouts before its contract, and both of its trainers with april's classes in their places.

Every prompt is settled once and every token stamped; engines go on while it trains, and only its broadcasts cut.
"""

from __future__ import annotations

import base64
import importlib
import io
import logging
import runpy
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_async_llm import FakeAsyncLLM, install_vllm
from real_schedulers import LENGTHS, VOCAB, assert_nothing_is_left
from tiny_vision import IMAGE_ID, encoded, picture, tiny_processor

from adapters.openrlhf_stand_in import GROUPS, ROWS, SAMPLES, Engine, Loader, Run, Tokenizer, installed, namespace, row
from april.adapters import openrlhf as launcher
from april.adapters.openrlhf.rollouts import OpenRLHFRollouts, TransferThread
from april.engines.attachments import attachment_bytes
from april.engines.protocol import Capabilities, Chunk, Request
from april.engines.served.wire import CallReply
from april.engines.simulated.engine import synthetic_response
from april.engines.vllm.actor import capabilities_of
from april.errors import CheckpointError, ConfigError, RolloutError
from april.serialization.own_values import unpack

SEES: dict[str, Any] = {"data__max_images_per_prompt": 2, "data__max_len": 400}
ALL = Counter(row(i)[1] for i in range(ROWS))
STEPWISE: dict[str, Any] = {"over_sampling_batch_size": 2 * GROUPS, "max_staleness": 2}
CONTINUOUS: dict[str, Any] = {**STEPWISE, "generation": "continuous"}
BOTH = pytest.mark.parametrize("settings", [STEPWISE, CONTINUOUS], ids=["stepwise", "continuous"])


@pytest.fixture(autouse=True)
def modules() -> Iterator[Any]:
    with installed() as made:
        yield made
    assert_nothing_is_left()


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9, 23])
def test_the_end_of_the_data(rows: int) -> None:
    """Whatever N does to the number of prompts: the last batch may be short, and the episode ends after it."""
    with Run(rows=rows) as run:
        run.episode()
        assert sorted(run.labels, key=int) == [row(i)[1] for i in range(rows)]
        assert len(run.responses) == rows * SAMPLES


def test_a_response_is_what_the_executor_would_have_returned() -> None:
    """Tokens, log-probabilities and masks of one length; the cut ones are as if they had not been cut."""
    with Run() as run:
        numbers: dict[int, Any] = {}
        while run.step():
            assert run.rollouts.batch is not None
            samples = run.rollouts.batch.samples
            numbers |= {id(r): s for r, s in zip(run.responses[-len(samples) :], samples, strict=True)}
    for response in run.responses:
        sample = numbers[id(response)]
        ids, (start, end) = response["observation_tokens"], response["action_ranges"][0]
        assert (start, end, len(response["action_ranges"])) == (2, len(ids), 1)
        assert " ".join(map(str, ids[:start])) == response["prompt"]
        count = min(LENGTHS.sample(*sample.id), 100)
        tokens, logprobs = synthetic_response(np.array(ids[:start], np.int32), sample.id, 0, count, VOCAB, (0,))
        assert response["truncated"] == (count == 100 and ids[-1] != 0)
        assert ids[start:-1] == tokens.tolist()[:-1]
        assert response["rollout_log_probs"] == [0.0, 0.0, *logprobs.tolist()]
        assert response["reward"] == len(ids)
        assert response["scores"] == 0.5
        assert response["images"] is response["mm_train_inputs"] is None
    assert len({tuple(sorted(r["extra_logs"])) for r in run.responses}) == 1
    assert {"words", "april/off_policy_share", "april/versions"} <= set(run.responses[0]["extra_logs"])


AGENT = str(Path(__file__).with_name("openrlhf_agent_of_a_user.py"))


def plain(response: dict[str, Any]) -> tuple[Any, ...]:
    """What OpenRLHF trains of a response."""
    return (
        response["prompt"], response["label"], tuple(response["observation_tokens"]),
        tuple(map(tuple, response["action_ranges"])), tuple(response["rollout_log_probs"]), response["truncated"],
        response["reward"], response["scores"],
    )  # fmt: skip


def test_agents_play_their_turns_and_their_rows_are_their_own() -> None:
    """Token by token what the executor returned, over cuts; its rewards and logs, and nobody else's."""
    with Run(train__agent_func_path=AGENT) as run:
        run.episode()
        assert run.rollouts._agents is not None
        executor: Any = run.rollouts._agents._executor
    assert Counter(run.labels) == ALL
    assert Counter(map(plain, run.responses)) == Counter(map(plain, executor.execute.__globals__["played"]))
    assert all(len(r["action_ranges"]) == 2 + int(r["label"]) % 2 for r in run.responses)
    assert {r["extra_logs"]["turns"] for r in run.responses} == {1.0}
    assert sum(r["extra_logs"]["april/resumes"] > 0 for r in run.responses) > 0
    assert not any(engine.judged for engine in run.engines)


def agent_named(name: str, folder: Path) -> str:
    """File of an agent whose executor is this class of the agents of a user."""
    file = folder / "agent.py"
    file.write_text(Path(AGENT).read_text() + f"\n\nAgentExecutor = {name}\n")
    return str(file)


@pytest.mark.parametrize("name", ["AgentExecutor", "TrainsTheEnd"])
def test_an_agent_goes_on_after_a_restart(name: str, tmp_path: Path) -> None:
    """Responses that were finished and not delivered keep their rewards, what stands behind them, and what their
    executor says of the tokens that are trained.
    """
    agent = agent_named(name, tmp_path)
    labels: list[str] = []
    responses: list[dict[str, Any]] = []
    played: list[dict[str, Any]] = []
    state = None
    for _ in range(2):
        with Run(train__agent_func_path=agent) as run:
            if state is None:
                run.step()
                run.step()
                state = run.loader.state_dict()
            else:
                run.loader.load_state_dict(state)
                run.episode()
            labels += run.labels
            responses += run.responses
            played += run.rollouts._agents._executor.execute.__globals__["played"]  # type: ignore[union-attr]
    assert Counter(labels) == ALL
    said = {tuple(result["observation_tokens"]): result for result in played}
    for response in responses:
        assert response["observation_tokens"][-2:] == [8, 9]
        result = said[tuple(response["observation_tokens"])]
        assert response["action_ranges"] == result["action_ranges"]
        assert response["truncated"] is result.get("truncated", False)
    assert any(r["extra_logs"]["april/resumes"] for r in responses)
    assert not run.rollouts.ledger["tokens"].dropped


def test_an_agent_may_ask_from_an_event_loop_of_its_own(tmp_path: Path) -> None:
    """As OpenRLHF's example with a server does; executors serve one response after another."""
    with Run(train__agent_func_path=agent_named("Serves", tmp_path)) as run:
        executor: Any = run.rollouts._agents._executor  # type: ignore[union-attr]
        try:
            run.episode()
        finally:
            for server in executor.servers:
                server.end()
    assert Counter(run.labels) == ALL
    assert Counter(map(plain, run.responses)) == Counter(map(plain, executor.execute.__globals__["played"]))
    assert len(executor.servers) <= 2 * GROUPS * SAMPLES < len(run.responses)


def test_an_agent_that_returns_other_tokens_is_told(tmp_path: Path) -> None:
    """And one that is no agent, before anything starts."""
    settings = {"max_failed_groups": 1, "max_attempt_failures": 1}
    run = Run(settings, train__agent_func_path=agent_named("Rewrites", tmp_path))
    with run, pytest.raises(RolloutError, match="from token 0 on"):
        run.step()
    file = tmp_path / "agent.py"
    file.write_text("nothing = 1\n")
    with pytest.raises(ConfigError, match="AttributeError: module 'agent_module' has no attribute 'AgentExecutor'"):
        Run(train__agent_func_path=str(file))


def test_rewards_see_the_whole_conversation() -> None:
    """The function is asked once per response, with prompt and label of its row."""
    with Run() as run:
        run.episode()
    asked = [call for engine in run.engines for call in engine.judged]
    assert len(asked) == ROWS * SAMPLES
    assert all(call[0].startswith(call[1]) and call[1:] == row(int(call[2])) for call in asked)
    assert all(engine.judged for engine in run.engines)


def test_without_a_reward_function_the_reward_model_is_left_to_openrlhf() -> None:
    """``reward`` is None, and nobody is asked."""
    with Run(reward__remote_url=None) as run:
        run.step()
    assert {r["reward"] for r in run.responses} == {r["scores"] for r in run.responses} == {None}
    assert not any(engine.judged for engine in run.engines)


def test_versions_follow_the_transfers() -> None:
    """One per transfer, two between steps are two, none is none; a batch says under which it was delivered."""
    with Run() as run:
        seen = []
        for pushes in (1, 0, 2, 1):
            run.step(pushes)
            assert run.rollouts.batch is not None
            seen.append(run.rollouts.batch.version.n)
        assert seen == [0, 1, 1, 3]


def test_engines_that_differ_are_named() -> None:
    """One that was started anew has old weights, and nobody may train on its tokens."""
    with Run() as run:
        run.step()
        run.engines[0].counted += 1
        with pytest.raises(RolloutError, match=r"the engines got weights \[2, 1\] times"):
            run.step()


def resumed(before: Run, saved: Any, **changes: Any) -> Run:
    """A new process that goes on from a checkpoint: the trainer puts its weights into new engines first."""
    after = Run(changes.pop("settings", None), **changes)
    after.loader.load_state_dict(saved)
    after.push()
    return after


@BOTH
@pytest.mark.parametrize("saved_at", range(1, 7))
def test_a_run_goes_on_from_its_checkpoint(saved_at: int, settings: dict[str, Any]) -> None:
    """At every step, those after the last prompt was drawn too, and while requests run: nothing lost or made twice."""
    with Run(settings) as before:
        for _ in range(saved_at):
            before.step()
        saved = before.loader.state_dict()
        trained = list(before.labels)
        before.step()  # goes on, and is killed
    with resumed(before, saved, settings=settings) as after:
        more = after.step()
        assert more == (saved_at < 6)
        assert after.rollouts.scheduler is not None
        assert after.rollouts.scheduler.version == (1, saved_at + (settings is CONTINUOUS and more))
        if more:
            assert after.rollouts.batch is not None
            assert after.rollouts.batch.version == (1, saved_at)
            after.episode()
        assert Counter(trained + after.labels) == ALL
        after.episode()  # the next one begins with its first prompt
        assert Counter(trained + after.labels) == Counter(dict.fromkeys(ALL, 2))
    assert after.rollouts.ledger["tokens"].balanced


def test_an_asynchronous_trainer_is_behind() -> None:
    """Its checkpoint has the weights of the batch, though the engines have had fewer transfers: versions are right."""
    with Run() as before:
        before.step(0)
        before.step(0)
        before.step(1)
        saved = before.loader.state_dict()  # all three are trained on when it is written
    with resumed(before, saved) as after:
        after.step()
        assert after.rollouts.batch is not None
        assert after.rollouts.batch.version == (1, 3)


def test_prompts_that_were_drawn_too_early_are_saved() -> None:
    """What april's books do not hold yet is kept beside them."""
    with Run() as before:
        before.step()
        ahead = next(before.rollouts._prompts)
        saved = before.loader.state_dict()
        trained = list(before.labels)
    with resumed(before, saved) as after:
        after.episode()
    assert ahead["label"] in after.labels
    assert Counter(trained + after.labels) == ALL


def test_checkpoints_without_april() -> None:
    """april begins anew with the rest of the episode; its own part is a tensor of bytes, as OpenRLHF logs states."""
    with Run() as run:
        run.loader.load_state_dict({"pass": 0, "at": 4})
        run.episode()
        assert len(run.labels) == ROWS - 4
        run.step()
        assert run.loader.state_dict()["april"].dtype.itemsize == 1


def test_what_a_rejected_group_was_given_is_kept_for_a_batch() -> None:
    """A state that was taken just before the verdict asks for it after it; and nobody does later."""
    with Run(algo__dynamic_filtering_enable=True) as run:
        for engine in run.engines:
            engine.answer = lambda query, prompt, label: {"rewards": 1.0, "scores": [int(label) % 2 / 2]}
        seen: list[set[int]] = []
        while run.step():
            scored = {sample_id.group for sample_id in list(run.rollouts._scored)}
            assert run.rollouts.scheduler is not None
            seen.append(scored - run.rollouts.scheduler.held_groups())
    assert any(seen)
    assert not any(first & third for first, third in zip(seen, seen[2:], strict=False))


def test_logs_that_differ_are_refused() -> None:
    """OpenRLHF stacks them by name, and would mix up the samples."""
    with Run() as run:
        for engine in run.engines:
            engine.answer = lambda query, prompt, label: {"rewards": 1.0, "extra_logs": {label: 1.0}}
        with pytest.raises(RolloutError, match="extra_logs of the reward function are"):
            run.step()


def test_without_over_sampling_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It runs, and waits for every response."""
    with caplog.at_level(logging.WARNING, "april"), Run({}) as run:
        run.step()
        assert len(run.labels) == GROUPS
    assert "set --april.over_sampling_batch_size above --rollout.batch_size" in caplog.text


# ---------------------------------------------------------------- OpenRLHF's trainers


EACH = Counter(dict.fromkeys(ALL, SAMPLES))


class Training:
    """One of OpenRLHF's trainers with april in it, over two simulated engines."""

    def __init__(
        self, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *,
        update: Callable[[Training], Any] = lambda training: None, start: Any = None, **flags: Any,
    ) -> None:  # fmt: skip
        actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
        self.engines = [Engine("e0"), Engine("e1")]
        self.rollouts: list[OpenRLHFRollouts] = []

        async def opened(handles: Any) -> Any:
            return handles

        def made(*args: Any) -> OpenRLHFRollouts:
            self.rollouts.append(OpenRLHFRollouts(*args, open_engines=opened, check=True))
            return self.rollouts[-1]

        monkeypatch.setattr(actors, "OpenRLHFRollouts", made)
        args = namespace(train__async_enable=kind == "async", **flags)
        args.april = settings
        strategy = SimpleNamespace(args=args, update=lambda samples: update(self))
        make = actors.AprilPPOTrainer if kind == "sync" else actors.AprilPPOTrainerAsync
        trainer = make(strategy, self.engines)
        trainer.start = start
        try:
            trainer.fit()
        finally:
            for one in self.rollouts:
                one.close()
            if kind == "async":
                trainer.kill()
        half = trainer if kind == "sync" else trainer.trainer_actor.object_
        self.checkpoints: list[Any] = half.checkpoints
        self.trained: list[list[Any]] = half.trained
        self.ledger = self.rollouts[0].ledger
        self.trainer = trainer

    def labels(self, batches: slice = slice(None)) -> Counter[str]:
        """Of the samples that were trained."""
        return Counter(sample.label for batch in self.trained[batches] for sample in batch)


@BOTH
@pytest.mark.parametrize("queued", [1, 2])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_prompt_is_trained_once(
    kind: str, queued: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both trainers, also with batches that wait in the queue: books balance, no token is older than the bound.

    Evaluations stay OpenRLHF's own.
    """
    run = Training(kind, settings, monkeypatch, train__async_queue_size=queued)

    assert run.labels() == EACH
    assert (run.ledger["prompts"].delivered, run.ledger["prompts"].held) == (ROWS, 0)
    assert run.ledger["tokens"].observed == run.ledger["tokens"].delivered
    logs = [sample.extra_logs for batch in run.trained for sample in batch]
    assert max(log["april/staleness"] for log in logs) <= 2
    assert all(engine.counted == len(run.trained) == ROWS // GROUPS for engine in run.engines)
    actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
    if kind == "sync":
        assert run.trainer.samples_generator.stock_calls == len(run.trained)
    else:
        generator = run.trainer.generator_actor.object_
        assert isinstance(generator, actors.AprilGenerateSamplesActor)
        assert isinstance(run.trainer.trainer_actor.object_, actors.AprilTrainingActor)
        assert not generator.samples_generator.stock_calls


FEW: dict[str, Any] = {**CONTINUOUS, "max_in_flight": GROUPS * SAMPLES}
LONG: dict[str, Any] = {"rollout__max_new_tokens": 2000, "data__max_len": 4000}


class SomeAreLong:
    """Lengths of responses: those of the second batch take the better part of a second."""

    def sample(self, group: int, index: int) -> int:
        return 1500 if GROUPS <= group < 2 * GROUPS else 20 + 3 * index + group % 5


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_engines_go_on_while_the_trainer_trains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is unfinished when the first batch is delivered runs on during its optimizer step."""
    running: list[int] = []
    monkeypatch.setattr("adapters.openrlhf_stand_in.LENGTHS", SomeAreLong())
    run = Training(
        kind, FEW, monkeypatch, update=lambda training: running.append(sum(e.running for e in training.engines)), **LONG
    )
    assert run.labels() == EACH
    assert running[0] > 0


def test_a_broadcast_does_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half that generates is asked for the second batch first, and has the new weights long before it is there."""
    monkeypatch.setattr("adapters.openrlhf_stand_in.LENGTHS", SomeAreLong())
    happened: list[str] = []
    asked_again = threading.Event()
    take, receive = OpenRLHFRollouts.next, Engine.receive

    def taken(self: OpenRLHFRollouts, rows: Any) -> Any:
        happened.append("asked")
        if len(happened) > 1:
            asked_again.set()
        answer = take(self, rows)
        happened.append("delivered")
        return answer

    def received(self: Engine) -> None:
        happened.append("weights")
        receive(self)

    monkeypatch.setattr(OpenRLHFRollouts, "next", taken)
    monkeypatch.setattr(Engine, "receive", received)
    Training("async", FEW, monkeypatch, update=lambda training: asked_again.wait(10), **LONG)
    assert happened[:6] == ["asked", "delivered", "asked", "weights", "weights", "delivered"]


def test_only_a_broadcast_cuts_requests() -> None:
    """Two batches are delivered before the first transfer and nothing is aborted; then what ran goes on under it."""
    with Run(CONTINUOUS, train__async_enable=True) as run:
        for _ in range(2):
            run.step(0)
            assert run.rollouts.batch is not None
            assert run.rollouts.batch.metrics["aborted_attempts"] == 0
        run.push(2)
        while run.step(1):
            pass
        assert run.rollouts.scheduler is None or run.rollouts.scheduler.version.n >= 2
    resumed = [r["extra_logs"] for r in run.responses if r["extra_logs"]["april/resumes"]]
    assert resumed
    assert all(log["april/versions"] <= log["april/resumes"] + 1 for log in resumed)
    assert sorted(run.labels, key=int) == [row(i)[1] for i in range(ROWS)]


@BOTH
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_trainers_checkpoint(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that belongs to the third update, though batches after it were under way when it was taken."""
    before = Training(kind, settings, monkeypatch)
    after = Training(kind, settings, monkeypatch, start=before.checkpoints[2])
    assert before.labels(slice(3)) + after.labels() == EACH


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_transfer_that_breaks_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's own error ends the run; nobody goes on to generate under weights that nobody knows."""
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer  # type: ignore[import-not-found]

    stock = BasePPOTrainer.broadcast_to_vllm

    def breaks(self: Any) -> None:
        if len(self.trained) == 2:
            self.vllm_engines[0].receive()
            raise OSError("a rank is gone")
        stock(self)

    monkeypatch.setattr(BasePPOTrainer, "broadcast_to_vllm", breaks)
    with pytest.raises((OSError, RolloutError), match=r"a rank is gone|transfer of weights failed"):
        Training(kind, CONTINUOUS, monkeypatch)


def test_a_transfer_elsewhere() -> None:
    """Between its two calls weights may be written, and nothing else happens; what stands against it comes out."""
    said: list[str] = []

    def hand_over(transfer: Callable[[], None]) -> None:
        said.append("stopped")
        transfer()
        said.append("goes on")

    there = TransferThread(hand_over)
    for _ in range(2):
        there.begin()
        assert said == ["stopped"]
        there.end(written=True)
        assert said == ["stopped", "goes on"]
        said.clear()

    there.begin()
    with pytest.raises(RolloutError, match="transfer of weights failed"):
        there.end(written=False)
    assert said == ["stopped"]

    def refuses(transfer: Callable[[], None]) -> None:
        raise CheckpointError("not now")

    with pytest.raises(CheckpointError, match="not now"):
        TransferThread(refuses).begin()


def test_the_end_waits_for_a_transfer() -> None:
    """The half that generates is done first; the broadcast after the last batches still finds a scheduler."""
    with Run(CONTINUOUS) as run:
        run.step(0)
        there = TransferThread(run.rollouts.hand_over)
        there.begin()
        closing = threading.Thread(target=run.rollouts.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        for engine in run.engines:
            engine.receive()
        there.end(written=True)
        closing.join(10)
        assert not closing.is_alive()
        run.push()  # there is no scheduler any more, and nothing to stop


# ---------------------------------------------------------------- the switch


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
    assert unpack(await actor.april_update_weights([0, 2]), CallReply).failure is None
    health = unpack(await actor.april_health(), CallReply).health
    assert health is not None
    assert health.ok
    assert capabilities_of(actor.april_capabilities()).max_context == 1000
    await actor.april_abort(["unknown"])

    assert await actor.april_judge("q", "p", "l") == {"rewards": 2.0}
    actor.executor.reward_func = lambda *lists: {"rewards": lists}
    assert await actor.april_judge("q", "p", "l") == {"rewards": (["q"], ["p"], ["l"])}
    await llm.shut()


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


# ---------------------------------------------------------------- images


def image_of(number: int) -> Any:
    """Of two sizes, and a colour of its own."""
    return picture(56 + 28 * (number % 2), 84, (number, 2 * number, 255 - number))


def text_of(number: int, images: int = 1) -> str:
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * images
    return f"<|im_start|>user\n{marks}a tiny model sees {number} cats<|im_end|>\n"


class SeeingLoader(Loader):
    """Every form of images that OpenRLHF reads, and prompts without any."""

    folder = Path()

    def _iterate(self, order: list[int]) -> Iterator[Any]:
        while self._at < len(order):
            self._at += 1
            number = order[self._at - 1]
            yield ["default"], [text_of(number, int(number % 6 < 5))], [str(number)], [self.images(number)]
        self._at = len(order) + 1

    def images(self, number: int) -> Any:
        image = image_of(number)
        path = self.folder / f"{number}.png"
        path.write_bytes(encoded(image))
        forms = [image, [encoded(image)], str(path), [base64.b64encode(encoded(image, "BMP")).decode()], [
            "data:image/png;base64," + base64.b64encode(encoded(image)).decode()
        ], [None]]  # fmt: skip
        return forms[number % 6]


class SeeingEngine(Engine):
    """Takes images, remembers which came with which text, and writes no placeholder."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._check_prefix = False  # its own tokens come back otherwise where they were placeholders
        self.seen: list[tuple[str, list[bytes]]] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, attachments=("image",), bans=True)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        assert IMAGE_ID in request.sampling.banned_ids
        prompt = request.token_ids[: len(request.token_ids) - request.response_offset]
        text = tiny_processor().tokenizer.decode([i for i in prompt.tolist() if i != IMAGE_ID])
        self.seen.append((text, [attachment_bytes(placed.attachment) for placed in request.attached]))
        async for chunk in super().generate(request):
            banned = np.isin(chunk.tokens, request.sampling.banned_ids)
            yield replace(chunk, tokens=np.where(banned, 9, chunk.tokens).astype(np.int32))


def pixels(data: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def seeing_run(folder: Path) -> Run:
    SeeingLoader.folder = folder
    return Run(loader=SeeingLoader, engine=SeeingEngine, tokenizer=tiny_processor(), **SEES)


def check_images(made: Run) -> None:
    """What is trained is what was asked, and what OpenRLHF's processor makes of the prompt and its image."""
    processor = tiny_processor()
    for response in made.responses:
        number = int(response["label"])
        if number % 6 == 5:
            assert response["mm_train_inputs"] is response["images"] is None
            continue
        expected = processor(
            text=[response["prompt"]], images=[image_of(number)], add_special_tokens=False, return_tensors="pt"
        )
        start = response["action_ranges"][0][0]
        assert response["observation_tokens"][:start] == expected["input_ids"][0].tolist()
        assert IMAGE_ID not in response["observation_tokens"][start:]
        assert set(response["mm_train_inputs"]) == {"pixel_values", "image_grid_thw"}
        for name, value in response["mm_train_inputs"].items():
            assert (value == expected[name]).all()
        assert len(response["images"]) == 1
    for engine in made.engines:
        for text, images in engine.seen:
            number = int(text.split(" sees ")[1].split(" cats")[0])
            assert len(images) == int(number % 6 < 5)
            assert all((pixels(data) == np.asarray(image_of(number))).all() for data in images)


def test_images_of_openrlhfs_loader_reach_requests_and_training(tmp_path: Path) -> None:
    """In every form that it reads; cut and resumed responses among them, and prompts that are text alone."""
    with seeing_run(tmp_path) as made:
        made.episode()
        check_images(made)
        assert Counter(made.labels) == Counter(map(str, range(ROWS)))
        assert sum(r["extra_logs"]["april/resumes"] > 0 for r in made.responses) > 0


def test_images_live_through_a_restart(tmp_path: Path) -> None:
    """The checkpoint has what was drawn and is not finished, with its images, from files, text and objects."""
    with seeing_run(tmp_path) as made:
        made.step()
        made.step()
        state = made.loader.state_dict()
        first = made.labels
    with seeing_run(tmp_path) as made:
        made.loader.load_state_dict(state)
        made.push()
        made.episode()
        check_images(made)
        assert Counter(first + made.labels) == Counter(map(str, range(ROWS)))


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A model that does not see, images where none may be, a file that is none, one image and no place for it."""
    with pytest.raises(ConfigError, match="is for vision models, but this one has no image processor"):
        Run(tokenizer=Tokenizer(), **SEES)
    SeeingLoader.folder = tmp_path
    with Run(loader=SeeingLoader) as made, pytest.raises(RolloutError, match="max_images_per_prompt is 0"):
        made.episode()

    class Broken(SeeingLoader):
        def images(self, number: int) -> Any:
            return str(tmp_path / "nothing.png")

    broken = Run(loader=Broken, engine=SeeingEngine, tokenizer=tiny_processor(), **SEES)
    with broken, pytest.raises(RolloutError, match="cannot be read: No such file"):
        broken.step()
