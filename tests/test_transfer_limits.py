"""A transfer function that does not return: the update is given up by a sentence, wherever it was called."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from rank_threads import Taking, engine

import april

LIMIT_S = 0.05


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a shell takes away from what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def rollouts(taking: Taking | None = None) -> april.RolloutScheduler:
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=8, outage_deadline_s=LIMIT_S, warn_after_s=60.0
    )
    return april.RolloutScheduler(
        config, engines=[taking or engine()], prompts=[[1, i] for i in range(2, 50)], reward=lambda p, r: 1.0,
        progress=False,
    )  # fmt: skip


def test_it_hangs_in_the_main_thread(caplog: pytest.LogCaptureFixture) -> None:
    """It is broken off as by Ctrl-C; the error names weight_update and its transfer, and so does the log."""
    with rollouts() as run:
        run.next_batch()
        sentence = r"weight_update: its transfer function did not return within 0.1 s"
        with pytest.raises(april.EngineError, match=sentence):
            run.weight_update(transfer=threading.Event().wait)
        assert "its transfer function did not return" in caplog.text
        assert run.version.n == 0
        assert run.weight_update(transfer=lambda: None).n == 1
        assert len(run.next_batch().samples) == 2


def test_it_hangs_in_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be broken off there: others go on, and who called is told when the function has returned."""
    told: list[BaseException] = []
    inside, released = threading.Event(), threading.Event()
    with rollouts() as run:
        run.next_batch()

        def hand_over() -> None:
            inside.set()
            released.wait()

        def update() -> None:
            try:
                run.weight_update(transfer=hand_over)
            except april.EngineError as error:
                told.append(error)

        thread = threading.Thread(target=update)
        thread.start()
        inside.wait()
        run.next_batch()  # waits for the end of the update
        assert "its transfer function did not return" in caplog.text
        assert not told
        released.set()
        thread.join()
        assert "its transfer function did not return" in str(told[0])
        assert run.version.n == 0


def test_an_interrupt_by_hand_stays_one() -> None:
    """Ctrl-C in a transfer is no error of april's."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with rollouts() as run:
        run.next_batch()
        with pytest.raises(KeyboardInterrupt):
            run.weight_update(transfer=interrupted)
        assert run.version.n == 0


class Slow:
    """Weights whose sending takes longer than a transfer function may; no step of it does."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        late = time.monotonic() + 3 * LIMIT_S
        yield "first", torch.ones(1)
        while time.monotonic() < late:
            time.sleep(LIMIT_S / 10)
        yield "last", torch.ones(1)


def test_sent_weights_have_the_limits_of_their_steps() -> None:
    """However many steps there are, the limit of a transfer function is none of theirs."""
    taking = Taking()
    with rollouts(taking) as run:
        run.next_batch()
        assert run.weight_update(weights=Slow()).n == 1
        assert [list(weights) for weights in taking.weights] == [["first", "last"]]


def test_weights_that_fail_before_the_first_one() -> None:
    """Nothing was written anywhere: the old version stays, and generation goes on."""
    taking = Taking()
    with rollouts(taking) as run:
        run.next_batch()
        with pytest.raises(april.ConfigError, match="there are no tensors"):
            run.weight_update(weights=iter(()))
        assert not taking.coming
        assert len(run.next_batch().samples) == 2
        assert run.version.n == 0
