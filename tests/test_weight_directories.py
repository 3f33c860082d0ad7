"""A directory counts as a version only while it holds what was loaded as that version."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hash_engine import HashEngine, Server, conversation, longer, next_token, save
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.core.versions import FIRST_VERSION
from april.core.weight_updates import weights_of
from april.engines.http.weight_directories import content_of
from april.testing import rollouts, run_virtual

pytestmark = on_virtual_time

# ---------------------------------------------------------------- what stands for a directory


def _same_size_and_times(model: Path) -> None:
    """As by a tool that sets times: only the system's own time of the change tells."""
    stat = model.stat()
    model.write_bytes(b"b" * stat.st_size)
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _replaced(model: Path) -> None:
    """By a rename, as careful writers do."""
    (new := model.with_name("new")).write_bytes(model.read_bytes()[:-1] + b"b")
    new.rename(model)


def _one_byte_in_the_middle(model: Path) -> None:
    with model.open("r+b") as file:
        file.seek(500_000)
        file.write(b"b")


@pytest.mark.parametrize(
    "change",
    [
        _same_size_and_times,
        _replaced,
        _one_byte_in_the_middle,
        lambda model: model.with_name("model-2.safetensors").write_bytes(b"a"),
        lambda model: model.unlink() or model.with_name("other").write_bytes(b"a"),
        lambda model: model.with_name("folder").joinpath("part").write_bytes(b"b"),
        lambda model: model.write_bytes(model.read_bytes()),
    ],
    ids=["times set back", "replaced", "one byte", "added", "removed", "in a folder", "the same again"],
)
def test_a_directory_that_was_written_to_is_another_one(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    """Whatever was written, replaced, added or removed; nothing else does."""
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"a" * 1_000_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part").write_bytes(b"a")
    before = content_of(str(tmp_path))
    (tmp_path / ".lock").write_bytes(b"a")
    assert content_of(str(tmp_path)) == before != ""
    change(model)
    assert content_of(str(tmp_path)) not in (before, "")


def test_a_link_that_points_elsewhere_is_another_directory(tmp_path: Path) -> None:
    """``latest`` of many trainers."""
    for name in ("1", "2"):
        save(tmp_path / name, "the same")
    (latest := tmp_path / "latest").symlink_to(tmp_path / "1")
    before = content_of(str(latest))
    latest.unlink()
    latest.symlink_to(tmp_path / "2")
    assert content_of(str(latest)) not in (before, "")


def test_what_cannot_be_read_stands_for_nothing(tmp_path: Path) -> None:
    """A directory that is not here, one without files, and one with files that are gone."""
    assert content_of(str(tmp_path / "none")) == content_of(str(tmp_path)) == ""
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    assert content_of(str(tmp_path)) == ""


def test_large_files_are_not_read_whole(tmp_path: Path) -> None:
    """A terabyte costs what a megabyte costs."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    assert content_of(str(tmp_path))


# ---------------------------------------------------------------- servers that come back


class Trainer:
    """Two servers of one machine, and a trainer that knows which weights each version means."""

    def __init__(self, directory: Path, *, engines: type[HashEngine] = HashEngine) -> None:
        self.directory = directory
        self.seeds: dict[str, int | None] = {}
        self.servers = [Server(), Server()]
        self.engines = [engines(f"s{i}", self.seeds, server) for i, server in enumerate(self.servers)]
        self.named = {FIRST_VERSION: "start"}

    def rollouts(self) -> Any:
        config = april.Config(
            rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=60, max_staleness=8, max_in_flight=8,
            generation="continuous", engine={"kind": "simulated"},
        )  # fmt: skip
        prompts = [[1, 2 + i] for i in range(900)]
        return rollouts(config, engines=self.engines, prompts=prompts, reward=lambda p, r: 1.0)

    def check(self, batch: Batch) -> set[str]:
        """Every token is of the weights that its version names; returns the engines that made some of the present."""
        for sample in batch.samples:
            made = conversation(sample.prompt.token_ids)
            for s in sample.segments:
                for i in range(s.start, s.start + s.count):
                    token, logprob = next_token(self.named[s.version], self.seeds[s.attempt_id], made)
                    assert (token, logprob) == (sample.tokens[i], sample.logprobs[i]), f"{sample.id} of {s.version}"
                    made = longer(made, token)
        return {s.engine for sample in batch.samples for s in sample.segments if s.version == batch.version}

    async def save_and_crash(self, weights: str, name: str) -> str:
        """A server is started anew after the trainer has saved, and before it says so."""
        path = save(self.directory / name, weights)
        self.servers[0].restart(1.0)
        await asyncio.sleep(20.0)
        return path


@pytest.mark.parametrize(
    "names", [("weights",), ("a", "b"), tuple("abcdef")], ids=["written over", "in turns", "fresh ones"]
)
async def test_a_directory_that_was_written_over_is_not_the_old_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    """The server that was started anew waits for the next update; a metric and one warning say so.

    With a directory for each version, or two that take turns, the server is back at once.
    """
    trainer, over = Trainer(tmp_path), len(names) == 1
    async with trainer.rollouts() as run:
        for step in range(6):
            batch = await run.next_batch()
            trainer.check(batch)
            path = await trainer.save_and_crash(f"w{step}", names[step % len(names)])
            assert over or trainer.servers[0].weights == trainer.named[run.version]
            ahead = await run.next_batch()
            trainer.check(ahead)
            assert ahead.metrics["engine/s0/waits_for_update"] == (over and step > 0)
            trainer.named[await run.weight_update(path=path, trained=batch.id)] = f"w{step}"
            await run.weight_update(path=path, trained=ahead.id)
            trainer.named[run.version] = f"w{step}"
            assert all(server.weights == f"w{step}" for server in trainer.servers)
    warned = [r.getMessage() for r in caplog.records if "waits for the next weight update" in r.getMessage()]
    assert len(warned) == 5 * over
    assert not over or warned[0] == (
        f"engine s0 does not have the current weights and waits for the next weight update: {tmp_path / 'weights'} "
        "holds weights other than those of version 0.2"
    )


def test_a_directory_that_nobody_here_can_read_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor lost without a word; an engine that reads it where it is, at an address, may say what it holds."""
    address = "s3://bucket"

    class Elsewhere(HashEngine):
        """Its paths are of another machine."""

        async def update_weights(self, version: april.PolicyVersion, path: str | None = None) -> None:
            await super().update_weights(version, path and path.replace(address, str(tmp_path)))

    class Telling(Elsewhere):
        async def content_of(self, path: str) -> str:
            return content_of(path.replace(address, str(tmp_path)))

    async def program(engines: type[HashEngine]) -> str:
        trainer = Trainer(tmp_path, engines=engines)
        async with trainer.rollouts() as run:
            save(tmp_path / "1", "w1")
            trainer.named[await run.weight_update(path=f"{address}/1")] = "w1"
            trainer.check(await run.next_batch())
            trainer.servers[0].restart(1.0)
            trainer.check(await run.next_batch())
            return trainer.servers[0].weights

    assert run_virtual(program(Telling)) == "w1"
    assert not any("waits for" in r.getMessage() for r in caplog.records)
    assert run_virtual(program(Elsewhere)) == "start"
    assert caplog.records[-1].getMessage() == (
        "engine s0 does not have the current weights and waits for the next weight update: april cannot read here "
        "whether s3://bucket/1 still holds the current weights"
    )


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_directory_that_is_written_while_it_is_loaded(tmp_path: Path, all_of_them: bool) -> None:
    """Nobody knows what an engine has of it: it is left out of the update, which fails where no other has loaded it."""
    trainer = Trainer(tmp_path)

    async def overwrite(engine: HashEngine, path: str) -> None:
        await asyncio.sleep(5.0)
        save(Path(path), "later")

    async with trainer.rollouts() as run:
        batch = await run.next_batch()
        for engine in trainer.engines[: 2 if all_of_them else 1]:
            engine.on_load = overwrite
        update = run.weight_update(path=save(tmp_path / "1", "w1"), trained=batch.id)
        if all_of_them:
            with pytest.raises(april.EngineError, match="1 was written while engine s0 loaded it"):
                await update
            assert run.version == FIRST_VERSION
        else:
            trainer.named[await update] = "w1"
            assert trainer.check(await run.next_batch()) == {"s1"}
        for engine in trainer.engines:
            engine.on_load = None
        trainer.named[await run.weight_update(path=save(tmp_path / "2", "w2"))] = "w2"
        for _ in range(3):
            used = trainer.check(await run.next_batch())
        assert used == {"s0", "s1"}


# ---------------------------------------------------------------- engines that loaded different contents


def test_the_weights_of_a_directory_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """Where it lies, when it was copied and what else is there do not count; what is in its weights does."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        save(place, "w1")
    (there / "optimizer.pt").write_text("only here")
    os.utime(there / "model.safetensors", (1, 1))
    assert weights_of(content_of(str(here))) == weights_of(content_of(str(there))) != ""
    assert content_of(str(here)) != content_of(str(there))
    save(there, "w2")
    assert weights_of(content_of(str(here))) != weights_of(content_of(str(there)))
    (here / "model.safetensors").rename(here / "model-1.safetensors")
    save(there, "w1")
    assert weights_of(content_of(str(here))) != weights_of(content_of(str(there)))
    (tmp_path / "model.gguf").write_text("one file, which is no directory")
    assert weights_of(content_of(str(tmp_path / "model.gguf")))


@pytest.mark.parametrize("right", ["one of them", "neither"])
async def test_engines_that_loaded_different_weights_are_not_of_one_version(
    tmp_path: Path, right: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is written over exactly between two loads: each of them sees nothing wrong.

    Where the trainer's process can tell which weights are meant, the other engine is left out; else the update fails.
    """
    trainer = Trainer(tmp_path)
    gate = asyncio.Event()

    first, second = trainer.engines

    async with trainer.rollouts() as run:
        calls = run._driver.executor.engine_control
        reads = calls._content_of
        seen = {"s0": 0, "s1": 0}

        async def read(engine: Any, path: str) -> str:
            if path.endswith("/2"):
                return str(await reads(engine, path))
            seen[engine.name] += 1
            if engine is second and seen["s1"] == 1:
                await gate.wait()
                save(Path(path), "later")
            if engine is first and seen["s0"] == 1 and right == "neither":
                save(Path(path), "w2")
            content = await reads(engine, path)
            if engine is first and seen["s0"] == 2:
                gate.set()
            return str(content)

        monkeypatch.setattr(type(calls), "_content_of", lambda _, engine, path: read(engine, path))
        batch = await run.next_batch()
        update = run.weight_update(path=save(tmp_path / "1", "w1"), trained=batch.id)
        if right == "neither":
            with pytest.raises(april.EngineError, match="held other weights when engine s0 loaded it"):
                await update
            assert run.version == FIRST_VERSION
        else:
            trainer.named[await update] = "w1"
            assert trainer.check(await run.next_batch()) == {"s0"}
            assert "engine s1 is left out of the weight update" in caplog.text
        assert (first.server.weights, second.server.weights) == ("w2" if right == "neither" else "w1", "later")
        trainer.named[await run.weight_update(path=save(tmp_path / "2", "w9"))] = "w9"
        for _ in range(3):
            used = trainer.check(await run.next_batch())
        assert used == {"s0", "s1"}
