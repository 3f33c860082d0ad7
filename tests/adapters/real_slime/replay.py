"""Routing replay inside the real slime and miles: rows of a server, cut and continued, in the data of their actors.

The server is one of april's own tests: it speaks as SGLang does and has experts that follow from (conversation,
weights), so every row can be made again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fake_servers.base import Experts
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from server_fixtures import ServerThread

from april.adapters.slime import make_generate_rollout
from benchmarks.slime_surroundings import Trainer, write_inputs

EXPERTS = Experts(layers=4, top_k=3, count=200)
FLAGS = ["--partial-rollout", "--rollout-batch-size", "4", "--over-sampling-batch-size", "8",
         "--n-samples-per-prompt", "2", "--use-rollout-routing-replay"]  # fmt: skip
TREES = {"slime": os.environ.get("SLIME_TREE"), "miles": os.environ.get("MILES_TREE")}


@pytest.fixture
def servers() -> Iterator[tuple[FakeSglangServer, str]]:
    """A worker and a router before it, on a loop of their own; the address of the router."""
    worker = FakeSglangServer(vocab_size=4096, mean_length=120, turns=8, max_running=32)
    worker.experts = EXPERTS
    with ServerThread(worker) as thread:
        router = FakeSglangRouter([worker.url])
        thread.call(router.start())
        try:
            yield worker, router.url
        finally:
            thread.call(router.close())


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_rows_reach_the_actors_data(name: str, servers: tuple[FakeSglangServer, str], tmp_path: Path) -> None:
    """Six rollouts with new weights before each: every row that the actor would replay is of its token's weights."""
    if not TREES[name]:
        pytest.skip(f"no --{name} PATH")
    worker, url = servers
    trainer = Trainer(name)
    args = trainer.arguments(url, write_inputs(tmp_path), [*FLAGS, "--rollout-max-response-len", "300"])
    args.num_layers, args.moe_router_topk, args.moe_layer_freq = EXPERTS.layers, EXPERTS.top_k, None
    args.custom_reward_post_process_path = args.custom_convert_samples_to_train_data_path = None
    data = trainer.data_source(args)
    function = make_generate_rollout(check=True)
    compared = continued = 0
    weights = {}
    try:
        for rollout_id in range(6):
            # the trainer's own update: new weights under a label of its own
            worker.weights, worker.label = f"w{rollout_id}", f"step{rollout_id}"
            worker.stale_cache = False
            output = function(args, rollout_id, data)
            weights[str(output.samples[0][0].metadata["april"]["version"])] = worker.weights
            samples = [sample for group in output.samples for sample in group]
            rows = data_of_the_actor(trainer, args, samples)
            for sample, replayed in zip(samples, rows, strict=True):
                spans = sample.metadata["april"]["spans"]
                made_under = [weights[version] for start, end, version in spans for _ in range(start, end)]
                assert np.array_equal(replayed, EXPERTS.rows(sample.tokens, made_under)), sample.index
                compared += len(replayed)
                continued += len(spans) > 1
    finally:
        function.close()
    print(f"{name}: {compared} rows compared, {continued} samples of several versions")
    assert continued >= 3
    assert not worker.violations


def data_of_the_actor(trainer: Trainer, args: Any, samples: list[Any]) -> list[Any]:
    """By the trainer's own code: what its manager converts and checks, as its actor takes it."""
    if trainer.name == "miles":
        convert = trainer.get("ray.rollout.train_data_conversion.convert_samples_to_train_data")
        train = convert(
            args, samples, metadata={}, custom_convert_samples_to_train_data_func=None,
            custom_reward_post_process_func=None,
        )  # fmt: skip
        return [np.asarray(rows) for rows in train["rollout_routed_experts"]]
    made = object.__new__(trainer.get("ray.rollout.RolloutManager").__ray_metadata__.modified_class)
    made.args, made.custom_reward_post_process_func = args, None
    made.custom_convert_samples_to_train_data_func = None
    train = made._convert_samples_to_train_data(samples)  # raises for rows of another shape, or all of expert 0
    trainer.get("observability.rollout_data_utils.tensorize_rollout_data_for_training")(train)
    rows, tokens = train["rollout_routed_experts"], train["tokens"]
    packed = prepared(trainer, rows, tokens)
    at = 0
    for one, ids in zip(rows, tokens, strict=True):
        assert np.array_equal(packed[at : at + len(one)], one)
        at += len(ids)
    return [one.numpy() for one in rows]


def prepared(trainer: Trainer, rows: Any, tokens: Any) -> Any:
    """As slime's actor lines rows up with the tokens of a micro-batch, on one rank; Megatron is not there."""
    parallel = mock.MagicMock()
    parallel.get_tensor_model_parallel_world_size.return_value = 1
    parallel.get_context_parallel_world_size.return_value = 1
    parallel.get_context_parallel_rank.return_value = 0
    core = ModuleType("megatron.core")
    core.mpu = parallel  # type: ignore[attr-defined]
    absent = {"megatron": ModuleType("megatron"), "megatron.core": core}
    with mock.patch.dict(sys.modules, absent):
        prepare = trainer.get("backends.megatron_utils.cp_utils.prepare_routed_experts_for_routing_replay")
        return prepare(
            rows, tokens, num_experts=EXPERTS.count, data_pad_size_multiplier=8, sequence_parallel=False,
            allgather_cp=False,
        )  # fmt: skip
