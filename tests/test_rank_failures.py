"""Ranks that break the rule, fail, die or are interrupted: whoever is at fault is named on all, and nothing hangs."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from rank_threads import CONFIG, PATIENCE_S, OnePlace, Store, begun, cut, drain, engine, names_of, raised, run_ranks

import april
from april.driver.user_code import inside_user_code
from april.processes import rank_scheduler as scheduler
from april.processes.addresses import new_token
from april.processes.rank_client import RankClient
from april.processes.rank_scheduler import RankScheduler
from april.processes.rank_server import RankServer

TOKEN = new_token()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda rank: {"trained": 0 if rank else 7}, ("trained=7)", "trained=0)")),
        (lambda rank: {"path": f"/{'x' * 300}/step-{rank}"}, ("path='/xxx", "path='/xxx")),
        (lambda rank: {"weights": {} if rank else None}, (")", "weights=given)")),
    ],
    ids=["numbers", "the end of a long text", "weights on one rank"],
)
def test_different_calls(arguments: Callable[[int], dict[str, Any]], words: tuple[str, str]) -> None:
    """A RankError on all, which names both calls with their arguments; the state can still be taken."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        with pytest.raises(april.RankError, match="make different calls") as caught:
            rollouts.weight_update(**arguments(rank))
        with pytest.raises(april.RankError, match="make different calls"):
            rollouts.next_batch()
        assert rollouts.state_dict() if rank == 0 else True
        return sorted(caught.value.ranks), str(caught.value)

    (ranks, sentence), same = run_ranks(program)
    assert same == (ranks, sentence)
    assert ranks == [0, 1]
    assert all(f"rank {rank} weight_update({words[rank]}" in sentence for rank in range(2))


def test_the_same_arguments_in_other_words() -> None:
    """A number of numpy's, a default that is written out, and a key, which no message shows, are no difference."""

    def program(rollouts: RankScheduler, rank: int) -> int:
        batch = rollouts.next_batch()
        rollouts.commit(np.int64(batch.id) if rank else batch.id)
        rollouts.weight_update(transfer=lambda: None, **({"trained": None} if rank else {}))
        with pytest.raises(april.EngineError) as caught:
            rollouts.add_engine("http://127.0.0.1:1", api_key=f"secret{rank}")
        assert "secret" not in str(caught.value)
        report = {"kl": np.float32(0.5)}
        rollouts.record_report(batch.id, report)
        with pytest.raises(april.ConfigError, match="record_report"):
            rollouts.record_report(batch.id, {"kl": object()})  # type: ignore[dict-item]
        return batch.id

    assert run_ranks(program) == [0, 0]


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
        pytest.param(None, "is lost: the connection was closed", id="its process dies"),
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
        assert str(raised(outcome)).removeprefix("the connection to ").startswith(f"rank {culprit} {told}")
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
    """Every rank generates, and leaves when rank 0's scheduler has ended: nothing is said of ranks that are gone."""
    monkeypatch.setattr(scheduler, "ENGINE_RELEASE_S", PATIENCE_S)
    outcomes = run_ranks(lambda rollouts, rank: len(rollouts.next_batch()), 3, engines=lambda rank: [engine()])

    assert outcomes == [2, 2, 2]
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_rank_0_does_not_wait_for_a_batch_when_another_rank_has_died() -> None:
    """In the middle of generation; the state has everything, also the batch that nobody has got."""
    hangs, dead = threading.Event(), threading.Event()

    def stuck(prompt: april.Prompt, response: april.Response) -> float:
        if prompt.position == 3:
            hangs.set()
            dead.wait(PATIENCE_S)
        return 1.0

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        if rank == 1:
            waits = begun(rollouts.next_batch)
            assert hangs.wait(PATIENCE_S)
            cut(rollouts)
            return raised(waits.exception(PATIENCE_S))
        with pytest.raises(april.RankError, match="connection to rank 1 is lost"):
            rollouts.next_batch()
        dead.set()
        return rollouts.state_dict()

    state, _ = run_ranks(program, reward=stuck)
    again = run_ranks(lambda r, rank: (r.load_state_dict(state, transfer=lambda: None), drain(r)[0])[1])
    assert sorted(name for batches in again for b in batches for name in names_of(b)) == [
        (g, i) for g in range(8) for i in range(3)
    ]


def test_a_rank_that_never_comes() -> None:
    """To its construction, or to a call: the others end after rank_timeout_s and name it."""
    store = Store()

    here = OnePlace(world_size=2, address="127.0.0.1:0", store=store, rank_timeout_s=0.3, rank_deadline_s=0.6)
    with pytest.raises(april.RankError, match=r"rank 1 did not reach RankScheduler\(.* within 0.3 s") as caught:
        RankScheduler(CONFIG, ranks=here, prompts=[[1]], reward=None)
    assert caught.value.ranks == (1,)
    there = OnePlace(rank=1, world_size=2, address="127.0.0.1:0", store=Store(), rank_timeout_s=0.1)
    with pytest.raises(april.RankError, match=r"rank 0 did not publish its address within 0\.1 s"):
        RankScheduler(CONFIG, ranks=there)


def test_rank_0_takes_a_connection_and_says_nothing() -> None:
    """It was stopped in that moment, or its machine is gone: a rank 0 that stands still is missed, before it says
    anything, too."""
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("ranks", f"127.0.0.1:{silent.getsockname()[1]} {TOKEN}")
        with pytest.raises(april.RankError) as caught:
            RankScheduler(CONFIG, ranks=OnePlace(rank=1, world_size=2, store=store, rank_deadline_s=0.2))
    assert "rank 0 cannot be reached: it sent nothing for 0.2 s (rank_deadline_s)" in str(caught.value)
    assert caught.value.ranks == (0,)


def test_who_does_not_know_the_token_is_no_rank() -> None:
    """It learns nothing, and the ranks go on."""
    server = RankServer(april.Ranks(world_size=2, address="127.0.0.1:0", token=TOKEN))
    address = server.listen(TOKEN)
    stranger = april.Ranks(rank=1, world_size=2, address=address, token=april.new_token(), rank_timeout_s=0.1)
    client = RankClient(stranger)
    with pytest.raises(april.RankError, match=r"rank 0 cannot be reached: .*401"):
        client.join(stranger.rendezvous())
    client.close(None)
    assert not server._sessions
    server.close(ConnectionError("enough"))
    server.stop()


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        (
            {"configs": [CONFIG.model_copy(update={"seed": rank}) for rank in range(2)]}, april.RankError,
            r"make different calls .*RankScheduler\(config ",
        ),
        ({"prompts": 3}, april.ConfigError, "prompts"),
        ({"reward": 3}, april.ConfigError, "reward must be a function"),
        (
            {"data": {0: 0, 1: 0}, "data_size": 2}, april.ConfigError,
            "^ranks: no rank has the data_rank 1, of data_size 2$",
        ),
    ],
    ids=["configurations", "prompts", "reward", "a share that nobody gets"],
)  # fmt: skip
def test_ranks_that_cannot_begin(options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    """All ranks are told at the construction."""
    for outcome in run_ranks(lambda rollouts, rank: None, **options):
        assert type(outcome) is kind
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
        assert "the data of prompt 1 cannot be sent to another rank: data['n'] is a set" in sentence
        assert delivered == 4
    there = [s.prompt.position for _, batches, _ in outcomes for batch in batches for s in batch.samples]
    assert sorted(there) == [position for position in (0, 2, 3, 4) for _ in range(3)]


def test_calls_in_wrong_places() -> None:
    """Inside of a user's function, on a closed scheduler, two at once: refused here, and nobody else is bothered."""

    def program(rollouts: RankScheduler, rank: int) -> Any:
        with inside_user_code(), pytest.raises(april.RolloutError, match="cannot be called inside"):
            rollouts.next_batch()
        rollouts._pending = rollouts._pending_call("next_batch()")
        with pytest.raises(april.RolloutError, match="was called while next_batch"):
            rollouts.commit(0)
        rollouts._pending = None
        rollouts.next_batch()
        return rollouts

    for rollouts in run_ranks(program):
        with pytest.raises(april.SchedulerClosed):
            rollouts.next_batch()
        rollouts.close()


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"rank": 0, "world_size": 2}, "need the address at which rank 0 listens and a common token"),
        ({"data_rank": 1, "data_size": 1}, "data_rank 1 of data_size 1"),
        ({"data_size": 2}, "data_rank 0 of data_size 2 is not among 1 ranks"),
        ({"rank_timeout_s": 0.0}, "must be above 0"), ({"rank_deadline_s": float("nan")}, "must be above 0"),
        ({"rank_timeout_s": "60"}, "must be above 0"), ({"rank": None}, "rank must be a whole number, got None"),
        ({"rank": "0"}, "rank must be a whole number, got '0'"), ({"world_size": 2.0}, "world_size must be a whole"),
        ({"rank": 1, "world_size": 2, "address": "127.0.0.1", "token": TOKEN}, 'expected "host:port"'),
        ({"rank": 1, "world_size": 2, "address": "127.0.0.1:0", "token": TOKEN}, "give the port at which it listens"),
        ({"world_size": 2, "address": "127.0.0.1:1", "token": f"{TOKEN}\n"}, "the key of the server .*line break"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be(numbers: dict[str, Any], sentence: str) -> None:
    """Refused before anything starts."""
    with pytest.raises(april.ConfigError, match=sentence):
        april.Ranks(**numbers)
