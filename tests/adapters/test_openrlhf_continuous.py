"""Continuous generation under OpenRLHF: engines go on while it trains, and only its broadcasts cut requests."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from real_schedulers import assert_nothing_is_left

from adapters.openrlhf_stand_in import GROUPS, ROWS, SAMPLES, Engine, Run, installed, namespace, row
from april.adapters.openrlhf.rollouts import Rollouts, TransferElsewhere
from april.errors import CheckpointError, RolloutError

ALL = Counter({row(i)[1]: SAMPLES for i in range(ROWS)})
CONTINUOUS = {"generation": "continuous", "over_sampling_batch_size": 2 * GROUPS, "max_staleness": 2}
STEPWISE = {"over_sampling_batch_size": 2 * GROUPS, "max_staleness": 2}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert_nothing_is_left()


class Training:
    """One of OpenRLHF's trainers with april in it, over two simulated engines."""

    def __init__(
        self, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *,
        update: Callable[[Any], None] = lambda samples: None, start: Any = None, **flags: Any,
    ) -> None:  # fmt: skip
        actors: Any = importlib.import_module("april.adapters.openrlhf.actors")
        self.engines = [Engine("e0"), Engine("e1")]
        self.rollouts: list[Rollouts] = []

        async def opened(handles: Any) -> Any:
            return handles

        def made(*args: Any) -> Rollouts:
            self.rollouts.append(Rollouts(*args, open_engines=opened, check=True))
            return self.rollouts[-1]

        monkeypatch.setattr(actors, "Rollouts", made)
        args = namespace(train__async_enable=kind == "async", **flags)
        args.april = settings
        strategy = SimpleNamespace(args=args, update=update)
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

    def labels(self, batches: slice = slice(None)) -> Counter[str]:
        """Of the samples that were trained."""
        return Counter(sample.label for batch in self.trained[batches] for sample in batch)


@pytest.fixture(autouse=True)
def modules() -> Iterator[Any]:
    with installed() as made:
        yield made


@pytest.mark.parametrize("queued", [1, 2])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_prompt_is_trained_once(kind: str, queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both trainers, also with batches that wait in the queue: books balance, no token is older than the bound."""
    run = Training(kind, CONTINUOUS, monkeypatch, train__async_queue_size=queued)

    assert run.labels() == ALL
    assert (run.ledger["prompts"].delivered, run.ledger["prompts"].held) == (ROWS, 0)
    assert run.ledger["tokens"].observed == run.ledger["tokens"].delivered
    logs = [sample.extra_logs for batch in run.trained for sample in batch]
    assert max(log["april/staleness"] for log in logs) <= 2
    assert all(log["april/version_first"] <= log["april/version_last"] for log in logs)
    assert max(log["april/version_last"] for log in logs) > 0
    assert all(engine.counted == len(run.trained) == ROWS // GROUPS for engine in run.engines)


class SomeAreLong:
    """Lengths of responses: those of the second batch take the better part of a second."""

    def sample(self, group: int, index: int) -> int:
        return 1500 if GROUPS <= group < 2 * GROUPS else 20 + 3 * index + group % 5


def running_in_updates(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests at the engines at each optimizer step."""
    made: list[Engine] = []
    begin = Engine.__init__

    def remembered(self: Engine, name: str) -> None:
        begin(self, name)
        made.append(self)

    running: list[int] = []
    monkeypatch.setattr(Engine, "__init__", remembered)
    monkeypatch.setattr("adapters.openrlhf_stand_in.LENGTHS", SomeAreLong())
    run = Training(
        kind, settings, monkeypatch, update=lambda samples: running.append(sum(e.running for e in made)),
        rollout__max_new_tokens=2000, data__max_len=4000,
    )  # fmt: skip
    assert run.labels() == ALL
    return running


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_engines_go_on_while_the_trainer_trains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is unfinished when the first batch is delivered runs on during its optimizer step."""
    assert running_in_updates(kind, {**CONTINUOUS, "max_in_flight": GROUPS * SAMPLES}, monkeypatch)[0] > 0


def test_stepwise_engines_stand_still_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side of the comparison: no request runs while the synchronous trainer trains."""
    assert set(running_in_updates("sync", STEPWISE, monkeypatch)) == {0}


def test_a_broadcast_does_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half that generates is asked for the second batch first, and has the new weights long before it is there."""
    monkeypatch.setattr("adapters.openrlhf_stand_in.LENGTHS", SomeAreLong())
    happened: list[str] = []
    asked_again = threading.Event()
    take, receive = Rollouts.next, Engine.receive

    def taken(self: Rollouts, rows: Any) -> Any:
        happened.append("asked")
        if len(happened) > 1:
            asked_again.set()
        answer = take(self, rows)
        happened.append("delivered")
        return answer

    def received(self: Engine) -> None:
        happened.append("weights")
        receive(self)

    monkeypatch.setattr(Rollouts, "next", taken)
    monkeypatch.setattr(Engine, "receive", received)
    Training(
        "async", {**CONTINUOUS, "max_in_flight": GROUPS * SAMPLES}, monkeypatch,
        update=lambda samples: asked_again.wait(10) and None, rollout__max_new_tokens=2000, data__max_len=4000,
    )  # fmt: skip
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


@pytest.mark.parametrize("saved_at", range(1, 7))
def test_a_run_goes_on_from_its_checkpoint(saved_at: int) -> None:
    """A state that was taken while requests run, at every step: no prompt is lost and none is trained twice."""
    with Run(CONTINUOUS) as before:
        for _ in range(saved_at):
            before.step()
        saved = before.loader.state_dict()
        trained = list(before.labels)
        before.step()  # goes on, and is killed
    with Run(CONTINUOUS) as after:
        after.loader.load_state_dict(saved)
        after.push()
        more = after.step()
        assert more == (saved_at < 6)
        if more:
            assert after.rollouts.batch is not None
            assert after.rollouts.batch.version == (1, saved_at)
            after.episode()
        assert sorted(trained + after.labels, key=int) == [row(i)[1] for i in range(ROWS)]
    assert after.rollouts.ledger["tokens"].balanced


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_trainers_checkpoint(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that belongs to the third update, though batches after it were under way when it was taken."""
    before = Training(kind, CONTINUOUS, monkeypatch)
    after = Training(kind, CONTINUOUS, monkeypatch, start=before.checkpoints[2])
    assert before.labels(slice(3)) + after.labels() == ALL


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
    seen: list[Rollouts] = []
    close = Rollouts.close
    monkeypatch.setattr(Rollouts, "close", lambda self: (seen.append(self), close(self)))
    with pytest.raises((OSError, RolloutError), match=r"a rank is gone|transfer of weights broke off"):
        Training(kind, CONTINUOUS, monkeypatch)


def test_a_transfer_elsewhere() -> None:
    """Between its two calls weights may be written, and nothing else happens; what stands against it comes out."""
    said: list[str] = []

    def hand_over(transfer: Callable[[], None]) -> None:
        said.append("stopped")
        transfer()
        said.append("goes on")

    there = TransferElsewhere(hand_over)
    for _ in range(2):
        there.begin()
        assert said == ["stopped"]
        there.end(written=True)
        assert said == ["stopped", "goes on"]
        said.clear()

    there.begin()
    with pytest.raises(RolloutError, match="transfer of weights broke off"):
        there.end(written=False)
    assert said == ["stopped"]

    def refuses(transfer: Callable[[], None]) -> None:
        raise CheckpointError("not now")

    with pytest.raises(CheckpointError, match="not now"):
        TransferElsewhere(refuses).begin()


def test_the_end_waits_for_a_transfer() -> None:
    """The half that generates is done first; the broadcast after the last batches still finds a scheduler."""
    with Run(CONTINUOUS) as run:
        run.step(0)
        there = TransferElsewhere(run.rollouts.hand_over)
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
