"""Exporters: everything that is delivered reaches them once, and nothing they do holds up or ends a run.

The real packages are in ``tests/real_exporters``; here their stand-ins, with what is called on them.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from real_schedulers import scheduler

import april
import april.export
from april.errors import ConfigError
from april.export import COLUMNS, SampleText, TensorBoard, WandB, sample_texts
from april.testing import FakeEngine, rollouts, run_virtual
from april.view import observers


class Words:
    """A tokenizer: a word per token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{i}" for i in ids)


class Kept:
    """An exporter that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.texts: list[tuple[int, Sequence[SampleText]]] = []
        self.closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        self.texts.append((step, texts))

    def close(self) -> None:
        self.closed += 1


class Failing(Kept):
    error: type[BaseException] = ConnectionError

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        raise self.error(f"no route at step {step}")

    def close(self) -> None:
        super().close()
        raise OSError("cannot close")


class Hanging(Kept):
    """One that does not come back before it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.go_on.wait()
        super().log(metrics, step)


def run(*exporters: Any, steps: int = 4, **options: Any) -> list[april.Batch]:
    """A run that is closed; its batches."""
    with scheduler(exporters=exporters, **options) as rollouts:
        batches = []
        for _ in range(steps):
            batches.append(rollouts.next_batch())
            rollouts.weight_update()
    return batches


def test_every_batch_reaches_every_exporter() -> None:
    """With its metrics, in order, before the scheduler is closed; texts only if they are asked for."""
    one, other = Kept(), Kept()
    batches = run(one, other)
    for exporter in (one, other):
        assert exporter.rows == [(b.id, b.metrics) for b in batches]
        assert exporter.texts == []
        assert exporter.closed == 1
    run(third := Kept(), steps=0)
    assert third.closed == 1
    batches = run(third := Kept(), tokenizer=Words(), sample_texts=2)
    assert third.texts == [(b.id, sample_texts(b, Words(), 2)) for b in batches]


def test_a_batch_is_exported_on_virtual_time_too() -> None:
    """The thread is the exporter's: no clock waits for it."""
    exporter = Kept()

    async def program() -> april.Batch:
        config = april.Config(rollout_batch_size=1, max_response_len=9)
        run = rollouts(config, prompts=[[1, 2]] * 4, engines=[FakeEngine("e")], exporters=[exporter])
        batch = await run.next_batch()
        await run.close()
        return batch

    batch = run_virtual(program())
    assert exporter.rows == [(0, batch.metrics)]


@pytest.mark.parametrize("error", [ConnectionError, SystemExit])
def test_an_exporter_that_fails_is_warned_of_once(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """No batch is lost, the others get theirs, and it gets the next one anyway, also if it wants to exit."""
    failing, well = Failing(), Kept()
    failing.error = error
    with caplog.at_level(logging.WARNING, "april"):
        batches = run(failing, well)
    assert len(well.rows) == len(failing.rows) == len(batches) == 4
    assert failing.closed == 1
    said = [r.getMessage() for r in caplog.records if "Failing" in r.getMessage()]
    assert said == [f"exporter Failing failed at step 0, the run goes on: {error.__name__}: no route at step 0"]


def test_a_tokenizer_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The metrics have been logged by then."""

    class Breaks(Words):
        def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
            if len(ids) > 1:
                raise KeyError("no such piece")
            return ""

    exporter = Kept()
    with caplog.at_level(logging.WARNING, "april"):
        batches = run(exporter, tokenizer=Breaks(), sample_texts=1)
    assert exporter.rows == [(b.id, b.metrics) for b in batches]
    assert len([r for r in caplog.records if "Kept" in r.getMessage()]) == 1


def test_an_exporter_that_hangs_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches come, others get theirs, what it does not take is counted, and the end does not wait for ever."""
    monkeypatch.setattr(observers, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(observers, "MAX_WAITING_BATCHES", 2)
    logged = threading.Semaphore(0)

    class Told(Kept):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            super().log(metrics, step)
            logged.release()

    hanging, well = Hanging(), Told()
    with caplog.at_level(logging.WARNING, "april"), scheduler(exporters=[hanging, well]) as rollouts:
        for _ in range(6):
            rollouts.next_batch()
            assert logged.acquire(timeout=30)  # or it would not get more than wait for it, either
            rollouts.weight_update()
    assert hanging.rows == []
    assert len(well.rows) == 6
    said = [r.getMessage() for r in caplog.records if "Hanging" in r.getMessage()]
    assert said[0] == "exporter Hanging does not end; the run ends without it"
    assert said[1].startswith("exporter Hanging was too slow: ")
    hanging.go_on.set()


def test_an_interrupted_close_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second Ctrl-C inside it: the next close ends the exporters, and whatever is closed again says nothing new."""
    monkeypatch.setattr(observers, "CLOSE_TIMEOUT_S", 0.01)
    hanging, well, before = Hanging(), Kept(), threading.enumerate()
    rollouts = scheduler(exporters=[hanging, well])
    batch = rollouts.next_batch()
    threads = [t for t in threading.enumerate() if t not in before and t.name in ("april-Hanging", "april-Kept")]
    stop = rollouts._thread.stop

    def interrupted(**options: Any) -> None:
        stop(**options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollouts._thread, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollouts.close()
    for _ in range(2):
        rollouts.close()
    said = [r.getMessage() for r in caplog.records if "Hanging" in r.getMessage()]
    assert said == ["exporter Hanging does not end; the run ends without it"]
    hanging.go_on.set()
    assert len(threads) == 2
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()  # one that nobody ends would wait for ever
    for exporter in (hanging, well):
        assert exporter.rows == [(batch.id, batch.metrics)]
        assert exporter.closed == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"exporters": Kept()}, "exporters must be a list"),
        ({"exporters": [print]}, "exporters must be a list"),
        ({"sample_texts": -1}, "sample_texts must be a number of responses per batch, got -1"),
        ({"sample_texts": True}, "sample_texts must be a number of responses per batch, got True"),
        ({"sample_texts": 2}, "give the scheduler tokenizer=..."),
    ],
)
def test_what_cannot_be(options: dict[str, Any], sentence: str) -> None:
    """It is said before anything starts."""
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        scheduler(**options)


# ---------------------------------------------------------------- sample texts


@pytest.fixture(scope="module")
def batch() -> april.Batch:
    return run(steps=3)[-1]


def test_texts_are_of_the_lowest_to_the_highest_reward(batch: april.Batch) -> None:
    """The same ones each time, as many as there are at most; what they say is what the batch has."""
    texts = sample_texts(batch, Words(), 3)
    assert texts == sample_texts(batch, Words(), 3)
    rewards = sorted(batch.rewards.tolist())
    assert [texts[0].reward, texts[-1].reward] == [rewards[0], rewards[-1]]
    assert [t.reward for t in texts] == sorted(t.reward for t in texts)
    assert len(sample_texts(batch, Words(), 1)) == 1
    assert sample_texts(batch, Words(), 0) == []
    assert len({(t.group, t.index) for t in sample_texts(batch, Words(), 99)}) == len(batch.samples)
    of = {(s.id.group, s.id.index): s for s in batch.samples}
    for text in texts:
        sample = of[text.group, text.index]
        assert text.prompt == Words().decode(sample.prompt.token_ids.tolist())
        assert text.response == Words().decode(sample.tokens.tolist())
        assert (text.age, text.cuts, text.finish) == (sample.staleness, sample.resumes, sample.finish.value)
        assert text.tokens == len(sample.tokens)


# ---------------------------------------------------------------- the targets, as stand-ins


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes packages that are not installed: modules with what they are given."""

    def make(name: str, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for key, value in content.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: TensorBoard("runs/none"), "tensorboard"), (WandB, "wandb"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setattr("april.text.install_command.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install"):
        make()


TEXT = SampleText(group=1, index=2, prompt="p", response="r", reward=0.5, tokens=7, age=1, cuts=2, finish="stop")
METRICS = {"step_s": 2.0, "engine/http://a:1/cap": 8.0}


def test_wandb(stand_in: Any) -> None:
    """A run of its own is written row by row and ended; one of yours is neither."""
    calls: list[tuple[Any, ...]] = []

    class Run:
        def log(self, data: Any, commit: bool) -> None:
            calls.append(("log", data, commit))

        def define_metric(self, name: str, **options: Any) -> None:
            calls.append((name, options))

        def finish(self) -> None:
            calls.append(("finish",))

    table = types.SimpleNamespace
    stand_in("wandb", run=None, init=lambda **options: calls.append(("init", options)) or Run(), Table=table)
    own = WandB(project="p")
    own.log(METRICS, 4)
    own.log_texts([TEXT], 4)
    own.close()
    assert calls == [
        ("init", {"project": "p"}), ("april/step", {}), ("april/*", {"step_metric": "april/step"}),
        ("log", {"april/step_s": 2.0, "april/engine/http://a:1/cap": 8.0, "april/step": 4}, True),
        ("log", {"april/sample_texts": table(columns=list(COLUMNS), data=[[1, 2, 0.5, 7, 1, 2, "stop", "p", "r"]]),
                 "april/step": 4}, True),
        ("finish",),
    ]  # fmt: skip
    calls.clear()
    sys.modules["wandb"].run = Run()
    yours = WandB()
    yours.log(METRICS, 5)
    yours.close()
    assert [(call[0], call[-1]) for call in calls[2:]] == [("log", False)]
