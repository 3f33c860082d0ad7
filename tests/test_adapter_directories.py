"""A directory with an adapter is no model: it is refused by name before any server hears of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_async_llm import FakeAsyncLLM, install_vllm
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import BOTH, ServerThread, read, request, served, update

import april
from april.core.versions import PolicyVersion
from april.engines.vllm.in_process import VllmInProcessEngine
from april.errors import EngineError

SECOND = PolicyVersion(0, 1)


def adapter(directory: Path) -> str:
    """What ``PeftModel.save_pretrained`` leaves, beside the base model that somebody has put there too."""
    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors"):
        (directory / name).write_bytes(b"{}")
    return str(directory)


@pytest.mark.parametrize("kind", BOTH)
def test_a_weight_update_with_an_adapter_is_refused(kind: str, tmp_path: Path) -> None:
    """Nothing is paused, sent or changed, and the next update with a whole model works; a state is loaded so too."""
    server: Any = FakeVllmServer() if kind == "vllm" else FakeSglangServer()
    prompts = [[3 + i, 7, 9] for i in range(40)]
    with ServerThread(server):
        engine = {"kind": kind, "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2], "max_len": 200}
        config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=20, engine=engine)
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            scheduler.next_batch()
            with pytest.raises(april.ConfigError, match=r"weight_update: .*adapter_config\.json.*merged copy"):
                scheduler.weight_update(path=adapter(tmp_path))
            assert server.weights == "w0"
            assert scheduler.next_batch().version == PolicyVersion(0, 0)
            (tmp_path / "adapter_config.json").unlink()
            assert scheduler.weight_update(path=str(tmp_path)) == SECOND
            state = scheduler.state_dict()
        adapter(tmp_path)
        refused = pytest.raises(april.ConfigError, match=r"load_state_dict: .*adapter_config\.json")
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler, refused:
            scheduler.load_state_dict(state, path=str(tmp_path))


@pytest.mark.parametrize("kind", BOTH)
async def test_an_engine_that_came_back_is_not_given_an_adapter(kind: str, tmp_path: Path) -> None:
    """The directory of the last update may have become one since: the server keeps what it has."""
    async with served(kind) as (server, engine):
        with pytest.raises(EngineError, match=r"was not asked to load .*adapter_config\.json"):
            await update(engine, SECOND, adapter(tmp_path))
        assert server.weights == "w0"
        assert set((await read(engine, request())).versions) == {PolicyVersion(0, 0)}


async def test_vllm_in_process_is_not_given_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, before an object in this process."""
    install_vllm(monkeypatch)

    llm = FakeAsyncLLM()
    engine = VllmInProcessEngine(llm)
    with pytest.raises(EngineError, match=r"was not asked to load .*adapter_config\.json"):
        await update(engine, SECOND, adapter(tmp_path))
    assert llm.weights == "tiny0"
    assert (await engine.health()).ok
    await engine.close()
    await llm.shut()
