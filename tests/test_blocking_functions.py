"""Plain rollout functions: threads that block in llm.generate are parked, cancelled and left behind like coroutines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from gate_engine import HEAD, TAIL, GateEngine
from real_schedulers import assert_nothing_is_left, check, config, scheduler

import april
from april.core.types import DropReason, FinishReason
from april.driver.rewards import Response
from april.driver.user_calls import WorkerThreads
from april.engines.protocol import Request
from april.errors import RolloutError, SchedulerClosed, UsageError


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
    engine: GateEngine, rollout: Any, check: bool = True, filter: Any = None, **changes: Any
) -> april.RolloutScheduler:
    """N = 1, n = 1, no reward."""
    values = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_batch_size": 1} | changes
    return scheduler(
        engines=[engine], rollout=rollout, reward=None, filter=filter, config=config(**values), check=check
    )


def first_attempt_of(*sample: int) -> Callable[[Request], bool]:
    """Holds a sample's first attempt, which has the prompt and nothing else."""
    return lambda request: request.sample_key == sample and len(request.token_ids) == 2


def delivered(rollouts: april.RolloutScheduler, sample: tuple[int, int]) -> april.DeliveredSample:
    """Steps until a sample is delivered; the bound on staleness makes that a few."""
    while True:
        for s in rollouts.next_batch().samples:
            if s.id == sample:
                return s
        rollouts.weight_update()


# ---------------------------------------------------------------- what works


def test_a_plain_function_is_a_rollout_function() -> None:
    """Same arguments, same completion, one thread per sample; batches are those of the default function."""
    names: set[str] = set()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> str:
        names.add(threading.current_thread().name)
        done = llm.generate(prompt.token_ids, max_tokens=100)
        assert done.conversation.tolist() == [*prompt.token_ids.tolist(), *done.tokens.tolist()]
        return str(llm.sample_id)

    async def reward(prompt: april.Prompt, response: Response) -> float:
        assert response.output == str(response.sample_id)
        return float(len(response.tokens))

    with scheduler(rollout=rollout, reward=reward) as rollouts:
        for _ in range(4):
            check(rollouts.next_batch())
            rollouts.weight_update()
        books = rollouts.ledger()
        assert books["tokens"].balanced
        assert not books["tokens"].dropped
    assert all(name.startswith("april-worker") for name in names)


def test_a_blocked_thread_is_parked_over_the_end_of_a_step() -> None:
    """The thread stays in generate over a weight update and gets one completion; tools are segments without loss."""
    done: list[april.Completion] = []
    held = threading.Event()

    def holds(request: Request) -> bool:
        if first_attempt_of(0, 0)(request):
            held.set()
            return True
        return False

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id != (0, 0):
            held.wait()  # else the step could be over before the first sample has tokens
        first = llm.generate()
        if llm.sample_id == (0, 0):
            done.append(first)
            done.append(llm.generate([*first.conversation, 9, 8]))

    with one_group(GateEngine(holds), rollout, over_sampling_batch_size=2) as rollouts:
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
    inside, most = [0], [0]
    lock = threading.Lock()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        llm.generate()
        with lock:
            inside[0] -= 1

    prompts = [[i, 8] for i in range(1, 11)]
    with scheduler() as rollouts:
        expected = rollouts.evaluate(prompts, n_samples=2)
    with scheduler(rollout=rollout, config=config(max_in_flight=3)) as rollouts:
        result = rollouts.evaluate(prompts, n_samples=2)
        at_once = most[0]
        check(rollouts.next_batch())
    assert result.rewards.tolist() == expected.rewards.tolist()
    assert 1 <= at_once <= 3


def test_an_evaluation_that_fails_ends_its_plain_functions() -> None:
    """The prompt is named, the threads that wait are cancelled, training goes on."""
    cancelled = threading.Event()
    broken = [True]

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if broken and prompt.token_ids[0] == 2:
            raise LookupError("no sandbox")
        try:
            llm.generate()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    engine = GateEngine(lambda request: bool(broken))
    with one_group(engine, rollout, n_samples_per_prompt=2) as rollouts:
        rollouts._driver.local.functions = type(rollouts._driver.local.functions)(rollout, reward=lambda p, r: 1.0)
        with pytest.raises(RolloutError, match="evaluation prompt 1: the rollout function raised LookupError"):
            rollouts.evaluate([[1], [2]])
        assert cancelled.is_set()
        broken.clear()
        assert len(rollouts.next_batch().samples) == 2


# ---------------------------------------------------------------- what fails


def test_a_dropped_group_cancels_its_blocked_threads() -> None:
    """generate raises CancelledError, which ``except Exception`` does not swallow; the thread ends."""
    raised: list[BaseException] = []
    ended = threading.Event()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id == (0, 1):
            raise ValueError("no")
        try:
            llm.generate()
        except Exception as error:
            raised.append(error)
        except BaseException as error:
            raised.append(error)
            ended.set()
            raise

    engine = GateEngine(first_attempt_of(0, 0))
    with one_group(engine, rollout, n_samples_per_prompt=2, max_attempt_failures=1) as rollouts:
        assert rollouts.next_batch().group_ids.tolist() == [1, 1]
        assert ended.wait(30)
        rollouts.validate()
    (error,) = raised
    assert isinstance(error, asyncio.CancelledError)
    assert "was given up" in str(error)


def test_a_thread_that_ignores_its_cancellation_harms_nothing() -> None:
    """It is left behind: later calls are refused, and what it returns or raises is no event any more."""
    errors: list[BaseException] = []
    go_on, ended = threading.Event(), threading.Event()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id == (0, 1):
            raise ValueError("no")
        if llm.sample_id == (0, 0):
            for _ in range(3):
                try:
                    llm.generate()
                except BaseException as error:
                    errors.append(error)
            go_on.wait()
            ended.set()
            return
        llm.generate()

    engine = GateEngine(first_attempt_of(0, 0))
    with one_group(engine, rollout, n_samples_per_prompt=2, max_attempt_failures=1) as rollouts:
        assert rollouts.next_batch().group_ids.tolist() == [1, 1]
        go_on.set()
        assert ended.wait(30)
        rollouts.weight_update()
        assert rollouts.next_batch().group_ids.tolist() == [2, 2]
        rollouts.validate()
    assert [type(e) for e in errors] == [asyncio.CancelledError, RolloutError, RolloutError]
    assert "after its rollout function had ended" in str(errors[1])


def test_a_thread_outside_of_generate_is_cancelled_at_its_next_call() -> None:
    """A tool that runs cannot be interrupted; the function ends where it would have gone on."""
    raised: list[BaseException] = []
    in_tool, tool_done, ended = threading.Event(), threading.Event(), threading.Event()

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id == (0, 0):
            in_tool.set()
            tool_done.wait()
            try:
                llm.generate()
            except BaseException as error:
                raised.append(error)
                ended.set()
                raise
        elif llm.sample_id == (0, 1):
            in_tool.wait()
            raise ValueError("no")
        else:
            llm.generate()

    with one_group(GateEngine(), rollout, n_samples_per_prompt=2, max_attempt_failures=1) as rollouts:
        assert rollouts.next_batch().group_ids.tolist() == [1, 1]
        tool_done.set()
        assert ended.wait(30)
    assert [type(e) for e in raised] == [asyncio.CancelledError]


def test_misuse_in_a_thread_is_a_named_failure() -> None:
    """Wrong arguments and a second call at the same time raise where they are made, as in a coroutine."""
    errors: list[BaseException] = []
    asked = threading.Event()

    def holds(request: Request) -> bool:
        held = first_attempt_of(0, 0)(request)
        if held:
            asked.set()
        return held

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        if llm.sample_id != (0, 0):
            llm.generate()
            return
        for wrong in ({"max_tokens": 0}, {"token_ids": "text"}, {"no_such_argument": 1}):
            with pytest.raises((ValueError, TypeError)) as caught:
                llm.generate(**wrong)  # type: ignore[arg-type]
            errors.append(caught.value)
        first = threading.Thread(target=llm.generate, name="april-worker-of-the-user", daemon=True)
        first.start()
        asked.wait()
        try:
            llm.generate()
        except RolloutError as error:
            errors.append(error)
        first.join()

    with one_group(GateEngine(holds), rollout, over_sampling_batch_size=2) as rollouts:
        sample = delivered(rollouts, (0, 0))
        assert sample.tokens.tolist() == [*HEAD, *TAIL]
    assert [type(e) for e in errors] == [UsageError, UsageError, TypeError, RolloutError]
    assert "while another call of the same sample was running" in str(errors[3])


def test_a_call_after_the_function_has_returned_is_refused() -> None:
    """Threads that the user's function leaves behind get an error of their own."""
    errors: list[BaseException] = []
    returned = threading.Event()
    late: list[threading.Thread] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        def call_late() -> None:
            returned.wait()
            try:
                llm.generate()
            except RolloutError as error:
                errors.append(error)

        llm.generate()
        late.append(threading.Thread(target=call_late))
        late[-1].start()

    with one_group(GateEngine(), rollout) as rollouts:
        rollouts.next_batch()
        returned.set()
        for thread in late:
            thread.join()
    returned.set()
    assert errors
    assert all("after its rollout function had ended" in str(e) for e in errors)


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
def test_whatever_a_plain_function_raises_is_a_named_failure(error: BaseException, words: str, which: str) -> None:
    """A rollout begins again, and its tokens are counted; a filter is asked again; nothing ends but that function."""
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


def test_close_lets_blocked_threads_clean_up() -> None:
    """A thread in generate is cancelled, and close returns after its finally block."""
    inside = threading.Event()
    steps: list[str] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        inside.set()
        try:
            llm.generate()
        finally:
            steps.append("cleaned up")

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
    assert steps == ["cleaned up", "closed"]


def test_close_leaves_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After its patience close names it and returns; what the thread calls later is refused."""
    monkeypatch.setattr("april.driver.local_host.CLOSE_PATIENCE_S", 0.01)
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        inside.set()
        go_on.wait()
        for _ in range(2):
            try:
                llm.generate()
            except BaseException as error:
                errors.append(error)
        ended.set()

    rollouts = one_group(GateEngine(), rollout)

    def train() -> None:
        with pytest.raises(SchedulerClosed):
            rollouts.next_batch()

    trainer = threading.Thread(target=train)
    trainer.start()
    inside.wait()
    rollouts.close()
    trainer.join()
    assert "is left behind" in caplog.text
    go_on.set()
    assert ended.wait(30)
    assert [type(e) for e in errors] == [asyncio.CancelledError, RolloutError]


@pytest.mark.parametrize("close", [False, True], ids=["without close", "with close"])
def test_a_process_with_hung_functions_can_exit(close: bool) -> None:
    """Rollout and reward functions that hang in threads do not keep the interpreter, and it leaves without noise."""
    code = f"""
import april, logging, sys, threading
sys.path.insert(0, "tests")
from gate_engine import GateEngine
import april.driver.local_host as host
import april.daemon_pool as end
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


@pytest.mark.asyncio
async def test_threads_are_used_again_and_end_with_close() -> None:
    """One function after the other needs one thread; close ends the idle ones, the others after their function."""
    threads = WorkerThreads()
    loop = asyncio.get_running_loop()
    names: list[str] = []
    go_on = threading.Event()

    async def run(function: Callable[[], Any]) -> None:
        heard = loop.create_future()
        threads.run(copy_context(), function, (), heard.set_result)
        outcome = await heard
        assert outcome.error is None

    for _ in range(5):
        await run(lambda: names.append(threading.current_thread().name))
    assert len(set(names)) == 1
    running = asyncio.create_task(run(go_on.wait))
    await asyncio.sleep(0)
    threads.close()
    assert len(workers()) == 1
    go_on.set()
    await running
