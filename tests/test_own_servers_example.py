"""``examples/own_servers.py`` runs as it stands, against fake servers of every kind that it names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_servers.openai import FakeOpenAIServer
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import ServerThread
from test_examples import loaded

import april

KNOWN = ["--vocab-size", "512", "--eos-token-ids", "2"]
STEPS = 4


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded("own_servers")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a server would load."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}", "utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def arguments(kind: str, servers: list[Any], model: Path, shared: Path) -> list[str]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return [
        "--kind", kind, "--urls", *urls, "--model", str(model), "--shared-dir", str(shared), "--steps", str(STEPS),
        *KNOWN,
    ]  # fmt: skip


@pytest.mark.parametrize("way", [[], ["--continuous"]], ids=["stepwise", "continuous"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_it_trains_on_two_servers(
    kind: str, way: list[str], example: ModuleType, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every server has loaded the weights of every step from the shared directory, of which only the last is left."""
    make: Any = FakeVllmServer if kind == "vllm" else FakeSglangServer
    servers = [make(max_running=4, turns=5) for _ in range(2)]
    with ServerThread(*servers):
        example.main(arguments(kind, servers, model, tmp_path / "shared") + way)

        for server in servers:
            assert not server.violations
            assert server.weights == f"step_{STEPS}"
            assert server.label.startswith(f"v0.{STEPS}-")
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [f"step_{STEPS}"]
    assert (tmp_path / "shared" / f"step_{STEPS}" / "model.safetensors").read_bytes() == b"weights"
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()[:STEPS]] == [f"step {n + 1}" for n in range(STEPS)]
    assert f"now version (0, {STEPS})" in printed or f"now version 0.{STEPS}" in printed


def test_it_trains_on_a_server_that_loads_nothing_itself(
    example: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OpenAI-compatible server: the trainer hands each step's directory over, while nothing generates."""
    handed: list[str] = []
    monkeypatch.setattr(example.Trainer, "hand_over", lambda self, directory: handed.append(directory.name))
    server = FakeOpenAIServer()
    with ServerThread(server):
        example.main([*arguments("openai", [server], model, tmp_path / "shared"), "--max-len", "4096"])

    assert handed == [f"step_{n + 1}" for n in range(STEPS)]


@pytest.mark.parametrize(("kind", "way"), [("vllm", []), ("openai", []), ("vllm", ["--continuous"])])
def test_it_goes_on_after_it_died(
    kind: str, way: list[str], example: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In the middle of step 3; the servers, started anew, get step 2's weights, and no number is trained on twice."""
    handed: list[str] = []
    trained: list[int] = []
    loaded: list[str] = []
    monkeypatch.setattr(example.Trainer, "load", lambda self, directory: loaded.append(directory.name))
    monkeypatch.setattr(example.Trainer, "hand_over", lambda self, directory: handed.append(directory.name))
    update = example.Trainer.update

    def dies(self: Any, batch: april.Batch) -> float:
        if len(trained) == 8 and not loaded:
            raise KeyboardInterrupt
        trained.extend(s.prompt.data["number"] for s in batch.samples[::4])
        return float(update(self, batch))

    monkeypatch.setattr(example.Trainer, "update", dies)
    shared = tmp_path / "shared"
    with pytest.raises(SystemExit):
        example.main([*arguments(kind, ["http://127.0.0.1:9"], model, shared), "--resume"])
    assert "has no complete step" in capsys.readouterr().err
    more = [] if kind == "vllm" else ["--max-len", "4096"]
    for flags in ([], ["--resume"]):
        server = FakeVllmServer() if kind == "vllm" else FakeOpenAIServer()
        with ServerThread(server):
            words = [*arguments(kind, [server], model, shared), *more, *flags, *way]
            if flags:
                example.main(words)
            else:
                with pytest.raises(KeyboardInterrupt):
                    example.main(words)

    assert loaded == ["step_2"]
    assert "now version 1.4" in capsys.readouterr().out
    assert len(trained) == len(set(trained)) == 4 * STEPS
    assert [path.name for path in shared.iterdir()] == [f"step_{STEPS}"]
    if kind == "openai":
        assert handed == ["step_1", "step_2", "step_2", "step_3", "step_4"]


def test_weights_that_are_not_taken_leave_the_last_good_ones(
    example: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot load step 3 ends the run with its reason; the directory of step 2 is still there."""
    server = FakeVllmServer()
    save = example.Trainer.save

    def broken(self: Any, directory: Path) -> None:
        save(self, directory)
        if directory.name == "step_3":
            (directory / "model.safetensors").unlink()

    monkeypatch.setattr(example.Trainer, "save", broken)
    with ServerThread(server), pytest.raises(april.EngineError, match="step_3: the directory contains no weights"):
        example.main(arguments("vllm", [server], model, tmp_path / "shared"))

    assert server.weights == "step_2"
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["step_2", "step_3"]
