"""The adapter before SGLang servers behind a router: whose weights they are is read off the trainer's own labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from real_schedulers import assert_nothing_is_left
from server_fixtures import ServerThread

from adapters.slime_stand_in import DataSource, Sample, Status, installed, namespace
from april.adapters.slime import make_generate_rollout
from april.errors import ConfigError, EngineError

USER = "adapters.slime_functions_of_a_user"
EOS = 2


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


class Fleet(ServerThread):
    """Two servers behind a router, and a rollout function before them; the trainer updates by :meth:`update`."""

    def __init__(self, **flags: Any) -> None:
        self.engines = [FakeSglangServer(turns=flags.pop("turns", 1)) for _ in range(2)]
        super().__init__(*self.engines)
        self.flags = flags
        self.function = make_generate_rollout(check=True)

    def __enter__(self) -> Fleet:
        super().__enter__()
        self.router = FakeSglangRouter([server.url for server in self.engines])
        self.call(self.router.start())
        host, _, port = self.router.url.removeprefix("http://").partition(":")
        self.args = namespace(sglang_router_ip=host, sglang_router_port=int(port), rollout_max_response_len=200,
                              **self.flags)  # fmt: skip
        self.data = DataSource(self.args)
        return self

    def __exit__(self, *stuff: object) -> None:
        self.function.function.close()
        self.call(self.router.close())
        super().__exit__(*stuff)
        assert not [v for server in self.engines for v in server.violations]

    def update(self, label: str, *, flushed: bool = True) -> None:
        """The trainer has new weights, and names them; slime has caches emptied, others may not."""
        for server in self.engines:
            server.weights, server.label, server.stale_cache = f"w{label}", label, not flushed

    def __call__(self, rollout_id: int) -> list[Sample]:
        groups = self.function(self.args, rollout_id, self.data).samples
        assert len(groups) == 3
        return [s for g in groups for s in g]


def versions(samples: list[Sample]) -> set[str]:
    return {s.metadata["april"]["version"] for s in samples}


def test_versions_follow_the_trainers_updates() -> None:
    """Each update is a version; tokens have the trainer's name for their weights; caches are emptied."""
    with Fleet() as fleet:
        names = {}
        for rollout_id in range(8):
            fleet.update(str(rollout_id + 1), flushed=rollout_id == 0)
            for s in fleet(rollout_id):
                april = s.metadata["april"]
                assert april["version"] == f"0.{rollout_id}"
                names.update(zip((v for _, _, v in april["spans"]), s.weight_versions, strict=True))
            for server in fleet.engines:
                assert server.label.startswith(f"v0.{rollout_id}-")
                assert not server.stale_cache
                assert not server.running
        assert all(int(name) == int(version[2:]) + 1 for version, name in names.items())


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
    with Fleet(custom_generate_function_path=f"{USER}.over_http", turns=20) as fleet:
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
                assert s.weight_versions == [str(int(v[2:]) + 1) for _, _, v in spans]
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
        (session,) = fleet.function.function.sessions.values()
        assert not sum(session.scheduler.ledger()["tokens"].dropped.values())


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
        books = next(iter(fleet.function.function.sessions.values())).scheduler.ledger()["prompts"]
        assert books.observed == len(fleet.data.drawn) == 12 + books.held


def test_a_router_without_servers_is_told() -> None:
    """Before anything starts, with its address."""
    with Fleet() as fleet:
        fleet.router.workers = []
        with pytest.raises(EngineError, match="has no workers yet"):
            fleet(0)


def test_what_is_no_router_is_told() -> None:
    """A server in place of the router."""
    with Fleet() as fleet:
        fleet.args.sglang_router_port = int(fleet.engines[0].url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="must be an sglang-router"):
            fleet(0)
