"""The adapter before SGLang servers behind a router, whose weights are read off the trainer's own labels.

Stepwise, and with ``generation: continuous``, where engines go on and only slime's own update cuts requests: it pauses
its servers, empties caches, loads, names the weights and continues, and tells nobody.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from fake_servers.base import uncut
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from real_schedulers import assert_nothing_is_left
from server_fixtures import PATIENCE_S, ServerThread

from adapters.slime_stand_in import DataSource, Sample, Status, installed, namespace
from april.adapters.slime import make_generate_rollout
from april.errors import ConfigError, EngineError

USER = "adapters.slime_functions_of_a_user"
EOS = 2
CAP = 100


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


class Fleet(ServerThread):
    """Two servers behind a router, and a rollout function before them."""

    def __init__(self, servers: dict[str, Any] | None = None, *, cap: int = 200, **flags: Any) -> None:
        self.engines = [FakeSglangServer(**(servers or {})) for _ in range(2)]
        super().__init__(*self.engines)
        self.cap, self.flags = cap, flags

    def __enter__(self) -> Self:
        super().__enter__()
        self.router = FakeSglangRouter([server.url for server in self.engines])
        self.call(self.router.start())
        self.restart()
        return self

    def restart(self) -> None:
        host, _, port = self.router.url.removeprefix("http://").partition(":")
        self.args = namespace(sglang_router_ip=host, sglang_router_port=int(port), rollout_max_response_len=self.cap)
        vars(self.args).update(self.flags)  # some of them the stand-in does not know
        self.data = DataSource(self.args)
        self.function = make_generate_rollout(check=True)

    def __exit__(self, *stuff: object) -> None:
        self.function.close()
        self.call(self.router.close())
        super().__exit__(*stuff)
        assert not [v for server in self.engines for v in server.violations]

    @property
    def scheduler(self) -> Any:
        (session,) = self.function.sessions.values()
        return session.scheduler

    def rollout(self, rollout_id: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = self.function(self.args, rollout_id, self.data).samples
        assert [len(group) for group in groups] == [2, 2, 2]
        return groups

    def __call__(self, rollout_id: int) -> list[Sample]:
        return [s for g in self.rollout(rollout_id) for s in g]

    def update(self, label: str, *, flushed: bool = True) -> None:
        """The trainer has new weights, and names them; slime has caches emptied, others may not."""
        for server in self.engines:
            server.weights, server.label, server.stale_cache = f"w{label}", label, not flushed


def versions(samples: list[Sample]) -> set[str]:
    return {s.metadata["april"]["version"] for s in samples}


def test_versions_follow_the_trainers_updates() -> None:
    """Each update is a version, which slime's field has too; caches are emptied."""
    with Fleet() as fleet:
        for rollout_id in range(8):
            fleet.update(str(rollout_id + 1), flushed=rollout_id == 0)
            for s in fleet(rollout_id):
                april = s.metadata["april"]
                assert april["version"] == f"0.{rollout_id}"
                assert s.weight_versions == [v[2:] for _, _, v in april["spans"]]
            for server in fleet.engines:
                assert server.label.startswith(f"v0.{rollout_id}-")
                assert not server.stale_cache
                assert not server.running


def test_no_update_is_no_version() -> None:
    """With --update-weights-interval 2 two rollouts have the same weights, and april says the same."""
    with Fleet() as fleet:
        said = []
        for rollout_id in range(6):
            if rollout_id % 2 == 0:
                fleet.update(str(rollout_id // 2 + 1))
            said.append(versions(fleet(rollout_id)))
        assert said == [{"0.0"}, {"0.0"}, {"0.1"}, {"0.1"}, {"0.2"}, {"0.2"}]


@pytest.mark.parametrize(("interval", "first", "always"), [(1, 0, False), (3, 0, False), (3, 1, False), (3, 0, True)])
def test_batches_of_the_asynchronous_loop(interval: int, first: int, always: bool) -> None:
    """train_async.py asks for a rollout before it trains the one before: that one alone is out after an update.

    Also where it began in the middle of an interval, or updates after every rollout whatever the interval says
    (--release-train).
    """
    with Fleet() as fleet:
        fleet.args.update_weights_interval = interval
        fleet.update("1")
        out, said, true = 0, [], []
        for rollout_id in range(first, first + 8):
            true.append(float(out))
            said.append(fleet.function(fleet.args, rollout_id, fleet.data).metrics["rollout/april/batches_out"])
            out += 1
            # the rollout before is trained now, and the servers have its weights before the next one is asked for
            if rollout_id > first and (always or rollout_id % interval == 0):
                fleet.update(f"{rollout_id + 1}")
                out = 1
        assert said == true


def test_a_function_that_talks_to_the_servers_itself() -> None:
    """Its requests are ended all at once, its samples go on where they stood; the trainer's labels stay."""
    # so slow that requests are on their way when a rollout ends; which ones, two threads and sockets decide
    with Fleet({"turns": 20}, custom_generate_function_path=f"{USER}.over_http") as fleet:
        continued = rollout_id = 0
        while rollout_id < 8 or not (continued and any(b.get("abort_all") for s in fleet.engines for b in s.aborts)):
            assert rollout_id < 64
            fleet.update(str(rollout_id + 1))
            for s in fleet(rollout_id):
                spans = s.metadata["april"]["spans"]
                continued += len(spans) > 1
                assert spans[-1][1] == s.response_length == len(s.rollout_log_probs) == s.reward
                if s.status is Status.COMPLETED:
                    assert s.tokens.index(EOS, 2) == len(s.tokens) - 1
                else:
                    assert s.response_length == 200
                assert s.weight_versions == [v[2:] for _, _, v in spans]
            assert {server.label for server in fleet.engines} == {str(rollout_id + 1)}
            rollout_id += 1


def test_a_limit_of_the_function_s_own_ends_a_response() -> None:
    """--rollout-max-response-len, which such a function keeps itself: nothing of it is dropped or made twice."""
    with Fleet(custom_generate_function_path=f"{USER}.over_http") as fleet:
        fleet.args.rollout_max_response_len = 12
        cut = 0
        for rollout_id in range(4):
            fleet.update(str(rollout_id + 1))
            for s in fleet(rollout_id):
                cut += s.status is Status.TRUNCATED
                assert s.response_length == s.metadata["april"]["spans"][-1][1] <= 12
        assert cut
        assert not sum(fleet.scheduler.ledger()["tokens"].dropped.values())


def test_servers_that_nobody_labels_have_new_weights_every_time() -> None:
    """Where the trainer sets no labels, every rollout counts as an update."""
    with Fleet() as fleet:
        assert [versions(fleet(rollout_id)) for rollout_id in range(3)] == [{"0.0"}, {"0.1"}, {"0.2"}]


def test_a_server_at_another_address_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    """slime's fault tolerance starts servers anew: what was unfinished goes on there, and nothing is lost."""
    with Fleet() as fleet, caplog.at_level(logging.WARNING, "april"):
        trained = [s.group_index for s in fleet(0)]
        fleet.router.workers = fleet.router.workers[1:]
        for rollout_id in (1, 2, 3):
            fleet.update(str(rollout_id + 1))
            samples = fleet(rollout_id)
            trained += [s.group_index for s in samples]
        assert "the servers have changed" in caplog.text
        assert len(trained) == 2 * len(set(trained)) == 24
        books = fleet.scheduler.ledger()["prompts"]
        assert books.observed == len(fleet.data.drawn) == 12 + books.held


def test_what_is_no_router_with_servers_is_told() -> None:
    """Before anything starts: a router without servers, and a server in place of the router."""
    with Fleet() as fleet:
        fleet.router.workers = []
        with pytest.raises(EngineError, match="has no workers yet"):
            fleet(0)
        fleet.args.sglang_router_port = int(fleet.engines[0].url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="must be an sglang-router"):
            fleet(0)


# ---------------------------------------------------------------- continuous generation


class Loop(Fleet):
    """slime's asynchronous loop: the rollout after next is asked for while one is trained on."""

    def __init__(self, directory: Path | None = None, max_staleness: int = 3, **flags: Any) -> None:
        # a few at a time: the bound is not reached before an update comes
        april = {"generation": "continuous", "max_staleness": max_staleness, "max_in_flight": 4}
        where = None if directory is None else str(directory)
        servers = {"turns": 12, "mean_length": 40}
        super().__init__(servers, cap=CAP, **{"april": april, "save": where, "load": where, **flags})
        self.trained: Counter[int] = Counter()
        self.updates = 0
        self.cut = 0
        """Requests that updates have met."""
        self.weights = {"0.0": "w0"}
        """Weights of the servers by april's version of them."""
        self.resumed = self.oldest = 0
        """Samples that several weights wrote; most updates between a token's weights and those it was trained on."""

    @property
    def aborts(self) -> list[Any]:
        """What april has asked the servers to end."""
        return [body for server in self.engines for body in server.aborts]

    def balance(self) -> None:
        """All that was drawn is trained once, out, or held."""
        self.scheduler.validate()
        books = self.scheduler.ledger()
        assert set(self.trained.values()) == {1}
        assert books["prompts"].observed == len(self.data.drawn)
        assert set(self.trained) <= set(self.data.drawn)
        assert not sum(books["prompts"].dropped.values())
        assert not sum(books["tokens"].dropped.values())

    def update(self) -> None:  # type: ignore[override]
        """As slime's actors do it: pause, empty the cache, new weights and their name, continue."""
        self.call(self._update())
        self.updates += 1

    def note_versions(self) -> None:
        """april's engines label the weights that they find by its version of them."""
        for server in self.engines:
            if server.label.startswith("v"):
                self.weights[server.label[1:].partition("-")[0]] = server.weights

    async def _update(self) -> None:
        self.note_versions()
        self.cut += sum(run.running for server in self.engines for run in server.running)
        async with aiohttp.ClientSession() as session:
            for step in ("pause_generation", "flush_cache", None, "continue_generation"):
                for server in self.engines:
                    if step is None:
                        server.weights, server.label = f"w{self.updates + 1}", str(self.updates + 1)
                        continue
                    async with session.post(f"{server.url}/{step}", json={}) as reply:
                        assert reply.status == 200, (step, await reply.text())

    def train(self, groups: list[list[Sample]]) -> None:
        """Under the weights of now: every token is one that its own version makes, and none is too old."""
        self.note_versions()
        for group in groups:
            self.trained[group[0].group_index] += 1
            for sample in group:
                spans = sample.metadata["april"]["spans"]
                self.resumed += len(spans) > 1
                self.oldest = max(self.oldest, self.updates - int(sample.weight_versions[0]))
                is_what_its_weights_make(sample, self.weights)

    def run(self, rounds: range, interval: int = 1, ahead: int = 1) -> None:
        """The rollouts of ``rounds``, each asked for so many rounds before it is trained: 1 as train_async.py."""
        asked = [self.rollout(rollout_id) for rollout_id in rounds[:ahead]]
        for rollout_id in rounds:
            asked += [self.rollout(r) for r in (rollout_id + ahead,) if r in rounds]
            self.train(asked.pop(0))
            if (rollout_id + 1) % interval == 0:
                self.update()


def is_what_its_weights_make(sample: Sample, weights: dict[str, str]) -> None:
    """Each span is what the fake server makes under the weights of its version, from what stood before it."""
    prompt = sample.tokens[: -sample.response_length]
    for start, end, version in sample.metadata["april"]["spans"]:
        before = sample.tokens[: len(prompt) + start]
        made, logprobs = uncut(before, weights=weights[version], max_tokens=CAP - start, mean_length=40)
        assert made[: end - start] == sample.tokens[len(before) :][: end - start]
        assert sample.rollout_log_probs[start:end] == pytest.approx(logprobs[: end - start])


def until(true: Callable[[], bool]) -> None:
    """Another thread does it; a test that hangs ends."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_a_delivery_cuts_nothing_and_an_update_does() -> None:
    """Requests go on after the batch; slime's update ends them, and they go on under its weights."""
    with Loop() as loop:
        loop.rollout(0)
        until(lambda: any(len(run.ids) > 5 for server in loop.engines for run in server.running))
        assert not loop.aborts
        loop.update()
        assert loop.cut
        # nobody has asked for a rollout: april has seen it at the servers, and goes on by itself
        until(lambda: str(loop.scheduler.version) == "0.1" and any(server.running for server in loop.engines))
        assert all(server.label.startswith("v0.1-") for server in loop.engines)
        loop.run(range(1, 8))
        assert loop.resumed
        loop.balance()


@pytest.mark.parametrize(
    ("bound", "rounds", "interval", "ahead"), [(2, 20, 1, 1), (3, 9, 2, 1), (3, 8, 1, 0)], ids=str
)
def test_updates_lose_nothing_and_hold_the_bound(bound: int, rounds: int, interval: int, ahead: int) -> None:
    """Updates in the middle of requests, after each rollout or after two: each prompt once, tokens under their weights.

    Deliveries between two updates cut nothing. train.py asks when it has trained and updated, a batch less ahead.
    """
    with Loop(max_staleness=bound, update_weights_interval=interval) as loop:
        loop.run(range(rounds), interval, ahead)
        assert loop.updates == rounds // interval
        assert loop.cut
        assert loop.resumed or not ahead
        assert loop.oldest <= bound
        # nobody has asked after the last one
        assert interval == 1 or int(str(loop.scheduler.version)[2:]) in (loop.updates - 1, loop.updates)
        loop.balance()


def test_a_restart_keeps_what_was_going_on(tmp_path: Path) -> None:
    """Saved while requests run, ended later: what came after the save is made again, nothing twice, nothing never."""
    with Loop(tmp_path) as loop:
        kept: Counter[int] = Counter()
        for start in (0, 4, 8):
            if start:
                loop.restart()
                loop.data.load(start - 1)
                loop.update()  # slime brings the servers the weights of its checkpoint
            ahead = loop.rollout(start)
            for rollout_id in range(start, start + 6):
                groups, ahead = ahead, loop.rollout(rollout_id + 1)
                loop.train(groups)
                if rollout_id < start + 4:
                    kept.update(group[0].group_index for group in groups)
                if rollout_id == start + 3:
                    loop.data.save(rollout_id)
                loop.update()
            loop.function.close()
        assert set(kept.values()) == {1}
        assert len(kept) == 36
        # whatever was begun before a trained group is trained, or still held
        assert sorted(kept)[-1] < 36 + 3 * 4


def test_evaluation_is_slimes_own_and_cuts_nothing() -> None:
    """Requests of april's go on beside it."""
    with Loop() as loop:
        loop.rollout(0)
        until(lambda: any(server.running for server in loop.engines))
        assert loop.function(loop.args, 0, loop.data, evaluation=True) == ("evaluated", 0)
        assert not loop.aborts
        loop.run(range(1, 4))
        loop.balance()


def test_miles_is_refused() -> None:
    """It was not tested there."""
    with installed("miles"), Loop() as loop:
        loop.data = type("DataSource", (DataSource,), {"__module__": "miles.rollout.data_source"})(loop.args)
        with pytest.raises(ConfigError, match="generation=continuous: it was not tested with miles"):
            loop.rollout(0)
