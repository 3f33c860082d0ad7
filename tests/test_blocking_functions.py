"""Plain rollout functions: threads that block in llm.generate are parked, cancelled and left behind like coroutines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from gate_engine import HEAD, TAIL, GateEngine
from real_schedulers import assert_nothing_is_left, check, config, scheduler

import april
from april.core.types import DropReason, FinishReason
from april.engines.protocol import Request
from april.errors import RolloutError, SchedulerClosed


def workers() -> list[threading.Thread]:
    """Threads of plain functions."""
    return [t for t in threading.enumerate() if t.name.startswith("april-worker")]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    for thread in workers():
        thread.join(30)
    assert not workers()
    assert_nothing_is_left()


def one_group(
    engine: GateEngine, rollout: Any, check: bool = True, reward: Any = None, filter: Any = None, **changes: Any
) -> april.RolloutScheduler:
    """N = 1, n = 1."""
    values = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_batch_size": 1} | changes
    functions = {"rollout": rollout, "reward": reward, "filter": filter}
    return scheduler(engines=[engine], config=config(**values), check=check, **functions)


def first_attempt_of(group: int, index: int, asked: threading.Event | None = None) -> Callable[[Request], bool]:
    """Holds a sample's first attempt, which has the prompt and nothing else, and says so."""

    def holds(request: Request) -> bool:
        held = request.sample_key == (group, index) and len(request.token_ids) == 2
        if held and asked is not None:
            asked.set()
        return held

    return holds


def delivered(rollouts: april.RolloutScheduler, sample: tuple[int, int]) -> april.DeliveredSample:
    """Steps until a sample is delivered; the bound on staleness makes that a few."""
    while True:
        for s in rollouts.next_batch().samples:
            if s.id == sample:
                return s
        rollouts.weight_update()


# ---------------------------------------------------------------- what works


def test_a_blocked_thread_is_parked_over_the_end_of_a_step() -> None:
    """The thread stays in generate over a weight update and gets one completion; tools are segments without loss."""
    done: list[april.Completion] = []
    held = threading.Event()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id != (0, 0):
            held.wait()  # else the step could be over before the first sample has tokens
        first = llm.generate()
        if llm.sample_id == (0, 0):
            done.append(first)
            done.append(llm.generate([*first.conversation, 9, 8]))

    with one_group(GateEngine(first_attempt_of(0, 0, held)), rollout, over_sampling_batch_size=2) as rollouts:
        assert rollouts.next_batch().group_ids.tolist() == [1]
        assert not done
        rollouts.weight_update()
        sample = delivered(rollouts, (0, 0))
    assert sample.tokens.tolist() == [*HEAD, *TAIL, 9, 8, *TAIL]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
    assert done[0].tokens.tolist() == [*HEAD, *TAIL]
    assert done[0].versions[:2].tolist() == [[0, 0], [0, 0]]
    assert done[0].versions[2:, 1].min() >= 1
    assert done[1].tokens.tolist() == TAIL


def test_512_plain_functions_at_the_same_time() -> None:
    """A step of 64 groups of 8: all are in generate at once, in a thread each; the next step uses the same ones."""
    seen: list[int] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        llm.generate()
        seen.append(threading.get_ident())

    engine = GateEngine(lambda request: True, together=512)
    sizes = {"rollout_batch_size": 64, "over_sampling_batch_size": 64, "n_samples_per_prompt": 8}
    with one_group(engine, rollout, check=False, **sizes) as r:
        for _ in range(2):
            assert len(r.next_batch().samples) == 512
            r.weight_update()
            assert engine.most == 512
            engine.most = 0
    assert len(seen) == 1024
    assert len(set(seen)) == 512


def test_plain_functions_are_evaluated_too() -> None:
    """Same result as with the default function; no more threads than requests in flight."""
    inside: set[int] = set()
    most = [0]

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        inside.add(threading.get_ident())
        most.append(len(inside))
        llm.generate()
        inside.remove(threading.get_ident())

    prompts = [[i, 8] for i in range(1, 11)]
    with scheduler() as rollouts:
        expected = rollouts.evaluate(prompts, n_samples=2)
    with scheduler(rollout=rollout, config=config(max_in_flight=3)) as rollouts:
        result = rollouts.evaluate(prompts, n_samples=2)
        at_once = max(most)
        check(rollouts.next_batch())
    assert result.rewards.tolist() == expected.rewards.tolist()
    assert 1 <= at_once <= 3


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("swallows", [False, True], ids=["raises on", "swallows"])
@pytest.mark.parametrize("where", ["in generate", "in a tool", "before base_url"])
def test_a_dropped_group_cancels_its_threads(where: str, swallows: bool) -> None:
    """generate and base_url raise CancelledError, which no ``except Exception`` swallows. A tool that runs cannot be
    interrupted: its function ends where it would have gone on. A thread that ignores that is left behind: later calls
    are refused, and what it returns is no event any more."""
    errors: list[BaseException] = []
    in_tool, tool_done, go_on, ended = (threading.Event() for _ in range(4))

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id == (0, 1):
            assert in_tool.wait(30)
            raise ValueError("no")
        if llm.sample_id != (0, 0):
            llm.generate()
            return
        in_tool.set()
        if where != "in generate":
            tool_done.wait()
        for _ in range(3):
            try:
                assert llm.base_url if where == "before base_url" else llm.generate()
            except BaseException as error:
                errors.append(error)
                if not swallows:
                    ended.set()
                    raise
        go_on.wait()
        ended.set()

    engine = GateEngine(first_attempt_of(0, 0))
    with one_group(engine, rollout, n_samples_per_prompt=2, max_attempt_failures=1) as rollouts:
        assert rollouts.next_batch().group_ids.tolist() == [1, 1]
        tool_done.set()
        go_on.set()
        assert ended.wait(30)
        rollouts.weight_update()
        assert rollouts.next_batch().group_ids.tolist() == [2, 2]
        rollouts.validate()
    assert [type(e) for e in errors] == [asyncio.CancelledError, RolloutError, RolloutError][: 3 if swallows else 1]
    assert not isinstance(errors[0], Exception)
    assert "was given up" in str(errors[0])
    assert all("after its rollout function had ended" in str(e) for e in errors[1:])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(4), "SystemExit: 4"),
        (StopIteration(), "it raised StopIteration"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
        (GeneratorExit(), "it raised GeneratorExit"),
        (asyncio.CancelledError(), "something that it waited for was cancelled"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("which", ["rollout", "filter"])
def test_whatever_a_plain_function_raises_is_a_named_failure(
    error: BaseException, words: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout begins again, and its tokens are counted; a filter is asked again; nothing ends but that function."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    failed: list[str] = []

    def fails(place: str) -> bool:
        if place == which and not failed:
            failed.append(place)
            raise error
        return True

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        llm.generate()
        fails("rollout")

    with one_group(GateEngine(), rollout, filter=lambda prompt, responses: fails("filter")) as rollouts:
        (sample,) = rollouts.next_batch().samples
        assert words in rollouts.story(*sample.id)
        assert rollouts.ledger()["tokens"].dropped[DropReason.FAILED] == (len(TAIL) if which == "rollout" else 0)


def test_no_more_threads_is_a_named_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of threads: the error says so and what to do; the run goes on when there are more."""
    full = [True]
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if full and self.name.startswith("april-worker"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        llm.generate()

    with one_group(GateEngine(), rollout) as rollouts:
        with pytest.raises(RolloutError, match=r"no more threads .*can't start new thread.* or write async functions"):
            rollouts.next_batch()
        full.clear()
        assert rollouts.next_batch().samples[0].finish is FinishReason.STOP


# ---------------------------------------------------------------- borders


def test_plain_functions_do_not_see_each_others_context() -> None:
    """Threads are used again, context variables are not; waiting calls of the scheduler are refused inside."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[str] = []
    holder: list[april.RolloutScheduler] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        seen.append(colour.get())
        colour.set("red")
        with pytest.raises(RolloutError, match="inside a rollout or reward function"):
            holder[0].next_batch()
        llm.generate()

    with one_group(GateEngine(), rollout) as rollouts:
        holder.append(rollouts)
        for _ in range(3):
            rollouts.next_batch()
            rollouts.weight_update()
    assert seen == ["none"] * 3


@pytest.mark.parametrize("hangs", [False, True])
def test_close_beside_a_running_function(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread in generate is cancelled, and close returns after its finally block. One that hangs is named and left
    behind after close's patience; what it calls later is refused."""
    if hangs:
        monkeypatch.setattr("april.driver.command_executor.CLOSE_PATIENCE_S", 0.01)
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    steps: list[str] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        inside.set()
        if hangs:
            go_on.wait()
        for _ in range(2):
            try:
                llm.generate()
            except BaseException as error:
                errors.append(error)
        steps.append("cleaned up")
        ended.set()

    rollouts = one_group(GateEngine(lambda request: True), rollout)

    def train() -> None:
        with pytest.raises(SchedulerClosed):
            rollouts.next_batch()

    trainer = threading.Thread(target=train)
    trainer.start()
    inside.wait()
    rollouts.close()
    steps.append("closed")
    trainer.join()
    assert ("is left running" in caplog.text) is hangs
    go_on.set()
    assert ended.wait(30)
    assert steps == (["closed", "cleaned up"] if hangs else ["cleaned up", "closed"])
    assert [type(e) for e in errors] == [asyncio.CancelledError, RolloutError]


@pytest.mark.parametrize("close", [False, True], ids=["without close", "with close"])
def test_a_process_with_hung_functions_can_exit(close: bool) -> None:
    """Rollout and reward functions that hang in threads do not keep the interpreter, and it leaves without noise."""
    code = f"""
import april, logging, sys, threading
sys.path.insert(0, "tests")
from gate_engine import GateEngine
import april.driver.command_executor as host
import april.concurrency.daemon_threads as end
host.CLOSE_PATIENCE_S = end.EXIT_PATIENCE_S = end.TELL_S = end.INTERRUPT_S = 0.01
logging.getLogger("april").setLevel(logging.CRITICAL)
hung, scored = threading.Barrier(3), threading.Event()
def rollout(prompt, llm):
    if llm.sample_id.group == 0:
        hung.wait()
        threading.Event().wait()
    llm.generate()
def reward(prompt, response):
    if response.sample_id.group == 1:
        scored.set()
        hung.wait()
        threading.Event().wait()
    scored.wait()
    return 1.0
config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=3, max_response_len=50)
rollouts = april.RolloutScheduler(
    config, prompts=[[1], [2], [3]], engines=[GateEngine()], rollout=rollout, reward=reward)
print(rollouts.next_batch().group_ids.tolist())
hung.wait()
if {close}:
    rollouts.close()
sys.exit(3)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (3, "[2]\n", "")
