"""What is left when nobody closes: a dropped scheduler, a forked child, a process that ends, a loop that is blocked."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from real_schedulers import config, endless, scheduler
from test_exporters import Kept

import april
from april.driver.rewards import Response
from april.engines.simulated.engine import SimulatedEngine
from april.errors import SchedulerClosed
from april.record.replay import replay

PROGRAM = """
import asyncio, os, sys, threading, april
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
engine = SimulatedEngine("e", DecodeCost(1e-4, 0, 0), lambda r: 10 + 1000 * r.sample_key[0], max_running=8)
config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=3, max_response_len=5000)
options = {}
"""


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The end of a program in a process of its own, which has a minute."""
    command = [sys.executable, *flags, "-c", PROGRAM + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def threads_of_april(before: Sequence[threading.Thread] = ()) -> list[threading.Thread]:
    """``before``: those that other tests have left."""
    return [t for t in threading.enumerate() if t.name.startswith("april") and t not in before]


def assert_ended(gone: weakref.ref[april.RolloutScheduler], left: Sequence[threading.Thread], before: Any) -> None:
    """Nobody holds the scheduler; its threads end, and with them those of an exporter."""
    for _ in range(3000):
        gc.collect()
        if gone() is None:
            break
        threading.Event().wait(0.01)  # what the loop does at this moment holds it
    assert gone() is None
    for thread in (*left, *threads_of_april(before)):
        thread.join(30)
    assert not threads_of_april(before)


def test_a_scheduler_that_is_dropped_ends_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    """Without close(), as when a cell of a notebook runs again: loop, threads and engines end; a log says so."""
    closed: list[str] = []
    before = threads_of_april()

    class Trainer:
        """Its reward holds it, and it holds the scheduler, as trainers do."""

        def __init__(self) -> None:
            self.rollouts = scheduler(reward=self.reward, prompts=endless())
            for engine in self.rollouts.engines:
                end = engine.close
                engine.close = lambda end=end, name=engine.name: (closed.append(name), end())[1]  # type: ignore[method-assign]

        def reward(self, prompt: april.Prompt, response: Response) -> float:
            return float(len(response.tokens))

    trainer = Trainer()
    trainer.rollouts.next_batch()
    gone = weakref.ref(trainer.rollouts)
    left = threads_of_april(before)
    assert len(left) > 1
    del trainer
    assert_ended(gone, left, before)
    assert sorted(closed) == ["e0", "e1"]
    assert "dropped without close()" in caplog.text


@pytest.mark.parametrize("batches", [0, 2])
def test_a_scheduler_that_is_dropped_ends_its_exporters_and_its_record(batches: int, tmp_path: Path) -> None:
    """All that was delivered is logged, the exporter is closed once, and the record says that the run is over."""
    before, exporter, path = threads_of_april(), Kept(), tmp_path / "run.jsonl"
    rollouts = scheduler(exporters=[exporter], record=path)
    delivered = []
    for _ in range(batches):
        delivered.append(rollouts.next_batch())
        rollouts.weight_update()
    left = threads_of_april(before)
    gone = weakref.ref(rollouts)
    del rollouts
    assert_ended(gone, left, before)
    assert exporter.rows == [(batch.id, batch.metrics) for batch in delivered]
    assert exporter.closed == 1
    again = replay(path)
    assert (again.end, again.core.context.batches) == ("the run was closed", batches)


@pytest.mark.parametrize("given", [False, True])
def test_a_scheduler_that_could_not_be_made_closes_what_it_made(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that the caller gave stay the caller's."""
    closed: list[str] = []
    close = SimulatedEngine.close

    async def closing(self: SimulatedEngine) -> None:
        closed.append(self.name)
        await close(self)

    monkeypatch.setattr(SimulatedEngine, "close", closing)
    with scheduler() as other:
        engines = other.engines if given else None
        with pytest.raises(april.ConfigError, match="prompts"):
            april.RolloutScheduler(config(engine={"kind": "simulated"}), prompts=5, reward=None, engines=engines)
        assert bool(closed) is not given


def test_a_forked_child_is_told_at_once() -> None:
    """Threads do not live on in a fork: every call says so; close does nothing, and the parent goes on."""
    code = """
rollouts = april.RolloutScheduler(config, prompts=[[1], [2], [3], [4]], engines=[engine])
rollouts.next_batch()
child = os.fork()
if child == 0:
    calls = (
        rollouts.next_batch, rollouts.weight_update, rollouts.state_dict, rollouts.ledger, rollouts.validate,
        lambda: rollouts.evaluate([[1]]), lambda: asyncio.run(rollouts.anext_batch()), lambda: rollouts.extend([]),
        lambda: rollouts.weight_update(transfer=print), lambda: asyncio.run(rollouts.aweight_update()),
        lambda: rollouts.load_state_dict({"core": {}, "prompts": {}}),
    )
    for call in calls:
        try:
            call()
            print("no error", call)
        except april.AprilError as error:
            if "after forking" not in str(error):
                print(error)
    print(rollouts)
    rollouts.close()
    del rollouts
    sys.exit()
print(os.waitpid(child, 0)[1])
print(rollouts.next_batch().id)
rollouts.close()
"""
    program = run(code)
    assert (program.stdout, program.returncode) == ("<RolloutScheduler of another process>\n0\n1\n", 0), program.stderr


def test_an_interpreter_that_exits_without_close() -> None:
    """A script that forgets close ends at once, with its own exit status and without noise."""
    code = """
rollouts = april.RolloutScheduler(config, prompts=[[1], [2], [3]], reward=None, engines=[engine])
print(len(rollouts.next_batch()))
sys.exit(3)
"""
    program = run(code, "-W", "error")
    assert (program.returncode, program.stdout, program.stderr) == (3, "1\n", "")


@pytest.mark.parametrize("what", ["await asyncio.to_thread(hang)", "await llm.generate()"])
def test_a_program_ends_though_functions_run(what: str) -> None:
    """Without close(), a rollout in a thread of asyncio.to_thread does not hold the process, even if it never ends."""
    code = f"""
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
async def rollout(prompt, llm):
    await llm.generate()
    begun.set()
    {what}
    return 1
config = april.Config(rollout_batch_size=3, n_samples_per_prompt=1, over_sampling_batch_size=3, max_response_len=5000)
rollouts = april.RolloutScheduler(config, prompts=[[1], [2], [3]], engines=[engine], rollout=rollout)
threading.Thread(target=rollouts.next_batch, daemon=True).start()
begun.wait()
sys.exit(3)
"""
    program = run(code)
    assert program.returncode == 3, program.stderr


def blocked_scheduler(begun: threading.Event, release: threading.Event) -> april.RolloutScheduler:
    async def blocking_reward(prompt: april.Prompt, response: Response) -> float:
        begun.set()
        release.wait()
        return 0.0

    return scheduler(reward=blocking_reward, config=config(over_sampling_batch_size=3))


def test_close_beside_a_reward_that_blocks_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An async function that blocks holds up everything: close names it and leaves it behind; who waits is told."""
    monkeypatch.setattr("april.driver.loop_thread.ANSWER_PATIENCE_S", 0.05)
    begun, release = threading.Event(), threading.Event()
    before = threads_of_april()
    rollouts = blocked_scheduler(begun, release)
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(rollouts.next_batch)
        begun.wait()
        left = threads_of_april(before)
        rollouts.close()
        assert isinstance(trainer.exception(), SchedulerClosed)
    assert "blocking_reward" in caplog.text
    assert "must not block" in caplog.text
    for call in (rollouts.next_batch, rollouts.ledger, rollouts.close):
        try:
            call()
        except SchedulerClosed:
            assert call != rollouts.close
    release.set()  # and now the loop ends after all
    for thread in left:
        thread.join(30)
    assert not threads_of_april(before)
