"""Signals in the trainer's thread: whatever a handler does, and wherever, no batch is lost and no update doubled."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupt, with_a_signal
from real_schedulers import assert_nothing_is_left, check, engine, scheduler

import april
from april.driver import loop_thread
from april.driver.rewards import Response
from april.engines.protocol import Capabilities
from april.engines.simulated.engine import SimulatedEngine
from april.errors import EngineError, RolloutError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the test are gone when it is over; a shell's background process would be deaf to SIGINT."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    assert_nothing_is_left()


def test_an_interrupt_anywhere_in_next_batch_loses_nothing() -> None:
    """At each of its places in turn: an interrupted call's batch is the answer of the next one, and comes once."""
    interrupted = 0
    with scheduler(check=False) as rollouts:
        for place in range(10_000):
            try:
                batch, reached = with_a_signal(place, interrupt, rollouts.next_batch)
            except KeyboardInterrupt:
                interrupted += 1
                batch, reached = rollouts.next_batch(), True
            assert batch.id == place
            check(batch)
            if not reached:
                break
            rollouts.weight_update()
        assert interrupted > 20
        assert rollouts.ledger()["prompts"].delivered == 3 * (place + 1)


@pytest.mark.parametrize("way", ["in place", "path", "transfer"])
def test_an_interrupt_anywhere_in_a_weight_update_and_it_lands_once(way: str) -> None:
    """Called again before the next batch, the update either begins or is waited for: the version grows by one."""
    transfers: list[Any] = []
    arguments: dict[str, dict[str, Any]] = {
        "in place": {},
        "path": {"path": "weights"},
        "transfer": {"transfer": lambda: transfers.append(rollouts.version)},
    }
    interrupted = 0
    with scheduler(check=False) as rollouts:
        for place in range(10_000):
            batch = rollouts.next_batch()
            try:
                version, reached = with_a_signal(place, interrupt, lambda: rollouts.weight_update(**arguments[way]))
            except KeyboardInterrupt:
                interrupted += 1
                version, reached = rollouts.weight_update(**arguments[way]), True
            assert version == rollouts.version == (0, place + 1)
            assert not any(e._paused for e in rollouts.engines)  # type: ignore[attr-defined]
            assert batch.id not in rollouts._thread.call(lambda: dict(rollouts._driver.core.leased))
            if not reached:
                break
        assert interrupted > 20
    # an update that was interrupted inside its transfer is made again, any other is not
    assert len(transfers) - len(set(transfers)) <= (3 if way == "transfer" else 0)


@pytest.mark.parametrize("what", ["next_batch", "weight_update", "state_dict", "close"])
def test_a_handler_may_save_anywhere(what: str) -> None:
    """A handler that calls state_dict() gets a state at each place of each call; nothing waits for itself."""
    states: list[dict[str, Any]] = []
    rollouts = scheduler(check=False)

    def save() -> None:
        try:
            states.append(rollouts.state_dict())
        except april.SchedulerClosed:
            assert what == "close"

    for place in range(10_000):
        if what != "next_batch":
            rollouts.next_batch()
        _, reached = with_a_signal(place, save, getattr(rollouts, what))
        if not reached:
            break
        if what in ("next_batch", "state_dict"):
            rollouts.weight_update()
        if what == "close":
            rollouts = scheduler(check=False)
    rollouts.close()
    assert len(states) > 10
    with scheduler(check=False) as restored:
        restored.load_state_dict(states[-1])
        check(restored.next_batch())


class Slow(SimulatedEngine):
    """Loads when it is let; the first load may fail."""

    def __init__(self, *args: Any, fails: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loading, self.release, self.fails = threading.Event(), threading.Event(), fails

    async def update_weights(self, version: april.PolicyVersion, path: str | None = None) -> None:
        fails, self.fails = self.fails, False
        self.loading.set()
        await asyncio.to_thread(self.release.wait)
        if fails:
            raise EngineError("no room")
        await super().update_weights(version, path)

    def interrupted(self, rollouts: april.RolloutScheduler, **arguments: Any) -> None:
        """An update whose call is interrupted while this engine loads, which it then may end."""
        main = threading.main_thread().ident or 0
        waker = threading.Thread(target=lambda: (self.loading.wait(), signal.pthread_kill(main, signal.SIGINT)))
        waker.start()
        with pytest.raises(KeyboardInterrupt):
            rollouts.weight_update("weights", **arguments)
        waker.join()
        assert rollouts.version == (0, 0)
        self.release.set()


def test_an_update_that_nobody_waits_for_goes_on() -> None:
    """Interrupted while an engine loads: it takes effect; after the next batch the same arguments are a new update."""
    with scheduler(engines=[slow := engine(kind=Slow)]) as rollouts:
        rollouts.next_batch()
        slow.interrupted(rollouts)
        assert rollouts.next_batch().version == (0, 1)
        assert rollouts.weight_update("weights") == (0, 2)


def test_an_update_that_names_its_batch_may_be_asked_for_later() -> None:
    """With ``trained`` it is known which update is meant, also when another batch has come in between."""
    with scheduler(engines=[slow := engine(kind=Slow)]) as rollouts:
        first = rollouts.next_batch()
        slow.interrupted(rollouts, trained=first.id)
        second = rollouts.next_batch()
        assert rollouts.weight_update("weights", trained=first.id) == (0, 1)
        assert rollouts.weight_update("weights", trained=second.id) == (0, 2)


def test_an_update_that_failed_unheard_is_made_again() -> None:
    """Interrupted, and then the engine refuses: the next call does not answer with an old error."""
    with scheduler(engines=[slow := engine(kind=Slow, fails=True)]) as rollouts:
        rollouts.next_batch()
        slow.interrupted(rollouts)
        update = rollouts._update
        assert update is not None
        assert update._reply is not None
        update._reply.wait()
        assert rollouts.weight_update("weights") == (0, 1)


def test_an_update_asked_for_inside_itself_is_refused() -> None:
    """A handler that updates in the middle of an update would wait for what it interrupts."""
    with scheduler() as rollouts:
        rollouts.next_batch()
        refused = 0

        def again() -> None:
            nonlocal refused
            try:
                rollouts.weight_update(transfer=lambda: None)
            except RolloutError:
                refused += 1

        for place in range(200):
            rollouts.next_batch()
            with_a_signal(place, again, lambda: rollouts.weight_update(transfer=lambda: None))
        assert refused > 10


class Server(SimulatedEngine):
    """Has weights of its own."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, remote=True)


def breaks() -> None:
    raise OSError("the link broke")


@pytest.mark.parametrize(("transfer", "error"), [(interrupt, KeyboardInterrupt), (breaks, OSError)])
def test_a_transfer_that_is_broken_off_holds_up_servers_until_the_next_one(transfer: Any, error: Any) -> None:
    """Ctrl-C, or any error, inside transfer: servers may have half of the weights, under the old version's name."""
    why = "interrupted|KeyboardInterrupt" if error is KeyboardInterrupt else "OSError: the link broke"
    with scheduler(engines=[engine(kind=Server)]) as rollouts:
        rollouts.next_batch()
        with pytest.raises(error):
            rollouts.weight_update(transfer=transfer)
        with pytest.raises(EngineError, match=rf"interrupted \(({why})\).*call weight_update again before"):
            rollouts.next_batch()
        assert rollouts.version == (0, 0)
        assert rollouts.weight_update(transfer=lambda: None) == (0, 1)
        assert rollouts.next_batch().version == (0, 1)


@pytest.mark.parametrize("mended", [False, True])
def test_a_batch_asked_for_before_a_transfer_broke_off_is_not_waited_for(
    mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call was interrupted; the next one is told how the weights are now, and is not left waiting."""
    monkeypatch.setattr(loop_thread, "RECHECK_S", 0.001)
    go_on = threading.Event()

    def held(prompt: Any, response: Any) -> float:
        go_on.wait()
        return float(len(response.tokens))

    with scheduler(engines=[engine(kind=Server)], reward=held) as rollouts:
        go_on.set()
        rollouts.next_batch()
        go_on.clear()
        with pytest.raises(KeyboardInterrupt):
            with_a_signal(200, interrupt, rollouts.next_batch)
        with pytest.raises(OSError, match="the link broke"):
            rollouts.weight_update(transfer=breaks)
        go_on.set()
        if mended:
            rollouts.weight_update(transfer=lambda: None)
        else:
            with pytest.raises(EngineError, match="call weight_update again before the next batch"):
                rollouts.next_batch()
            rollouts.weight_update(transfer=lambda: None)
        check(rollouts.next_batch())


# ----------------------------------------------------------------
# docs/restarts.md is true: its loop stops when it is told to, wherever it is, and what it saves loses nothing.


PAGE = (Path(__file__).parent.parent / "docs" / "restarts.md").read_text("utf-8")
(LOOP,) = (b for b in re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M) if "signal.signal" in b)
PROMPTS = [[i, 7] for i in range(1, 40)]


class Stopped:
    """A job that gets a signal ``where``, in its third step; what it has trained, and saved."""

    def __init__(self, where: str, number: signal.Signals) -> None:
        self.where, self.number = where, number
        self.trained: list[april.Batch] = []
        self.saved: dict[str, Any] = {}
        self.main = threading.main_thread().ident or 0
        self.sent = False

    def reward(self, prompt: april.Prompt, response: Response) -> float:
        """In a thread: the main thread waits."""
        if self.where == "waiting" and len(self.trained) == 2 and not self.sent:
            self.send()
        return float(len(response.tokens))

    def train(self, batch: april.Batch) -> None:
        if self.where == "training" and len(self.trained) == 2:
            self.send()
            for _ in range(100):
                pass  # the handler runs by now
        self.trained.append(batch)

    def send(self) -> None:
        self.sent = True
        signal.pthread_kill(self.main, self.number)

    def run(self) -> None:
        space = {
            "scheduler": lambda: scheduler(reward=self.reward, prompts=PROMPTS),
            "train": self.train,
            "save": self.saved.update,
        }
        exec(compile(LOOP, "docs/restarts.md", "exec"), space)  # noqa: S102


@pytest.mark.parametrize("where", ["waiting", "training"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loop_of_the_docs(where: str, number: signal.Signals) -> None:
    """It breaks off a wait and finishes a step; restored, each prompt is trained once, with every token."""
    job = Stopped(where, number)
    job.run()
    assert len(job.trained) == (2 if where == "waiting" else 3)
    trained = list(job.trained)
    with scheduler(prompts=PROMPTS) as rollouts:
        rollouts.load_state_dict(job.saved)
        while True:
            try:
                trained.append(rollouts.next_batch())
            except april.DataExhausted:
                break
            rollouts.weight_update()
    for batch in trained:
        check(batch)
    positions = sorted(s.prompt.position for batch in trained for s in batch.samples)
    assert positions == sorted([*range(len(PROMPTS))] * 2)
