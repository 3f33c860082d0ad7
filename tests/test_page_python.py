"""Python on the pages runs as it stands, on small models and simulated engines; what the reader has is given to it.

Other pages have tests of their own; test_page_blocks.py knows which.
"""

from __future__ import annotations

import ast
import inspect
import os
import queue
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real_schedulers
import torch
from fake_servers.vllm import FakeVllmServer
from page_blocks import Block, block
from ray_stand_in import CONFIG as RAY_CONFIG
from ray_stand_in import World, beside
from sglang_fixtures import ServerThread
from test_exporters import Kept, Words
from tiny_models import tiny_model
from tiny_tokenizers import ids_of, tokenizer

import april
import april.ray
from april.adapters import trl
from april.adapters.slime.samples import finish
from april.record.replay import replay
from tests.adapters import stand_in_areal, stand_in_trl

PROMPTS = [[1, 2 + i] for i in range(60)]
SMALL: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 30}


def run(found: Block, space: dict[str, Any]) -> dict[str, Any]:
    """The block, with what the reader of the page has; that, and what the block has made."""
    exec(compile(found.text, str(found), "exec"), space)  # noqa: S102 - this is what the tests are about
    return space


def reader(**more: Any) -> dict[str, Any]:
    """What most examples take as given."""
    return {
        "april": april, "config": april.Config(**SMALL), "prompts": PROMPTS, "model": tiny_model(),
        "reward": lambda prompt, response: float(len(response.tokens)), "torch": torch,
    } | more  # fmt: skip


def test_the_api_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler, an evaluation with its mean and error, and a rollout function, as docs/api.md has them."""
    space = run(block("api.md", "rollouts = april.RolloutScheduler"), reader())
    with space["rollouts"] as rollouts:
        assert len(rollouts.next_batch()) == 4
        run(block("rollouts.md", "rollouts.evaluate"), space | {"held_out_prompts": PROMPTS[:3]})
    mean, error = map(float, capsys.readouterr().out.split())
    assert 0 < mean <= 30
    assert 0 <= error < 30
    run(block("api.md", "async def rollout"), space)
    options = {"rollout": space["rollout"], "reward": space["reward"], "model": space["model"]}
    with april.RolloutScheduler(space["config"], prompts=PROMPTS, **options) as again:
        assert len(again.next_batch()) == 4


def test_the_embedded_engine() -> None:
    """The loop, which says when the weights have changed; every batch is of at most one update before."""
    batches: list[april.Batch] = []
    run(block("embedded.md", "optimizer.step()"), reader(train=lambda model, batch: batches.append(batch), steps=2))
    assert [batch.version.n for batch in batches] == [0, 1]


def test_a_reward_that_asks_the_reference() -> None:
    """As long as the adapter changes nothing, the term is 0."""
    space = reader(score=lambda prompt, response: 1.0)
    space["model"].disable_adapter = nullcontext
    run(block("embedded.md", "april.hold_model"), space)
    with run(block("api.md", "rollouts = april.RolloutScheduler"), space)["rollouts"] as rollouts:
        assert rollouts.next_batch().rewards == pytest.approx(1.0, abs=1e-4)


def test_an_autocast_around_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its precision is the engine's; this machine's is that of a CPU."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, *given, **more: autocast("cpu", *given, **more))
    with run(block("embedded.md", "torch.autocast"), reader())["rollouts"] as rollouts:
        assert len(rollouts.next_batch()) == 4


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's lines in one thread, a host's in another: the batch is made there, and both end."""
    monkeypatch.setenv("APRIL_TOKEN", april.new_token())
    at: queue.Queue[str] = queue.Queue()
    listening, joining = block("processes.md", "HostListener"), block("processes.md", "april.Host(")

    def listener(token: str, address: str) -> april.HostListener:
        assert address == "0.0.0.0:7000"
        made = april.HostListener(token)
        at.put(made.address)
        return made

    def host(name: str, *, address: str, **given: Any) -> april.Host:
        assert address == "10.0.0.1:7000"
        return april.Host(name, address=at.get(timeout=60), **given)

    here = SimpleNamespace(HostListener=listener, RolloutScheduler=april.RolloutScheduler, Host=host)
    space = reader(april=here, os=os)
    there = reader(april=here, os=os, engine=real_schedulers.engine())
    thread = threading.Thread(target=run, args=(joining, there))
    thread.start()
    run(listening, space)
    thread.join(60)
    assert not thread.is_alive()
    assert {s.engine for sample in space["batch"].samples for s in sample.segments} == {"host1/e0"}


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes these arguments, and both ranks get every response once between them, to the end of the data."""
    shares: list[april.Batch] = []
    monkeypatch.setattr(april.ray, "scheduler", inspect.signature(april.ray.scheduler).bind)
    started = run(block("processes.md", "april.ray.scheduler"), reader(config=RAY_CONFIG))["run"].arguments
    assert (started["name"], started["ranks"]) == ("my-run", 2)
    with World(ranks=started["ranks"]) as world:
        attach = inspect.signature(april.ray.attach)
        monkeypatch.setattr(april.ray, "attach", lambda *given: world.attach(attach.bind(*given).arguments["rank"]))
        space = {"train": shares.append, "hand_over": lambda: None}
        loop = block("processes.md", "april.ray.attach")
        beside(*(lambda rank=rank: run(loop, space | {"rank": rank}) for rank in range(2)))
    assert sorted(s.id for share in shares for s in share.samples) == [(g, i) for g in range(8) for i in range(3)]


def test_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is written where the page says, and can be replayed, however short."""
    monkeypatch.chdir(tmp_path)
    simulated = april.Config(**SMALL, engine={"kind": "simulated"})
    run(block("report.md", "record="), reader(config=simulated))
    assert replay(tmp_path / "runs" / "record.jsonl").core.context.batches == 0


def test_a_restart(tmp_path: Path) -> None:
    """What the first block saves, the second goes on from, with weights trained on one batch: each prompt once."""
    save, load = block("restarts.md", "torch.save"), block("restarts.md", "torch.load")
    small = {"rollout_batch_size": 1, "over_sampling_batch_size": 2, "n_samples_per_prompt": 1}
    config = april.Config(**small, max_response_len=60)
    space = reader(path=tmp_path / "checkpoint.pt", config=config, prompts=PROMPTS[:4])
    with april.RolloutScheduler(config, prompts=PROMPTS[:4], reward=space["reward"], model=space["model"]) as first:
        batch = first.next_batch()
        run(save, space | {"rollouts": first, "batch": batch})
    space["rest"] = []
    more = "    rest += [rollouts.next_batch() for _ in range(3)]\n"
    run(Block("restarts.md", load.number, "python", load.text + more), space)
    assert space["rollouts"].version == (1, 1)
    assert sorted(s.prompt.position for b in (batch, *space["rest"]) for s in b.samples) == [0, 1, 2, 3]


def test_a_restart_on_servers(tmp_path: Path) -> None:
    """Either of the two lines: servers load the checkpoint's weights, or a function hands them over."""
    (tmp_path / "w1").mkdir()
    (tmp_path / "w1" / "model.safetensors").touch()
    handed: list[str] = []
    with ServerThread(server := FakeVllmServer()):
        config = april.Config(**SMALL, engine={"kind": "vllm", "urls": [server.url]})
        for line in block("restarts.md", "transfer=function").text.splitlines():
            with april.RolloutScheduler(config, prompts=PROMPTS, reward=lambda prompt, response: 0.0) as rollouts:
                rollouts.next_batch()
                saved = rollouts.state_dict()
            with april.RolloutScheduler(config, prompts=PROMPTS, reward=lambda prompt, response: 0.0) as rollouts:
                space = {
                    "saved": {"rollouts": saved},
                    "directory": tmp_path / "w1",
                    "function": lambda: handed.append(""),
                }
                run(Block("restarts.md", 2, "python", line), space | {"rollouts": rollouts})
                assert rollouts.version.incarnation == 1
    assert (server.weights, handed) == ("w1", [""])


def test_stop_strings() -> None:
    """The function's own are taken in the place of the configured ones."""
    words = tokenizer("text")
    given = reader(prompts=[ids_of("text", "The answer is")] * 9, tokenizer=words)
    given["model"] = tiny_model(vocab_size=words.get_vocab_size())
    space = run(block("sampling.md", "</tool_call>"), given)
    with space["rollouts"] as rollouts:
        batch = rollouts.next_batch()
    assert space["config"].sampling.stop == ("</answer>",)
    assert len(batch.group_sizes) == 8


def test_metadata_of_slime() -> None:
    """The keys and the kinds of values that the adapter writes."""
    shown = ast.literal_eval(block("slime.md", '"spans"').text)
    with real_schedulers.scheduler() as rollouts:
        batch = rollouts.next_batch()
    sample = SimpleNamespace(loss_mask=None, response_length=len(batch.samples[0].tokens), metadata=None)
    finish(sample, batch.samples[0], batch.version, {}, None, mask_offpolicy=False)
    written = sample.metadata["april"]
    assert {key: type(v) for key, v in written.items()} == {key: type(v) for key, v in shown.items()}
    assert [[type(v) for v in span] for span in written["spans"]] == [[int, int, str]]


def test_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One import and one argument, before a trainer that calls as TRL's: a batch of 32 groups of 8 is trained."""

    class Trainer(stand_in_trl.GRPOTrainer):
        def __init__(
            self, model: str, reward_funcs: Any, args: dict[str, int], train_dataset: Any, rollout_func: Any
        ) -> None:
            assert model == "Qwen/Qwen3-4B"
            rows = args["per_device_train_batch_size"] * args["gradient_accumulation_steps"]
            more = {
                "num_generations": args["num_generations"],
                "generation_batch_size": rows,
                "max_completion_length": 4,
            }
            super().__init__(tiny_model(), rollout_func, train_dataset, reward_funcs=[reward_funcs], **more)

        def train(self) -> None:  # type: ignore[override]
            super().train(steps=1)

    monkeypatch.setitem(vars(trl), "AprilGRPOTrainer", trl.april_trainer(Trainer))
    space = run(
        block("trl.md", "AprilGRPOTrainer"),
        {"GRPOConfig": dict, "dataset": stand_in_trl.prompts(200),
         "reward": lambda prompts, completions, **columns: [float(len(c)) for c in completions]},
    )  # fmt: skip
    (rows,) = space["trainer"].scored
    assert len(rows) == 256
    assert len({row["answer"] for row in rows}) == 32


def test_areal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import gives AReaL's own trainer with april's executor in it."""
    stand_in_areal.install(monkeypatch)
    assert issubclass(run(block("areal.md", "import PPOTrainer"), {})["PPOTrainer"], stand_in_areal.PPOTrainer)


def test_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page are made with what stands there, and closed; the packages are another test's."""
    made: dict[Any, Kept] = {}
    monkeypatch.setattr(april.export, "TensorBoard", lambda given: made.setdefault(given, Kept()))
    run(block("report.md", "exporters="), reader())
    assert {given: exporter.closed for given, exporter in made.items()} == {"runs/tensorboard": 1}


def test_metrics_and_texts_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """A row of one's own run, and four responses with their rewards."""
    rows: list[tuple[dict[str, float], int]] = []
    with real_schedulers.scheduler() as rollouts:
        batch = rollouts.next_batch()
    own = SimpleNamespace(log=lambda row, step: rows.append((row, step)))
    run(block("report.md", "import named"), {"run": own, "loss": 0.5, "step": 7, "batch": batch})
    assert rows[0][0] == {"loss": 0.5} | {f"april/{name}": v for name, v in batch.metrics.items()}
    run(block("report.md", "sample_texts(batch"), {"batch": batch, "tokenizer": Words()})
    assert len(capsys.readouterr().out.splitlines()) == 4
