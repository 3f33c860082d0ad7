"""``--use-rollout-routing-replay``: the experts that wrote each token reach slime's actor, over cuts and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_servers.sglang import FakeSglangServer
from real_schedulers import assert_nothing_is_left
from server_fixtures import ServerThread

from adapters.slime_stand_in import Run, Sample, data_of_the_actor, installed, namespace
from april.adapters.slime.arguments import config_of
from april.adapters.slime.samples import as_dict, carry_path, unpacked
from april.core.versions import PolicyVersion
from april.engines.simulated.synthetic_rows import LAYERS, TOP_K, synthetic_rows
from april.errors import ConfigError, RolloutError
from april.scheduler import RolloutScheduler

REPLAY: dict[str, Any] = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    with installed():
        yield
    assert_nothing_is_left()


def rows_of(sample: Sample) -> Any:
    """The rows that the versions of its spans have made; those of the prompt are of the first."""
    told = sample.metadata["april"]["spans"]
    spans = [(PolicyVersion(*map(int, version.split("."))), end - start) for start, end, version in told]
    spans[0] = (spans[0][0], spans[0][1] + len(sample.tokens) - sample.response_length - 1)
    return synthetic_rows("routed_experts", np.array(sample.tokens, np.int32), spans)


def replayed(run: Run, samples: list[Sample]) -> int:
    """Compare every row of the actor's data; returns how many samples several versions have written."""
    data = data_of_the_actor(run.args, samples)
    for sample, rows in zip(samples, data["rollout_routed_experts"], strict=True):
        assert np.array_equal(rows[:-1], rows_of(sample)), sample.index
    return sum(len(sample.metadata["april"]["spans"]) > 1 for sample in samples)


def test_every_row_reaches_the_actor() -> None:
    """Continued samples have the rows of each of their versions, one per token but the last.

    How many rollouts it takes until three were continued, the clock decides.
    """
    with Run(**REPLAY) as run:
        assert any(found >= 3 for found in accumulate(replayed(run, run.samples(i)) for i in range(40)))


def test_rows_go_on_after_a_restart(tmp_path: Path) -> None:
    """What was held is continued from the checkpoint with the rows that it had; the file has them once."""
    with Run(tmp_path, **REPLAY) as run:
        for i in (0, 1):
            run.samples(i)
        run.data.save(1)
    saved = msgspec.msgpack.decode(carry_path(str(tmp_path), 1).read_bytes())
    assert "routed_experts" in str(saved)
    with Run(tmp_path, 2, **REPLAY) as again:
        assert any(replayed(again, again.samples(i)) for i in range(2, 40))


def test_a_batch_that_comes_again_has_its_rows_again(tmp_path: Path) -> None:
    """A rollout that was delivered and not trained is in the file without a second copy of its rows."""
    with Run(tmp_path, **REPLAY) as run:
        run.samples(0)
        first = run.samples(1)
        run.data.save(0)
    with Run(tmp_path, 1, **REPLAY) as again:
        second = again.samples(1)
        replayed(again, second)
        assert [s.tokens for s in second] == [s.tokens for s in first]


def test_without_the_flag_nobody_asks() -> None:
    """No rows, in no sample."""
    with Run() as run:
        assert all(sample.rollout_routed_experts is None for sample in run.samples(0))


def test_the_flags_say_the_shape() -> None:
    """Layers and experts per token are those of the trainer's model; april.extras is decided by slime's flag."""
    args = namespace(**REPLAY, sglang_router_ip="127.0.0.1", sglang_router_port=1)
    config = config_of(args, ["http://127.0.0.1:30000"])
    assert config.extras == ("routed_experts",)
    assert config.engine.expert_shape == (LAYERS, TOP_K)
    assert config_of(args, ["http://127.0.0.1:30000"], own_function=True).extras == ()
    with pytest.raises(ConfigError, match=r"april\.extras is decided by --use-rollout-routing-replay"):
        config_of(namespace(april={"extras": "routed_experts"}), None)


def test_a_hook_that_rewrites_a_response_is_told() -> None:
    """Its tokens are others than those whose experts would be replayed."""
    hook = ["adapters.test_slime_experts.shorten"]
    with Run(**REPLAY, rollout_sample_hook_path=hook) as run, pytest.raises(RolloutError, match="a hook has rewritten"):
        run.samples(0)


def shorten(args: Any, sample: Sample) -> None:
    """A sample hook."""
    sample.tokens = sample.tokens[:-1]


def test_rows_of_a_function_of_the_users_are_kept_in_the_file() -> None:
    """slime's own generate function fills them in; a checkpoint has them as plain values."""
    sample = Sample(tokens=[1, 2, 3], rollout_routed_experts=np.arange(8, dtype=np.int32).reshape(2, 2, 2))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(as_dict(sample)))
    again = Sample.from_dict(unpacked(plain))
    assert np.array_equal(again.rollout_routed_experts, sample.rollout_routed_experts)
    assert as_dict(plain) == plain


def test_servers_without_the_flag_are_told() -> None:
    """slime gives its servers --enable-return-routed-experts itself; servers of somebody else may be without."""
    server = FakeSglangServer()
    with ServerThread(server):
        config = config_of(namespace(**REPLAY, sglang_router_ip="127.0.0.1", sglang_router_port=1), [server.url])
        alone = config.model_copy(update={"engine": config.engine.model_copy(update={"router": None})})
        with pytest.raises(ConfigError, match="start the server with --enable-return-routed-experts"):
            RolloutScheduler(alone, prompts=[[1]], reward=lambda p, r: 0.0)
