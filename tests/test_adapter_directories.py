"""A directory with an adapter is no model: what does not fit is refused before any server hears of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_servers.adapters import FakeAdapters, write_adapter
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import BOTH, ServerThread, read, request, served, update

import april
from april.core.versions import PolicyVersion
from april.engines.http.adapter_files import why_refused, why_unservable
from april.engines.protocol import AdapterSite
from april.errors import EngineError

SECOND = PolicyVersion(0, 1)


@pytest.mark.parametrize("kind", BOTH)
def test_a_weight_update_with_an_adapter_is_refused(kind: str, tmp_path: Path) -> None:
    """By servers that take none: nothing is paused, sent or changed, and the sentence has the flags. The next update
    with a whole model works; a state is loaded so too."""
    server: Any = FakeVllmServer() if kind == "vllm" else FakeSglangServer()
    prompts = [[3 + i, 7, 9] for i in range(40)]
    flag = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if kind == "vllm" else "--enable-lora"
    with ServerThread(server):
        engine = {"kind": kind, "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2], "max_len": 200}
        config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=20, engine=engine)
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            scheduler.next_batch()
            with pytest.raises(april.ConfigError, match=rf"weight_update: .*adapter_config\.json.*{flag}"):
                scheduler.weight_update(path=write_adapter(tmp_path))
            assert server.weights == "w0"
            assert scheduler.next_batch().version == PolicyVersion(0, 0)
            (tmp_path / "adapter_config.json").unlink()
            assert scheduler.weight_update(path=str(tmp_path)) == SECOND
            state = scheduler.state_dict()
        write_adapter(tmp_path)
        refused = pytest.raises(april.ConfigError, match=r"load_state_dict: .*adapter_config\.json")
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler, refused:
            scheduler.load_state_dict(state, path=str(tmp_path))


@pytest.mark.parametrize("kind", BOTH)
async def test_an_engine_that_came_back_is_not_given_an_adapter(kind: str, tmp_path: Path) -> None:
    """The directory of the last update may have become one since: the server keeps what it has."""
    async with served(kind) as (server, engine):
        with pytest.raises(EngineError, match=r"was not asked to load .*adapter_config\.json"):
            await update(engine, SECOND, write_adapter(tmp_path))
        assert server.weights == "w0"
        assert set((await read(engine, request())).versions) == {PolicyVersion(0, 0)}


BASE = {"model.layers.0.self_attn.q_proj": (8, 8)}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({}, None),
        ({"rank": 8}, "has rank 8, but the server accepts ranks up to 4; start it with --max-lora-rank 8"),
        ({"rank_pattern": {"q_proj": 16}}, "has rank 16"),
        ({"peft_type": "IA3"}, "it is of the kind IA3, but servers only accept LoRA"),
        ({"use_dora": True}, "it has use_dora, which the server does not support; give merged weights"),
        ({"modules_to_save": ["lm_head"]}, "it has modules_to_save"),
        ({"bias": "all"}, "trains biases of the base"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4, which changes the base"),
        ({"init_lora_weights": "gaussian"}, None),
        ({"use_rslora": True}, None),
        ({"layers": {"model.layers.0.self_attn.q_proj": (8, 4)}}, "to another base .* has 4 values, but .* has 8"),
        ({"layers": {"model.layers.0.self_attn.q_proj": (4, 8)}}, "to another base .* has 4 values, but .* has 8"),
        ({"layers": {"language_model.layers.0.q_proj": (4, 8)}}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit(made: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    """By its settings, its rank and its shapes: servers would copy a small matrix into a corner without a word."""
    found = why_refused(write_adapter(tmp_path, **made), AdapterSite(max_rank=4, base=BASE))
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found)


def test_scales_by_layer_need_a_server_that_follows_them() -> None:
    """SGLang divides by the rank, whatever the adapter says."""
    for settings in ({"use_rslora": True}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"q_proj": 4}}):
        said = {"peft_type": "LORA", **settings}
        assert why_unservable(said, scales=True) is None
        assert "which the server does not support" in (why_unservable(said, scales=False) or "")


@pytest.mark.parametrize("damage", ["no tensors", "cut", "no header", "no settings", "settings of nothing"])
def test_a_directory_that_is_half_written(damage: str, tmp_path: Path) -> None:
    """It is refused by name, and not by what the server makes of it."""
    write_adapter(tmp_path)
    tensors, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    match damage:
        case "no tensors":
            tensors.unlink()
        case "cut":
            tensors.write_bytes(tensors.read_bytes()[:-4])
        case "no header":
            tensors.write_bytes(b"\xff" * 64)
        case "no settings":
            settings.write_text("{")
        case _:
            settings.write_text("[]")
    assert "is not a complete adapter" in (why_refused(str(tmp_path), AdapterSite()) or "")


async def test_an_adapter_for_another_model_is_not_sent(tmp_path: Path) -> None:
    """Where the model's files are on this machine its shapes are compared; the server hears of nothing."""
    root = tmp_path / "model"
    write_adapter(root, layers={})
    (root / "adapter_model.safetensors").rename(root / "model.safetensors")
    header = b'{"model.layers.0.self_attn.q_proj.weight":{"dtype":"BF16","shape":[8,8],"data_offsets":[0,128]}}'
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    server = FakeVllmServer(loras=FakeAdapters(), root=str(root))
    async with served("vllm", server=server) as (_, engine):
        other = write_adapter(tmp_path / "other", layers={"model.layers.0.self_attn.q_proj": (6, 6)})
        with pytest.raises(EngineError, match="belongs to another base model than the server's"):
            await update(engine, SECOND, other)
        await update(engine, SECOND, write_adapter(tmp_path / "right"))
        assert server.loras is not None
        assert len(server.loras.ever) == 1
