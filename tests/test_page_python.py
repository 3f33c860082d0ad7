"""Python on the pages runs as it stands, on small models and simulated engines; what the reader has is given to it."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import real_schedulers
import torch
import transformers
from conformance_subjects import fake_subject
from core_machine import CoreMachine, settings
from fake_async_llm import FakeAsyncLLM, install_vllm
from fake_servers.vllm import FakeVllmServer
from pages import Block, executes, text_of
from rank_threads import CONFIG as RAY_CONFIG
from rank_threads import beside
from server_fixtures import ServerThread
from test_examples import loaded
from test_exporters import Kept, Words
from test_ray_ranks import World
from tiny_models import VOCAB_SIZE, tiny_model
from tiny_tokenizers import ids_of, tokenizer
from tiny_vision import VOCAB, encoded, picture, tiny_processor

import april
import april.ray
from april import testing
from april.adapters import trl
from april.adapters.slime.samples import finish
from april.core.rollout_core import RolloutCore
from april.driver.loop_thread import LoopThread
from april.engines.kinds import factory
from april.record.replay import replay
from april.record.run_status import RunStatus, WaitReason
from april.testing import FakeEngine, Fault, FaultScript, conformance, run_virtual
from april.view.progress import ProgressLine
from april.view.run_data import read_run
from tests.adapters import stand_in_areal, stand_in_trl, stand_in_trl_async

PROMPTS = [[1, 2 + i] for i in range(60)]
SMALL: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 30}
SERVED_VOCAB = 512
"""Size of the fake server's vocabulary."""


def reader(**more: Any) -> dict[str, Any]:
    """What most examples take as given."""
    return {
        "april": april, "config": april.Config(**SMALL), "prompts": PROMPTS, "model": tiny_model(),
        "reward": lambda prompt, response: float(len(response.tokens)), "torch": torch,
    } | more  # fmt: skip


class Tokenizer:
    """A character is a token; it has a chat template, as those of transformers since 5."""

    eos_token_id = 2
    pad_token_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def apply_chat_template(self, chat: Any, add_generation_prompt: bool, return_dict: bool) -> dict[str, list[int]]:
        assert add_generation_prompt
        assert return_dict
        text = chat[-1]["content"]
        return {"input_ids": self.encode(text), "attention_mask": [1] * len(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + ord(c) % (self.vocab_size - 3) for c in text]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Every third token is no number."""
        return " ".join(str(int(i) % 10) if int(i) % 3 else "x" for i in ids)

    def convert_tokens_to_ids(self, token: str) -> int:
        assert token == "<|im_end|>"  # noqa: S105 - no secret
        return 5


@executes("images.md-1", "images.md-2")
def test_images_as_on_the_page(code: list[Block], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch of a model that sees, with the default function and with one that shows it what it drew."""
    pytest.importorskip("PIL")
    pytest.importorskip("renderers")
    monkeypatch.chdir(tmp_path)
    picture().save("cats.png")
    example = loaded("own_loop_images")
    given = reader(model=example.tiny_model(), processor=example.tiny_processor(), draw=lambda text: encoded())
    scheduler, calls = code
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=60)
    space = scheduler.run(given | {"config": config})
    with space["rollouts"] as rollouts:
        (one, _) = rollouts.next_batch().samples
        assert [Path(p.attachment.path).name for p in one.attached] == ["cats.png"]
        assert april.attachment_bytes(one.attached[0].attachment) == Path("cats.png").read_bytes()
    function = calls.run({"draw": lambda text: encoded()})["rollout"]
    chat = [{**prompt, "images": [encoded()]} for prompt in space["prompts"]]
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=400)
    engine = FakeEngine("e", responses=lambda request: [9, 2], vocab_size=VOCAB, eos_token_id=2)

    async def program() -> None:
        async with testing.rollouts(
            config, prompts=chat, rollout=function, reward=lambda p, r: 1.0, engines=[engine],
            processor=tiny_processor(),
        ) as run:  # fmt: skip
            for sample in (await run.next_batch()).samples:
                assert [p.attachment.data for p in sample.attached] == [encoded()] * 2
            run.audit()

    run_virtual(program())


@executes("routed_experts.md-0")
def test_experts_as_on_the_page(code: list[Block], capsys: pytest.CaptureFixture[str]) -> None:
    """As pasted: a row for every token of prompt and response but the first, in the samples and in the arrays."""
    space = code[0].run({})
    printed = [line for line in capsys.readouterr().out.splitlines() if "uint8" in line]
    assert printed == ["3 20 (22, 2, 2) uint8"] * 4
    assert space["experts"].shape == (4, 23, 2, 2)


# ---------------------------------------------------------------- README, tutorial


@executes("README.md-1")
def test_the_first_program_runs_as_pasted(
    code: list[Block], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tiny model learns, on tokens of which some are older; its record says how far off each batch was."""
    monkeypatch.chdir(tmp_path)
    space = code[0].run({})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    rewards = [float(re.findall(r"reward ([\d.]+)", line)[0]) for line in lines]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2
    assert space["batch"].metrics["staleness_max"] >= 1
    assert len({report.id for report in read_run(tmp_path / "runs" / "first.jsonl").reports}) == 10


@executes("README.md-5")
def test_the_engine_field_in_the_readme_is_one(code: list[Block]) -> None:
    """The lines for servers make a configuration with two engines, of each kind that they name."""
    text = code[0].text
    for kind in ("vllm", "sglang", "openai"):
        assert f'"{kind}"' in text
        space = Block("README.md", 5, "python", text.replace('"vllm"', f'"{kind}"', 1)).run({"april": april})
        assert (space["config"].engine.kind, len(space["config"].engine.urls)) == (kind, 2)


@pytest.mark.filterwarnings("ignore:(policy_loss|off_policy_report)")  # the server in place of vLLM has no model
@executes("tutorial.md-1", "tutorial.md-5", "tutorial.md-6", "tutorial.md-3")
def test_the_tutorial_runs_as_pasted(
    code: list[Block], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Alone, on a server that loads the weights of every step, and as a rank: 25 steps each, some tokens are older."""

    class Sums(list[dict[str, Any]]):
        """Entries as those of reasoning-gym, which score an answer: 1 for the very answer."""

        def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
            return float(answer == entry["answer"])

    monkeypatch.chdir(tmp_path)
    entries = Sums({"question": f"{i} + 1 = ?", "answer": str(i % 10)} for i in range(900))
    gym = SimpleNamespace(create_dataset=lambda name, **given: entries)
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda model: Tokenizer(SERVED_VOCAB))
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda model, dtype: tiny_model(vocab_size=SERVED_VOCAB)
    )
    begin, store = torch.distributed.init_process_group, torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda kind: begin(kind, store=store, rank=0, world_size=1)
    )
    *programs, shown = code
    with ServerThread(server := FakeVllmServer()):
        for program, name in zip(programs, ("train", "train_servers", "train_ranks"), strict=True):
            monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
            text = program.text.replace("http://127.0.0.1:8000", server.url)
            text = text.replace('"eos_token_ids"', f'"vocab_size": {SERVED_VOCAB}, "eos_token_ids"')  # it has no files
            Block("tutorial.md", program.number, "python", text).run(vars(module))
            if name == "train_servers":
                module.WEIGHTS = str(tmp_path)  # type: ignore[attr-defined]
            module.main()
    assert server.weights == "0"
    assert len({report.id for report in read_run(tmp_path / "runs" / "train.jsonl").reports}) == 25
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward ")]
    assert len(lines) == 75
    assert any(" 0% from older" not in line for line in lines)
    assert len({re.sub(r"[\d.]+", "0", line) for line in [*lines, *shown.text.splitlines()]}) == 1


# ---------------------------------------------------------------- how-to pages


@executes("settings.md-1")
def test_the_flags_in_the_docs_work(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """The argparse lines, with a command line."""
    flags = ["--rollout-batch-size", "4", "--over-sampling-batch-size", "6", "--max-response-len", "9"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    space = code[0].run({"april": april, "argparse": argparse})
    assert space["config"] == april.Config(rollout_batch_size=4, over_sampling_batch_size=6, max_response_len=9)


@executes("api.md-0", "api.md-5", "rollouts.md-7")
def test_the_api_in_short(code: list[Block], capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler, an evaluation with its mean and error, and a rollout function."""
    scheduler, rollout, evaluation = code
    space = scheduler.run(reader())
    with space["rollouts"] as rollouts:
        assert len(rollouts.next_batch()) == 4
        evaluation.run(space | {"held_out_prompts": PROMPTS[:3]})
    mean, error = map(float, capsys.readouterr().out.split())
    assert 0 < mean <= 30
    assert 0 <= error < 30
    rollout.run(space)
    options = {"rollout": space["rollout"], "reward": space["reward"], "model": space["model"]}
    with april.RolloutScheduler(space["config"], prompts=PROMPTS, **options) as again:
        assert len(again.next_batch()) == 4


@executes("embedded.md-0")
def test_the_embedded_engine(code: list[Block]) -> None:
    """The loop, which says when the weights have changed; every batch is of at most one update before."""
    batches: list[april.Batch] = []
    code[0].run(reader(train=lambda model, batch: batches.append(batch), steps=2))
    assert [batch.version.n for batch in batches] == [0, 1]


@executes("embedded.md-1", "api.md-0")
def test_a_reward_that_asks_the_reference(code: list[Block]) -> None:
    """As long as the adapter changes nothing, the term is 0."""
    space = reader(score=lambda prompt, response: 1.0)
    space["model"].disable_adapter = nullcontext
    for block in code:
        block.run(space)
    with space["rollouts"] as rollouts:
        assert rollouts.next_batch().rewards == pytest.approx(1.0, abs=1e-4)


@executes("embedded.md-2")
def test_an_autocast_around_the_scheduler(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its precision is the engine's; this machine's is that of a CPU."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, *given, **more: autocast("cpu", *given, **more))
    with code[0].run(reader())["rollouts"] as rollouts:
        assert len(rollouts.next_batch()) == 4


@executes("rollouts.md-0", "rollouts.md-1", "rollouts.md-2", "rollouts.md-6")
def test_rollouts_as_on_the_page(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with data, another end of a turn, a reward on text, and a tool."""
    first, end, reward, tool = code
    space: dict[str, Any] = {"april": april, "MODEL": "model", "torch": torch}
    with monkeypatch.context() as patch:
        named = SimpleNamespace(from_pretrained=lambda model: Tokenizer(VOCAB_SIZE))
        patch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=named))
        first.run(space)
    end.run(space)
    assert space["config"].sampling.stop_token_ids == (5,)
    space["dataset"] = [{"question": f"What is {i}?", "answer": "a"} for i in range(9)]
    space["config"] = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=300)
    space["model"] = tiny_model()
    with reward.run(space)["rollouts"] as rollouts:
        batch = rollouts.next_batch()
    assert {s.reward for s in batch.samples} <= {0.0, 1.0}
    assert batch.samples[0].prompt.data == {"answer": "a"}

    async def run_tool(given: Any) -> list[int]:
        return [5, 6, 7]

    with april.RolloutScheduler(
        space["config"], prompts=[[3, 4, 5]] * 2, reward=None, model=tiny_model(), check=True,
        rollout=tool.run({"run_tool": run_tool})["rollout"],
    ) as rollouts:  # fmt: skip
        for sample in rollouts.next_batch().samples:
            assert sample.tokens[sample.loss_mask == 0].tolist() == [5, 6, 7]


@executes("rollouts.md-3", "rollouts.md-4", "rollouts.md-5", "distillation.md-2", "distillation.md-3")
def test_rewards_of_several_parts_as_on_the_pages(code: list[Block]) -> None:
    """Parts with a total and with weights, values per turn and per token, GDPO's sum, and a teacher's loss."""
    graded, judged, gdpo, teacher, loss = code
    prompts = [{"token_ids": [3, 4], "answer": "a"}] * 4
    options: dict[str, Any] = {"prompts": prompts, "tokenizer": Tokenizer(VOCAB_SIZE)}

    async def half(conversation: april.Response) -> Any:
        return conversation.logprobs / 2

    space = {"april": april, "teacher_logprobs": half}
    batches = {}
    for block, name in ((graded, "graded"), (judged, "judged"), (teacher, "reward")):
        config = april.Config(rollout_batch_size=1, n_samples_per_prompt=4, max_response_len=30)
        function = block.run(space)[name]
        with april.RolloutScheduler(config, reward=function, model=tiny_model(), **options) as rollouts:
            batches[name] = rollouts.next_batch()
    assert set(batches["graded"].parts) == {"correct", "format"}
    assert gdpo.run(space | {"batch": batches["graded"]})["advantages"].shape == (4,)
    found = batches["judged"]
    assert found.padded()["length"].tolist() == [[length] for length in found.lengths.tolist()]
    assert found.advantages(of="length").shape == found.padded()["logprobs"].shape
    padded = batches["reward"].padded(left_pad_prompts=True)
    now = torch.tensor(padded["logprobs"], requires_grad=True)
    loss.run(space | {"batch": batches["reward"], "now": now})["loss"].backward()
    assert now.grad is not None
    tokens = padded["loss_mask"] == 1
    assert (now.grad.numpy()[tokens] < 0).all()  # the teacher finds every token likelier, so all of them are raised


@executes("distillation.md-3")
def test_older_tokens_distil_towards_the_teacher_alone(code: list[Block]) -> None:
    """The expected gradient is that of the divergence of the present student, whichever weights sampled the tokens.

    Each row is another token of a uniform older student, so the mean over the rows is the expectation.
    """
    scores = torch.tensor([0.3, -0.2, 0.1, 0.0, -0.4, 0.2], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.5, -1.0, 0.0, 2.0, 0.3, -0.6], dtype=torch.float64).log_softmax(0)
    now = scores.log_softmax(0)
    (expected,) = torch.autograd.grad((now.exp() * (now - teacher)).sum(), scores, retain_graph=True)
    uniform = torch.zeros(6, 1).log_softmax(0)
    rows = {"teacher_logprobs": teacher[:, None], "logprobs": uniform, "loss_mask": torch.ones(6, 1)}
    batch = SimpleNamespace(padded=lambda **_: {name: rows[name].numpy() for name in rows})
    loss = code[0].run({"april": april, "batch": batch, "now": now[:, None]})["loss"]
    (found,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@executes("quorum.md-1")
def test_advantages_as_on_the_page(code: list[Block]) -> None:
    """One of each response, one weight of each token, which together make a mean over responses."""
    found = CoreMachine(settings(n=2, samples=3), lambda g, i: 2 + g + i).step(random.Random(0))
    space = code[0].run({"april": april, "rollouts": SimpleNamespace(next_batch=lambda: found)})
    assert space["advantages"].shape == (6,)
    assert space["weights"].shape == space["arrays"]["response_ids"].shape
    assert float(space["weights"].sum()) == pytest.approx(1.0)


@executes("staleness.md-1")
def test_continuous_generation_as_on_the_page(code: list[Block], tmp_path: Path) -> None:
    """Steps on a server: it generates while the trainer trains, and has the weights of every step."""
    server = FakeVllmServer(max_running=8, turns=5)
    batches: list[april.Batch] = []

    class Model:
        def save_pretrained(self, directory: str) -> None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            Path(directory, "config.json").write_text("{}", "utf-8")
            Path(directory, "model.safetensors").write_bytes(b"weights %d" % len(batches))

    with ServerThread(server):
        engine = {"kind": "vllm", "urls": [server.url], "vocab_size": SERVED_VOCAB, "eos_token_ids": [2]}
        config = april.Config(
            rollout_batch_size=8, max_response_len=400, generation="continuous", max_staleness=4, engine=engine
        )
        asked, reward = ([1, 2 + i % 90] for i in range(10**6)), lambda prompt, response: 0.0
        with april.RolloutScheduler(config, prompts=asked, reward=reward) as rollouts:
            for step in range(4):
                code[0].run({
                    "rollouts": rollouts, "model": Model(), "train": lambda model, batch: batches.append(batch),
                    "step": step, "directory": tmp_path / "w",
                })  # fmt: skip
        assert not server.violations
    assert [batch.trained_at.n for batch in batches] == [0, 1, 2, 3]
    assert all(batch.group_sizes == (8,) * 8 for batch in batches)
    assert all(sample.staleness <= 4 and sample.loss_mask.all() for batch in batches for sample in batch.samples)


@executes("processes.md-0", "api.md-1", "api.md-2", "api.md-3", "api.md-4")
def test_ranks_as_on_the_page(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, for the process that torchrun did not start; the loss of a share, and shares by hand."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    loop, loss, tensor_parallel, ranks, by_hand = code
    batches: list[april.Batch] = []
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=4, max_response_len=64, engine={"kind": "simulated"}
    )
    space = loop.run({
        "april": april, "prompts": [[1, 2 + i] for i in range(8)], "reward": lambda prompt, response: 1.0,
        "config": config, "model": None, "train": lambda model, batch: batches.append(batch),
        "hand_over": lambda: None,
    })  # fmt: skip
    assert [len(batch) for batch in batches] == [16, 16]
    total = 0.0
    for space["batch"] in batches[0].split(3):
        total += float(loss.run(space)["weights"].sum())
        assert space["scale"] == 3
    assert total == pytest.approx(1.0)
    space["rollouts"] = SimpleNamespace(next_batch=lambda: batches[0])
    assert sum(map(len, by_hand.run(space)["shares"])) == 16
    found = ranks.run(space | {"rank": 1, "token": april.new_token()})["ranks"]
    assert (found.share, found.shares) == (1, 2)
    monkeypatch.setattr(space["dist"], "get_rank", lambda: 3)
    monkeypatch.setattr(space["dist"], "get_world_size", lambda: 4)
    store = SimpleNamespace(_get_default_store=lambda: object())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "distributed_c10d", store)
    found = tensor_parallel.run(space)["ranks"]
    assert (found.rank, found.share, found.shares) == (3, 1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(april.ConfigError, match="the ranks are on several machines; give address="):
        april.Ranks.of_torch()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(april.ConfigError, match=r"call torch\.distributed\.init_process_group"):
        april.Ranks.of_torch()


@executes("processes.md-3", "processes.md-4")
def test_ray(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes these arguments, and both ranks get every response once between them, to the end of the data."""
    start, loop = code
    shares: list[april.Batch] = []
    monkeypatch.setattr(april.ray, "remote", lambda function, **options: function)
    monkeypatch.setattr(april.ray, "scheduler", inspect.signature(april.ray.scheduler).bind)
    monkeypatch.setattr(april.ray, "remote", inspect.signature(april.ray.remote).bind)
    started = start.run(reader(config=RAY_CONFIG))["run"].arguments
    assert (started["name"], started["ranks"], started["options"]["reward"].kwargs) == ("my-run", 2, {"num_actors": 8})
    with World(ranks=started["ranks"]) as world:
        attach = inspect.signature(april.ray.attach)
        monkeypatch.setattr(april.ray, "attach", lambda *given: world.attach(attach.bind(*given).arguments["rank"]))
        space = {"train": shares.append, "hand_over": lambda: None}
        beside(*(lambda rank=rank: loop.run(space | {"rank": rank}) for rank in range(2)))
    assert sorted(s.id for share in shares for s in share.samples) == [(g, i) for g in range(8) for i in range(3)]


@executes("processes.md-1", "processes.md-2")
def test_engines_in_other_processes(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one block offers, the other uses, adds and removes; the real machines are this one."""
    key = april.new_token()
    monkeypatch.setenv("APRIL_KEY", key)
    offer, use = code
    served = inspect.signature(april.serve_forever)
    loads = SimpleNamespace(from_pretrained=lambda path, device: FakeEngine(lengths=9, seconds_per_token=1e-4))
    here = SimpleNamespace(TransformersEngine=loads, serve_forever=lambda *a, **k: space.update(given=served.bind(*a, **k)))  # noqa: E501
    space: dict[str, Any] = {"april": here, "os": os}
    offer.run(space)
    given = space["given"].arguments
    assert (given["host"], given["port"], given["key"]) == ("0.0.0.0", 9000, key)  # noqa: S104
    thread = LoopThread("servers")
    servers = [thread.run(lambda: april.serve(given["make"](), key=key)) for _ in range(2)]
    urls = {f"http://node{i + 1}:9000": server.url for i, server in enumerate(servers)}
    real = factory.open_servers

    async def open_servers(config: Any) -> Any:
        return await real(config.model_copy(update={"urls": tuple(urls[url] for url in config.urls)}))

    monkeypatch.setattr(factory, "open_servers", open_servers)
    try:
        found = use.run(reader())
        assert len(found["batch"]) == 16
        assert found["name"] == servers[1].url.removeprefix("http://")
    finally:
        for server in servers:
            thread.run(server.close)
        thread.stop()


@executes("report.md-1")
def test_a_record(code: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is written where the page says, and can be replayed, however short."""
    monkeypatch.chdir(tmp_path)
    code[0].run(reader(config=april.Config(**SMALL, engine={"kind": "simulated"})))
    assert replay(tmp_path / "runs" / "record.jsonl").core.context.batches == 0


@executes("restarts.md-0", "restarts.md-1")
def test_a_restart(code: list[Block], tmp_path: Path) -> None:
    """What the first block saves, the second goes on from, with weights trained on one batch: each prompt once."""
    save, load = code
    small = {"rollout_batch_size": 1, "over_sampling_batch_size": 2, "n_samples_per_prompt": 1}
    config = april.Config(**small, max_response_len=60)
    space = reader(path=tmp_path / "checkpoint.pt", config=config, prompts=PROMPTS[:4])
    with april.RolloutScheduler(config, prompts=PROMPTS[:4], reward=space["reward"], model=space["model"]) as first:
        batch = first.next_batch()
        save.run(space | {"rollouts": first, "batch": batch})
    space["rest"] = []
    more = "    rest += [rollouts.next_batch() for _ in range(3)]\n"
    Block("restarts.md", load.number, "python", load.text + more).run(space)
    assert space["rollouts"].version == (1, 1)
    assert sorted(s.prompt.position for b in (batch, *space["rest"]) for s in b.samples) == [0, 1, 2, 3]


@executes("restarts.md-2")
def test_a_restart_on_servers(code: list[Block], tmp_path: Path) -> None:
    """Either of the two lines: servers load the checkpoint's weights, or a function hands them over."""
    (tmp_path / "w1").mkdir()
    (tmp_path / "w1" / "model.safetensors").touch()
    handed: list[str] = []
    weights = []
    for line in code[0].text.splitlines():
        with ServerThread(server := FakeVllmServer()):
            config = april.Config(**SMALL, engine={"kind": "vllm", "urls": [server.url]})
            with april.RolloutScheduler(config, prompts=PROMPTS, reward=lambda prompt, response: 0.0) as rollouts:
                rollouts.next_batch()
                saved = rollouts.state_dict()
            with april.RolloutScheduler(config, prompts=PROMPTS, reward=lambda prompt, response: 0.0) as rollouts:
                space = {"saved": {"rollouts": saved}, "directory": tmp_path / "w1"}
                Block("restarts.md", 2, "python", line).run(
                    space | {"function": lambda: handed.append(""), "rollouts": rollouts}
                )
                assert rollouts.version.incarnation == 1
        weights.append(server.weights)
    assert (weights[0], handed) == ("w1", [""])


@executes("sampling.md-0")
def test_stop_strings(code: list[Block]) -> None:
    """The function's own are taken in the place of the configured ones."""
    words = tokenizer("text")
    space = reader(prompts=[ids_of("text", "The answer is")] * 9, tokenizer=words)
    with code[0].run(space | {"model": tiny_model(vocab_size=words.get_vocab_size())})["rollouts"] as rollouts:
        assert rollouts.config.sampling.stop == ("</answer>",)
        assert len(rollouts.next_batch().group_sizes) == 8


@executes("slime.md-4")
def test_metadata_of_slime(code: list[Block]) -> None:
    """The keys and the kinds of values that the adapter writes."""
    shown = ast.literal_eval(code[0].text)
    with real_schedulers.scheduler() as rollouts:
        batch = rollouts.next_batch()
    tokens = batch.samples[0].tokens.tolist()
    sample = SimpleNamespace(loss_mask=None, tokens=tokens, response_length=len(tokens), metadata=None)
    finish(sample, batch.samples[0], batch.version, None, mask_offpolicy=False)
    written = sample.metadata["april"]
    assert {key: type(v) for key, v in written.items()} == {key: type(v) for key, v in shown.items()}
    assert [[type(v) for v in span] for span in written["spans"]] == [[int, int, str]]


@executes("trl.md-1")
def test_trl(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """One import and one argument, before a trainer that calls as TRL's: a batch of 32 groups of 8 is trained."""

    class Trainer(stand_in_trl.GRPOTrainer):
        def __init__(
            self, model: str, reward_funcs: Any, args: dict[str, int], train_dataset: Any, rollout_func: Any
        ) -> None:
            assert model == "Qwen/Qwen3-4B"
            super().__init__(
                tiny_model(), rollout_func, train_dataset, reward_funcs=[reward_funcs], max_completion_length=4,
                num_generations=args["num_generations"],
                generation_batch_size=args["per_device_train_batch_size"] * args["gradient_accumulation_steps"],
            )  # fmt: skip

        def train(self) -> None:  # type: ignore[override]
            super().train(steps=1)

    monkeypatch.setitem(vars(trl), "AprilGRPOTrainer", trl.april_trainer(Trainer))
    space = code[0].run({
        "GRPOConfig": dict, "dataset": stand_in_trl.prompts(200),
        "reward": lambda prompts, completions, **columns: [float(len(c)) for c in completions],
    })  # fmt: skip
    (rows,) = space["trainer"].scored
    assert len(rows) == 256
    assert len({row["answer"] for row in rows}) == 32


@executes("trl_async.md-0")
def test_trl_asynchronously(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is made before a stand-in of TRL's: 256 rows per step are 32 groups of 8, from two servers."""
    stand_in_trl_async.install(monkeypatch)

    class Trainer(stand_in_trl_async.AsyncGRPOTrainer):
        def train(self) -> None:  # type: ignore[override]
            pass

    monkeypatch.setitem(vars(trl), "AprilAsyncGRPOTrainer", trl.april_async_trainer(Trainer))
    space = code[0].run({"AsyncGRPOConfig": dict, "dataset": stand_in_trl.conversations(9), "reward": None})
    config = space["trainer"].rollout_worker._config
    assert (config.rollout_batch_size, config.n_samples_per_prompt, len(config.engine.urls)) == (32, 8, 2)


@executes("areal.md-0")
def test_areal(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """The import gives AReaL's own trainer with april's executor in it."""
    stand_in_areal.install(monkeypatch)
    assert issubclass(code[0].run({})["PPOTrainer"], stand_in_areal.PPOTrainer)


@executes("report.md-4")
def test_exporters(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page are made with what stands there, and closed; the packages are another test's."""
    made: dict[Any, Kept] = {}
    monkeypatch.setattr(april.export, "TensorBoard", lambda given: made.setdefault(given, Kept()))
    code[0].run(reader())
    assert {given: exporter.closed for given, exporter in made.items()} == {"runs/tensorboard": 1}


@executes("report.md-5", "report.md-6")
def test_metrics_and_texts_by_hand(code: list[Block], capsys: pytest.CaptureFixture[str]) -> None:
    """A row of one's own run, and four responses with their rewards."""
    metrics, texts = code
    rows: list[tuple[dict[str, float], int]] = []
    with real_schedulers.scheduler() as rollouts:
        batch = rollouts.next_batch()
    own = SimpleNamespace(log=lambda row, step: rows.append((row, step)))
    metrics.run({"run": own, "loss": 0.5, "step": 7, "batch": batch})
    assert rows[0][0] == {"loss": 0.5} | {f"april/{name}": v for name, v in batch.metrics.items()}
    texts.run({"batch": batch, "tokenizer": Words()})
    assert len(capsys.readouterr().out.splitlines()) == 4


# ---------------------------------------------------------------- engines.md, testing.md


@executes("engines.md-0")
def test_vllm_in_process_as_on_the_page(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the AsyncLLM; it has loaded every directory that was named."""
    install_vllm(monkeypatch)
    llm = FakeAsyncLLM()
    directories = ["tiny1", "tiny2", "tiny3"]
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=60)
    space = code[0].run({
        "llm": llm, "april": april, "config": config, "prompts": [[5, 6, 7 + n] for n in range(90)], "steps": 3,
        "reward": lambda prompt, response: 1.0, "train": lambda batch: directories[batch.version.n],
    })  # fmt: skip
    assert (llm.weights, space["batch"].version.n) == ("tiny3", 2)


@pytest.mark.parametrize("name", ["budgets", "abort_queued"])
@executes("engines.md-1")
def test_the_conformance_suite_as_a_test(code: list[Block], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the page; only the loop is a virtual one here."""
    monkeypatch.setattr("asyncio.run", run_virtual)
    code[0].run(space := {"my_engine": fake_subject().open})
    space["test_my_engine"](conformance.check_named(name))


@executes("testing.md-0")
def test_the_whole_test_runs_as_it_stands(
    code: list[Block], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tool under a random script on virtual time; faults hit it, samples cross updates."""
    seen: list[Any] = []
    real_audit, real_random = testing.Rollouts.audit, FaultScript.random
    monkeypatch.setattr(testing.Rollouts, "audit", lambda run: seen.append((run, real_audit(run))))
    monkeypatch.setattr(FaultScript, "random", lambda **given: seen.append(real_random(**given)) or seen[-1])
    code[0].run({})["test_solve"]()

    script, (run, found) = seen
    assert len({fired.fault.kind for fired in script.fired}) >= 5
    assert (found.samples, found.lost, found.problems) == (40, 0, ())
    assert any(len({s.version for s in sample.segments}) > 1 for batch in run.batches for sample in batch.samples)
    assert repr(script) in capsys.readouterr().out
    assert repr(script) in text_of("testing.md")
    assert len([line for line in code[0].text.splitlines() if line.strip()]) <= 30


@executes("testing.md-1")
def test_the_script_on_the_page_is_a_script(code: list[Block]) -> None:
    """The example of declared faults is accepted, four of them."""
    assert [type(fault) for fault in code[0].run({})["script"].faults] == [Fault] * 4


# ---------------------------------------------------------------- drawings


@executes("architecture.md-3")
def test_the_rooms_of_the_house_are_there(code: list[Block]) -> None:
    """Every file and directory in the tree of docs/architecture.md."""
    head, *lines = code[0].text.splitlines()
    named = {name.rstrip("/") for line in lines for name in line.strip().split("  ")[0].split(", ")}
    house = Path(april.__file__).parent
    assert house.name == head.rstrip("/")
    there = {path.name for path in house.iterdir()}
    packages = {path.parent.name for path in house.glob("*/__init__.py")}
    assert packages <= named <= there


@executes("architecture.md-0", "architecture.md-1", "weights.md-0", "architecture.md-2")
def test_drawings_name_what_is_there(code: list[Block]) -> None:
    """Names in a drawing are methods of the scheduler, or of the core; all but the first have some."""
    drawn = [set(re.findall(r"\w+_\w+|\w+(?=\()", block.text)) - {"step_7", "step_8", "step"} for block in code]
    assert all(drawn[1:])
    named = set[str]().union(*drawn)
    assert {w for w in named if not hasattr(april.RolloutScheduler, w) and not hasattr(RolloutCore, w)} == set()


@executes("report.md-0")
def test_the_line_is_drawn_as_on_the_page(code: list[Block]) -> None:
    """Step 12 after 34 s, with the figures of the page."""
    line = ProgressLine()
    moment: dict[str, Any] = {
        "step": 12, "ready": 17, "target": 32, "whole_groups": True, "in_flight": 186, "partials": 41, "oldest": 2,
        "engines": {"e": 186}, "waits": WaitReason.FUNCTIONS.value,
    }  # fmt: skip
    for passed in (0, 24, 34):
        line.add(float(passed), RunStatus(observed=12_300 * passed, **moment))
    assert str(line) == code[0].text.strip()
