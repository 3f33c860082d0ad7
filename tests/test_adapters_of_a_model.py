"""``weight_update(weights=model)`` of a model with an adapter: what is written for servers, where, and for how long."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_model import Adapted
from fake_servers.adapters import FakeAdapters
from fake_servers.vllm import FakeVllmServer
from safetensors.torch import load_file
from server_fixtures import ServerThread

import april
from april.core.versions import PolicyVersion
from april.engines.http.adapter_files import why_refused
from april.engines.protocol import AdapterSite
from april.errors import ConfigError
from april.weights.adapter import AdapterDirectories, adapter_of, is_adapted


def run_of(server: FakeVllmServer, **more: Any) -> april.Config:
    engine = {"kind": "vllm", "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2], "max_len": 200}
    return april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=30, engine=engine, **more)


def test_the_adapter_alone_is_written(tmp_path: Path) -> None:
    """Under the names of a saved adapter, with its settings; nobody else may read it."""
    model = Adapted()
    made = tmp_path / "adapter"
    adapter_of(model).write(made, private=True)
    tensors = load_file(made / "adapter_model.safetensors")
    names = {f"base_model.model.q_proj.lora_{part}.weight" for part in "AB"}
    assert tensors.keys() == names
    layer = model.base_model["model"]["q_proj"]  # type: ignore[index]
    assert torch.equal(tensors["base_model.model.q_proj.lora_A.weight"], layer.lora_A["default"].weight)
    said = json.loads((made / "adapter_config.json").read_text())
    assert (said["r"], said["target_modules"], said["inference_mode"]) == (2, ["q_proj"], True)
    assert why_refused(str(made), AdapterSite(max_rank=2)) is None
    assert {stat.S_IMODE(os.stat(f).st_mode) for f in made.iterdir()} == {0o600}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_what_is_trained_besides_the_adapter() -> None:
    """Servers would go on with its old values; two active adapters are no one name."""
    model = Adapted()
    model.get_parameter("base_model.model.q_proj.base_layer.weight").requires_grad_(True)
    sentence = r"trains base_model\.model\.q_proj\.base_layer\.weight in addition to its adapter"
    with pytest.raises(ConfigError, match=sentence):
        adapter_of(model)
    model = Adapted()
    model.active_adapters = ["default", "other"]
    with pytest.raises(ConfigError, match="a request can use only one adapter"):
        adapter_of(model)
    assert is_adapted(model)
    assert not is_adapted(torch.nn.Linear(2, 2))


def test_a_run_hands_over_the_adapter_of_its_model() -> None:
    """Each update is a directory of its own, which is gone some updates later, and at the end all are."""
    model, server, seen = Adapted(), FakeVllmServer(loras=FakeAdapters()), list[Path]()
    assert server.loras is not None
    load = server.loras.load

    def noted(name: str, path: str) -> str:
        seen.append(Path(path))
        return load(name, path)

    server.loras.load = noted  # type: ignore[method-assign]
    prompts = [[3 + i, 7, 9] for i in range(80)]
    with ServerThread(server):
        with april.RolloutScheduler(run_of(server), prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            for n in range(1, 6):
                scheduler.next_batch()
                with torch.no_grad():
                    model.get_parameter("base_model.model.q_proj.lora_B.default.weight").add_(1.0)
                assert scheduler.weight_update(weights=model) == PolicyVersion(0, n)
                assert [path.exists() for path in seen][-2:] == [True] * min(n, 2)
                assert not any(path.exists() for path in seen[:-2])
            assert len(set(server.loras.present.values())) == 1
        assert not any(path.exists() for path in seen)
        assert not seen[0].parent.exists()
        assert server.loras.present == {}
    assert len(seen) == 5
    assert not server.violations


def test_an_update_that_fails_keeps_what_requests_run_under() -> None:
    """The directory of the present version is there still, for servers that read it again."""
    model, server = Adapted(), FakeVllmServer(loras=FakeAdapters())
    assert server.loras is not None
    prompts = [[3 + i, 7, 9] for i in range(80)]
    with ServerThread(server), april.RolloutScheduler(
        run_of(server), prompts=prompts, reward=lambda p, r: 1.0
    ) as scheduler:
        scheduler.weight_update(weights=model)
        (path,) = scheduler.engines[0].adapter_paths()  # type: ignore[attr-defined]
        server.loras.load = lambda name, path: "worker died"  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(april.EngineError, match="worker died; it keeps its old adapter"):
                scheduler.weight_update(weights=model)
        assert Path(path).exists()
        assert scheduler.version == PolicyVersion(0, 1)
        assert set(map(tuple, scheduler.next_batch().samples[0].versions.tolist())) == {(0, 1)}


def test_a_server_that_takes_no_adapters() -> None:
    """The sentence has its flags, and nothing has happened."""
    server = FakeVllmServer()
    with ServerThread(server), april.RolloutScheduler(
        run_of(server), prompts=[[3, 7, 9]] * 9, reward=lambda p, r: 1.0
    ) as scheduler:
        sentence = r"engine .* accepts none; start the server with VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW"
        with pytest.raises(april.ConfigError, match=sentence):
            scheduler.weight_update(weights=Adapted())
        assert scheduler.version == PolicyVersion(0, 0)


def test_directories_of_servers_elsewhere(tmp_path: Path) -> None:
    """A directory that servers read too holds one of april's own, which goes with it."""
    directories = AdapterDirectories(tmp_path / "shared")
    adapter = adapter_of(Adapted())
    paths = [directories.write(adapter) for _ in range(4)]
    assert len(set(paths)) == 4
    directories.remove_others({paths[0]})
    assert [Path(p).exists() for p in paths] == [True, False, True, True]
    directories.close()
    directories.close()
    assert list((tmp_path / "shared").iterdir()) == []
