"""The end of a run, without Ray: every actor is asked to close, for a while, and none is left behind."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import april
from april.processes.ray_run import CLOSE_S, Run, scheduler


class Gone(Exception):
    """As Ray's RayActorError."""


class FakeActor:
    """Its answer to ``close`` is known; None: it never comes."""

    def __init__(self, answer: Any) -> None:
        self.close = SimpleNamespace(remote=lambda: answer)


class FakeRay:
    """What the end of a run asks of Ray."""

    exceptions = SimpleNamespace(RayActorError=Gone)

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.waited: list[float | None] = []

    def wait(self, references: list[Any], *, num_returns: int, timeout: float | None = None) -> Any:
        """Time is not waited for."""
        self.waited.append(timeout)
        assert len(references) == num_returns
        if "interrupt" in references:
            raise KeyboardInterrupt
        return [r for r in references if r is not None], [r for r in references if r is None]

    def get(self, reference: Any) -> None:
        """Of something that is there."""
        assert reference is not None, "it hangs"
        if reference == "gone":
            raise Gone

    def kill(self, actor: Any) -> None:
        """Noted."""
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """In the place of the package."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_a_host_that_was_never_placed_does_not_hold_up_the_end(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one that is gone; said in a warning each."""
    core, gone, pending = FakeActor("closed"), FakeActor("gone"), FakeActor(None)
    run = Run("r", core, [gone, pending])
    run.close()
    run.close()
    assert ray.killed == [core, gone, pending]
    assert ray.waited == [CLOSE_S, CLOSE_S]
    assert [record.getMessage() for record in caplog.records] == [
        "run r: 1 actors did not close in 30 s and are killed", "run r: an actor was gone already (Gone)",
    ]  # fmt: skip


def test_an_interrupt_in_the_end_leaves_no_actor_behind(ray: FakeRay) -> None:
    """A second Ctrl-C, while actors close."""
    actors = [FakeActor("interrupt"), FakeActor("closed"), FakeActor("closed")]
    with pytest.raises(KeyboardInterrupt):
        Run("r", actors[0], actors[1:]).close()
    assert ray.killed == actors


def test_a_core_that_would_begin_anew_is_refused(ray: FakeRay) -> None:
    """Ray would start it without what it held, and ranks would wait for it for ever."""
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    config = april.Config(rollout_batch_size=1, max_response_len=9)
    with pytest.raises(april.ConfigError, match="max_restarts stays 0"):
        scheduler(config, name="r", prompts=[[1]], actor_options={"max_restarts": 1})
