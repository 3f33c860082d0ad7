"""Ranks that break the rule, fail, die or are interrupted: whoever is at fault is named on all, and nothing hangs."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import rank_threads
from rank_threads import CONFIG, PATIENCE_S, OnePlace, Store, drain, engine, names_of, raised, run_ranks

import april
from april.driver.loop_thread import LoopThread
from april.driver.user_code import inside_user_code
from april.errors import LinkError
from april.processes import rank_messages as say
from april.processes import rank_scheduler as scheduler
from april.processes.center import Center
from april.processes.link import CLOSING_TURNS, RANK, Hello, Listener, SocketLink, connect, new_token
from april.processes.member import Member
from april.processes.rank_scheduler import RankScheduler

TOKEN = new_token()


def cut(rollouts: RankScheduler) -> None:
    """What others see when this rank's process is killed."""
    center, seat = rollouts._center, rollouts._seat
    rank_threads.cut([seat._link] if center is None else list(center._links.values()), seat._thread)


def test_different_calls() -> None:
    """A RankError on all, which names both calls with their arguments; the state can still be taken."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        batch = rollouts.next_batch()
        with pytest.raises(april.RankError, match="make different calls") as caught:
            rollouts.weight_update(trained=batch.id if rank else 7)
        with pytest.raises(april.RankError, match="make different calls"):
            rollouts.next_batch()
        return caught.value.ranks, str(caught.value), rank or len(rollouts.state_dict())

    (ranks, sentence, there), (same, words, _) = run_ranks(program)
    assert (same, words) == (ranks, sentence)
    assert sorted(ranks) == [0, 1]
    assert "rank 0 weight_update(path=None, transfer=None, trained=7)" in sentence
    assert "rank 1 weight_update(path=None, transfer=None, trained=0)" in sentence
    assert there


def test_different_configurations() -> None:
    """Seen at the construction, on all."""
    configs = [CONFIG.model_copy(update={"seed": rank}) for rank in range(2)]
    for outcome in run_ranks(lambda rollouts, rank: None, configs=configs):
        assert re.search(r"make different calls .*RankScheduler\(config ", str(raised(outcome)))


class Speechless(Exception):
    """Its message cannot be had."""

    def __str__(self) -> str:
        raise KeyError("words")


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("end", "told"),
    [
        pytest.param(ZeroDivisionError("a loss"), "has ended with an error: ZeroDivisionError: a loss", id="an error"),
        pytest.param(OSError("caf\udce9"), "has ended with an error: OSError: caf\\udce9", id="not UTF-8"),
        pytest.param(Speechless(), "has ended with an error: Speechless: its message cannot be read", id="speechless"),
        pytest.param(None, "is gone: the connection was closed", id="its process dies"),
    ],
)
def test_the_end_of_one_rank_is_told_to_the_others(end: Exception | None, told: str, culprit: int) -> None:
    """At once and by its sentence, whatever they wait for; an error may have any words, or none."""

    def program(rollouts: RankScheduler, rank: int) -> None:
        rollouts.next_batch()
        if rank == culprit:
            if end is not None:
                raise end
            cut(rollouts)
        rollouts.next_batch()

    outcomes = run_ranks(program, 3, timeouts={"rank_timeout_s": 30.0})
    assert outcomes.pop(culprit) is end or end is None
    for outcome in outcomes:
        assert str(raised(outcome)).startswith(f"rank {culprit} {told}")
        assert outcome.ranks == (culprit,)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_says_which_rank_it_comes_of(culprit: int) -> None:
    """A collective of the trainer's fails when another rank has ended: its own words name a socket."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        if rank == culprit:
            raise ZeroDivisionError("a loss of nothing")
        with suppress(april.RankError):
            rollouts.next_batch()  # until the end of the other is known here
        raise ConnectionError("closed by peer")

    outcomes = run_ranks(program)
    sentence = f"april: rank {culprit} has ended with an error: ZeroDivisionError: a loss of nothing"
    assert isinstance(outcomes[1 - culprit], ConnectionError)
    assert outcomes[1 - culprit].__notes__ == [sentence]
    assert not hasattr(outcomes[culprit], "__notes__")


def test_no_rank_is_missed_where_all_have_come_to_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every rank generates, and leaves when rank 0's scheduler has ended: nothing is said of hosts that are gone."""
    monkeypatch.setattr(scheduler, "FAREWELL_S", PATIENCE_S)
    outcomes = run_ranks(lambda rollouts, rank: len(rollouts.next_batch()), 3, engines=lambda rank: [engine()])

    assert outcomes == [2, 2, 2]
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_rank_0_does_not_wait_for_a_batch_when_another_rank_has_died() -> None:
    """In the middle of generation; the state has everything, also the batch that nobody has got."""
    hangs, dead = threading.Event(), threading.Event()

    def stuck(prompt: april.Prompt, response: april.Response) -> float:
        if prompt.position == 3:
            hangs.set()
            dead.wait(60)
        return 1.0

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        if rank == 1:

            def wait() -> None:
                with pytest.raises(april.RankError):
                    rollouts.next_batch()

            waiter = threading.Thread(target=wait)
            waiter.start()
            assert hangs.wait(60)
            cut(rollouts)
            waiter.join(60)
            return None
        with pytest.raises(april.RankError, match="rank 1 is gone"):
            rollouts.next_batch()
        dead.set()
        return rollouts.state_dict()

    state, _ = run_ranks(program, reward=stuck)
    again = run_ranks(lambda r, rank: (r.load_state_dict(state, transfer=lambda: None), drain(r)[0])[1])
    assert sorted(name for batches in again for b in batches for name in names_of(b)) == [
        (g, i) for g in range(8) for i in range(3)
    ]


def test_a_hundred_ranks_come_at_once() -> None:
    """They all wait for the same word, and none may be taken for one stranger too many."""
    store, size = Store(), 100
    here = OnePlace(world_size=size, address="127.0.0.1:0", store=store)
    center, token = Center(here), new_token()
    address = center.listen(token)

    async def come() -> None:
        hellos = [Hello(RANK, f"{rank} {rank}") for rank in range(1, size)]
        for link in await asyncio.gather(*(connect(address, token, hello) for hello in hellos)):
            link.close()

    asyncio.run(come())
    center.close(ConnectionError("enough"))


def test_a_state_that_is_longer_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has asked for it is told, and the ranks go on together."""
    send = SocketLink.send

    def no_state(link: SocketLink, frame: bytes) -> None:
        if b"checksum" in frame:
            raise LinkError("a message of too many bytes")
        send(link, frame)

    monkeypatch.setattr(SocketLink, "send", no_state)

    def program(rollouts: RankScheduler, rank: int) -> int:
        if rank == 1:
            with pytest.raises(LinkError, match="too many bytes"):
                rollouts.state_dict()
        return len(rollouts.next_batch())

    assert run_ranks(program) == [3, 3]


def test_a_rank_that_never_comes() -> None:
    """To its construction, or to a call: the others end after rank_timeout_s and name it."""
    store = Store()

    here = OnePlace(world_size=2, address="127.0.0.1:0", store=store, rank_timeout_s=0.3, rank_deadline_s=0.6)
    with pytest.raises(april.RankError, match=r"rank 1 did not come to RankScheduler\(.* within 0.3 s") as caught:
        RankScheduler(CONFIG, ranks=here, prompts=[[1]], reward=None)
    assert caught.value.ranks == (1,)
    there = OnePlace(rank=1, world_size=2, address="127.0.0.1:0", store=Store(), rank_timeout_s=0.1)
    with pytest.raises(april.RankError, match=r"rank 0 has not said where it listens within 0\.1 s"):
        RankScheduler(CONFIG, ranks=there)


def test_rank_0_takes_a_rank_and_says_nothing() -> None:
    """It was stopped in that moment, or its machine is gone: a rank that stands still is missed, before it says
    anything, too."""
    store, links, raises = Store(), [], []  # type: ignore[var-annotated]
    loop, silent = LoopThread("rank 0"), Listener(TOKEN, lambda link: links.append(link))
    store.set("ranks", f"{loop.run(silent.open)} {TOKEN}")

    def live() -> None:
        try:
            RankScheduler(CONFIG, ranks=OnePlace(rank=1, world_size=2, store=store, rank_deadline_s=0.2))
        except april.RankError as error:
            raises.append(error)

    async def end() -> None:
        await silent.close()
        for link in links:
            link.close()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    loop.run(end)
    loop.stop()
    (error,) = raises
    assert "rank 0 cannot be reached: nothing was heard of it for 0.2 s (rank_deadline_s)" in str(error)
    assert error.ranks == (0,)


def test_rank_0_cannot_begin() -> None:
    """Its ConfigError comes on all ranks: a wrong prompt argument, data that cannot travel, a wrong reward."""
    for options, sentence in (
        ({"prompts": 3}, "prompts"),
        ({"reward": 3}, "reward must be a function"),
        ({"prompts": [{"token_ids": [1], "at": np.float32(3)}]}, r"data of prompt 0 cannot .*\['at'\] is a float32"),
    ):
        for outcome in run_ranks(lambda rollouts, rank: None, **options):  # type: ignore[arg-type]
            assert type(outcome) is april.ConfigError
            assert re.search(sentence, str(outcome)), outcome


def test_data_that_cannot_travel_later() -> None:
    """A generator's prompts are seen when they are drawn: the error names the prompt on all ranks, and whoever goes on
    gets the responses of all others."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        with pytest.raises(april.RolloutError) as caught:
            rollouts.next_batch()
        return str(caught.value), drain(rollouts)[0], rollouts.ledger()["prompts"].delivered

    drawn = ({"token_ids": [1 + i], "n": {3} if i == 1 else i} for i in range(5))
    outcomes = run_ranks(program, prompts=drawn)
    for sentence, _, delivered in outcomes:
        assert "the data of prompt 1 cannot go to another rank: data['n'] is a set" in sentence
        assert delivered == 4
    there = [s.prompt.position for _, batches, _ in outcomes for batch in batches for s in batch.samples]
    assert sorted(there) == [position for position in (0, 2, 3, 4) for _ in range(3)]


def test_calls_in_wrong_places() -> None:
    """Inside of a user's function, on a closed scheduler, two at once: refused here, and nobody else is bothered."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        with inside_user_code(), pytest.raises(april.RolloutError, match="cannot be called inside"):
            rollouts.next_batch()
        rollouts._open = rollouts._enter("next_batch()")
        with pytest.raises(april.RolloutError, match="was called while next_batch"):
            rollouts.commit(0)
        rollouts._open = None
        rollouts.next_batch()
        return rollouts

    for rollouts in run_ranks(program):
        with pytest.raises(april.SchedulerClosed):
            rollouts.next_batch()
        rollouts.close()


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is none of 2"),
        ({"rank": 0, "world_size": 2}, "need the address at which rank 0 listens and a token"),
        ({"data_rank": 1, "data_size": 1}, "data_rank 1 of data_size 1"),
        ({"data_size": 2}, "data_rank 0 of data_size 2 is not among 1 ranks"),
        ({"rank_timeout_s": 0.0}, "must be above 0"),
    ],
)
def test_ranks_that_cannot_be(numbers: dict[str, Any], sentence: str) -> None:
    """Refused before anything starts."""
    with pytest.raises(april.ConfigError, match=sentence):
        april.Ranks(**numbers)


def test_a_share_that_nobody_gets() -> None:
    """Refused on all ranks."""
    for outcome in run_ranks(lambda rollouts, rank: None, data={0: 0, 1: 0}, data_size=2):
        assert type(outcome) is april.ConfigError
        assert str(outcome) == "ranks: nobody has the data_rank 1, of data_size 2"


def test_an_answer_on_its_way_is_not_taken_for_another_calls() -> None:
    """Who was interrupted in a call and makes another one hears that they differ, not how the first one ended."""
    member = Member(april.Ranks(rank=1, world_size=2, address="127.0.0.1:1", token=april.new_token()))
    hear = member._frame
    try:
        member.arrive(0, "next_batch()")
        member._thread.call(lambda: hear(say.encode(say.Answer(0, b"a batch"))))  # it has come already
        member.arrive(0, "commit(0)")
        member._thread.call(lambda: hear(say.encode(say.Step(0, "transfer", what="next_batch()"))))
        member._thread.call(lambda: hear(say.encode(say.Answer(0, b"a batch", what="next_batch()"))))
        member._thread.call(lambda: hear(say.encode(say.Broken("they differ", (1,)))))
        with pytest.raises(april.RankError, match="they differ"):
            member.next(0, 0)
    finally:
        member.close(None)
