"""slime's asynchronous loop with ``generation: continuous``: engines go on, and only slime's own update cuts requests.

The update is slime's: it pauses its servers, empties caches, loads, names the weights and continues, and tells nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_servers.base import uncut
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from real_schedulers import assert_nothing_is_left
from server_fixtures import PATIENCE_S, ServerThread

from adapters.slime_stand_in import DataSource, Sample, installed, namespace
from april.adapters.slime import make_generate_rollout
from april.errors import ConfigError

USER = "adapters.slime_functions_of_a_user"
CAP = 100


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield
    assert_nothing_is_left()


class Loop(ServerThread):
    """slime's asynchronous loop before two servers: the rollout after next is asked for while one is trained on."""

    def __init__(
        self, directory: Path | None = None, labels: bool = True, max_staleness: int = 3, **flags: Any
    ) -> None:  # fmt: skip
        self.engines = [FakeSglangServer(turns=40, labels=labels, mean_length=40) for _ in range(2)]
        super().__init__(*self.engines)
        # a few at a time: the bound is not reached before an update comes
        self.april = {"generation": "continuous", "max_staleness": max_staleness, "max_in_flight": 4}
        self.flags = flags
        self.directory = None if directory is None else str(directory)
        self.trained: Counter[int] = Counter()
        self.updates = 0
        self.cut = 0
        """Requests that updates have met."""
        self.resumed = self.oldest = 0
        """Samples that several weights wrote; most updates between a token's weights and those it was trained on."""

    def __enter__(self) -> Loop:
        super().__enter__()
        self.router = FakeSglangRouter([server.url for server in self.engines])
        self.call(self.router.start())
        self.restart()
        return self

    def restart(self) -> None:
        """A process of slime."""
        host, _, port = self.router.url.removeprefix("http://").partition(":")
        self.args = namespace(
            sglang_router_ip=host, sglang_router_port=int(port), april=self.april, rollout_max_response_len=CAP,
            save=self.directory, load=self.directory,
        )  # fmt: skip
        vars(self.args).update(self.flags)  # some of them the stand-in does not know
        self.data = DataSource(self.args)
        self.function = make_generate_rollout(check=True)

    def __exit__(self, *stuff: object) -> None:
        self.function.function.close()
        self.call(self.router.close())
        super().__exit__(*stuff)
        assert not [v for server in self.engines for v in server.violations]

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

    @property
    def scheduler(self) -> Any:
        (session,) = self.function.function.sessions.values()
        return session.scheduler

    def update(self) -> None:
        """As slime's actors do it: pause, empty the cache, new weights and their name, continue."""
        self.call(self._update())
        self.updates += 1

    async def _update(self) -> None:
        self.cut += sum(run.running for server in self.engines for run in server.running)
        async with aiohttp.ClientSession() as session:
            for step in ("pause_generation", "flush_cache", None, "continue_generation"):
                for server in self.engines:
                    if step is None:
                        server.weights, server.label = f"w{self.updates + 1}", str(self.updates + 1)
                        continue
                    async with session.post(f"{server.url}/{step}", json={}) as reply:
                        assert reply.status == 200, (step, await reply.text())

    def rollout(self, rollout_id: int) -> list[list[Sample]]:
        groups = self.function(self.args, rollout_id, self.data).samples
        assert [len(group) for group in groups] == [2, 2, 2]
        return groups

    def train(self, groups: list[list[Sample]]) -> None:
        """Under the weights of now: every token is one that its own version makes, and none is too old."""
        for group in groups:
            self.trained[group[0].group_index] += 1
            for sample in group:
                spans = sample.metadata["april"]["spans"]
                self.resumed += len(spans) > 1
                self.oldest = max(self.oldest, self.updates - int(sample.weight_versions[0]))
                is_what_its_weights_make(sample)

    def run(self, rounds: range, interval: int = 1) -> None:
        """The rollouts of ``rounds`` as train_async.py takes them."""
        ahead: list[list[Sample]] | None = self.rollout(rounds[0])
        for rollout_id in rounds:
            groups = ahead
            assert groups is not None
            ahead = self.rollout(rollout_id + 1) if rollout_id + 1 in rounds else None
            self.train(groups)
            if (rollout_id + 1) % interval == 0:
                self.update()


def is_what_its_weights_make(sample: Sample) -> None:
    """Each span is what the fake server makes under the weights of its name, from what stood before it."""
    prompt = sample.tokens[: -sample.response_length]
    for (start, end, _), name in zip(sample.metadata["april"]["spans"], sample.weight_versions, strict=True):
        before = sample.tokens[: len(prompt) + start]
        made, logprobs = uncut(before, weights=f"w{name}", max_tokens=CAP - start, mean_length=40)
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


def test_many_updates_lose_nothing_and_hold_the_bound() -> None:
    """Twenty rollouts, updates in the middle of requests: each prompt once, each token under its own weights."""
    with Loop(max_staleness=2) as loop:
        loop.run(range(20))
        assert loop.cut
        assert loop.resumed
        assert loop.oldest <= 2
        loop.balance()


def test_one_update_for_two_rollouts() -> None:
    """--update-weights-interval 2: deliveries between two updates cut nothing either."""
    with Loop(update_weights_interval=2) as loop:
        loop.run(range(9), interval=2)
        assert loop.updates == 4
        assert int(str(loop.scheduler.version)[2:]) in (3, 4)  # nobody has asked after the last one
        assert loop.oldest <= 3
        loop.balance()


def test_the_synchronous_loop_with_engines_of_their_own() -> None:
    """train.py asks when it has trained and updated: the same, a batch less ahead."""
    with Loop() as loop:
        for rollout_id in range(8):
            groups = loop.rollout(rollout_id)
            loop.train(groups)
            loop.update()
        assert loop.cut
        assert loop.oldest <= 3
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
            loop.function.function.close()
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"colocate": True}, "--colocate: the engines sleep while the trainer trains"),
        ({"offload_rollout": True}, "--offload-rollout: the engines sleep while the trainer trains"),
        ({"custom_generate_function_path": f"{USER}.over_http"}, "--custom-generate-function-path sends its requests"),
        ({"partial_rollout": False, "over_sampling_batch_size": 3}, "would throw them away"),
    ],
)
def test_what_cannot_go_on_is_refused(flags: dict[str, Any], said: str) -> None:
    """In a sentence with slime's names, before anything is generated."""
    with Loop(**flags) as loop, pytest.raises(ConfigError, match=said):
        loop.rollout(0)


def test_servers_that_do_not_name_their_weights_are_refused() -> None:
    """Nobody could say which weights made a token."""
    with Loop(labels=False) as loop, pytest.raises(ConfigError, match="says which weights made a token"):
        loop.rollout(0)


def test_miles_is_refused() -> None:
    """It was not tried there."""
    with installed("miles"), Loop() as loop:
        loop.data = type("DataSource", (DataSource,), {"__module__": "miles.rollout.data_source"})(loop.args)
        with pytest.raises(ConfigError, match="was not tried with miles"):
            loop.rollout(0)
