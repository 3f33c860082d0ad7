"""Examples on the pages for a loop of one's own run: chats, advantages, continuous generation, ranks."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_machine import CoreMachine, settings
from fake_servers.vllm import FakeVllmServer
from sglang_fixtures import ServerThread
from tiny_models import VOCAB_SIZE, tiny_model

import april

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: Path) -> list[str]:
    """Python blocks, indentation of list items taken off."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", page.read_text("utf-8"), re.S | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


class Tokenizer:
    """A character is a token; one with a chat template, as those of transformers."""

    pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids in the vocabulary of the tiny model."""
        return [3 + ord(c) % (VOCAB_SIZE - 3) for c in text]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Some text."""
        return "".join(chr(97 + int(i) % 26) for i in ids)

    def apply_chat_template(self, chat: Any, add_generation_prompt: bool, return_dict: bool) -> dict[str, list[int]]:
        """As since transformers 5."""
        assert add_generation_prompt
        assert return_dict
        return {"input_ids": self.encode(chat[0]["content"]), "attention_mask": [1] * len(chat[0]["content"])}

    def convert_tokens_to_ids(self, token: str) -> int:
        """The end of a turn."""
        assert token == "<|im_end|>"  # noqa: S105 - no secret
        return 5


def test_rollouts_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with data, a reward on text, another end of a turn, and a second turn: the blocks as they stand."""
    first, end, reward, tool, turns = blocks(DOCS / "rollouts.md")[:5]
    space: dict[str, Any] = {"april": april, "MODEL": "model", "torch": torch}
    with monkeypatch.context() as patch:
        named = SimpleNamespace(from_pretrained=lambda model: Tokenizer())
        patch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=named))
        exec(compile(first, "rollouts.md", "exec"), space)  # noqa: S102 - of the page
    exec(compile(end + turns, "rollouts.md", "exec"), space)  # noqa: S102 - as above
    assert space["config"].sampling.stop_token_ids == (5,)
    space["dataset"] = [{"question": f"What is {i}?", "answer": "a"} for i in range(9)]
    space["config"] = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=300)
    space["model"] = tiny_model()
    exec(compile(reward, "rollouts.md", "exec"), space)  # noqa: S102 - as above
    with space["rollouts"] as rollouts:
        batch = rollouts.next_batch()
    assert {s.reward for s in batch.samples} <= {0.0, 1.0}
    assert batch.samples[0].prompt.data == {"answer": "a"}

    async def run_tool(text: str) -> str:
        return str(len(text))

    space["run_tool"] = run_tool
    with april.RolloutScheduler(
        space["config"], prompts=space["prompts"](space["dataset"]), reward=None, model=space["model"], check=True,
        rollout=space["rollout"],
    ) as rollouts:  # fmt: skip
        batch = rollouts.next_batch()
    assert all(april.SegmentKind.ENVIRONMENT in {s.kind for s in sample.segments} for sample in batch.samples)

    async def same_answer(tokens: Any) -> list[int]:
        return [5, 6, 7]

    space = {"run_tool": same_answer}
    exec(compile(tool, "rollouts.md", "exec"), space)  # noqa: S102 - as above
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=300)
    with april.RolloutScheduler(
        config, prompts=[[3, 4, 5]] * 2, rollout=space["rollout"], model=tiny_model(), check=True
    ) as rollouts:
        batch = rollouts.next_batch()
    assert all(sample.tokens[sample.loss_mask == 0].tolist() == [5, 6, 7] for sample in batch.samples)


def test_advantages_as_on_the_page() -> None:
    """One of each response, one weight of each token, which together make a mean over responses."""
    block, own_loop = (b for b in blocks(DOCS / "quorum.md") if "batch.advantages" in b)
    found = CoreMachine(settings(n=2, samples=3), lambda g, i: 2 + g + i).step(random.Random(0))
    space: dict[str, Any] = {"april": april, "rollouts": SimpleNamespace(next_batch=lambda: found)}
    exec(compile(block, "quorum.md", "exec"), space)  # noqa: S102 - of the page
    assert space["advantages"].shape == (6,)
    assert space["weights"].shape == space["arrays"]["response_ids"].shape
    assert float(space["weights"].sum()) == pytest.approx(1.0)
    space["model"] = tiny_model()
    exec(compile(own_loop, "quorum.md", "exec"), space)  # noqa: S102 - as above
    assert space["arrays"]["advantages"].shape == (6,)


def test_continuous_generation_as_on_the_page(tmp_path: Path) -> None:
    """The loop as it stands, on a server: it generates while the trainer trains, and has the weights of every step."""
    (loop,) = blocks(DOCS / "staleness.md")
    server = FakeVllmServer(max_running=8, turns=5)
    batches: list[april.Batch] = []

    class Model:
        def save_pretrained(self, directory: str) -> None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            Path(directory, "config.json").write_text("{}", "utf-8")
            Path(directory, "model.safetensors").write_bytes(b"weights %d" % len(batches))

    space: dict[str, Any] = {
        "april": april, "prompts": ([1, 2 + i % 90] for i in range(10**6)), "reward": lambda prompt, response: 0.0,
        "train": lambda model, batch: batches.append(batch), "model": Model(), "steps": 4, "directory": tmp_path / "w",
    }  # fmt: skip
    with ServerThread(server):
        space["engine"] = {"kind": "vllm", "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2]}
        exec(compile(loop, "staleness.md", "exec"), space)  # noqa: S102 - of the page
        assert not server.violations
    assert [batch.trained_at.n for batch in batches] == [0, 1, 2, 3]
    assert all(batch.group_sizes == (8,) * 8 for batch in batches)
    assert all(sample.staleness <= 4 and sample.loss_mask.all() for batch in batches for sample in batch.samples)


def test_ranks_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop as it stands, for the process that torchrun did not start; the loss of a share, and shares by hand."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    loop, loss, tensor_parallel, by_hand, ranks = blocks(DOCS / "processes.md")[:5]
    batches: list[april.Batch] = []
    space: dict[str, Any] = {
        "april": april, "prompts": [[1, 2 + i] for i in range(8)], "reward": lambda prompt, response: 1.0,
        "engine": {"kind": "simulated"}, "model": None, "train": lambda model, batch: batches.append(batch),
        "hand_over": lambda: None,
    }  # fmt: skip
    exec(compile(loop, "processes.md", "exec"), space)  # noqa: S102 - of the page
    assert [len(batch) for batch in batches] == [16, 16]
    total = 0.0
    for space["batch"] in batches[0].split(3):
        exec(compile(loss, "processes.md", "exec"), space)  # noqa: S102 - as above
        total += float(space["weights"].sum())
        assert space["scale"] == 3
    assert total == pytest.approx(1.0)
    space["rollouts"] = SimpleNamespace(next_batch=lambda: batches[0])
    exec(compile(by_hand, "processes.md", "exec"), space)  # noqa: S102 - as above
    assert sum(map(len, space["shares"])) == 16
    space |= {"rank": 1, "token": april.new_token()}
    exec(compile(ranks, "processes.md", "exec"), space)  # noqa: S102 - as above
    assert (space["ranks"].share, space["ranks"].shares) == (1, 2)
    monkeypatch.setattr(space["dist"], "get_rank", lambda: 3)
    monkeypatch.setattr(space["dist"], "get_world_size", lambda: 4)
    store = SimpleNamespace(_get_default_store=lambda: object())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "distributed_c10d", store)
    exec(compile(tensor_parallel, "processes.md", "exec"), space)  # noqa: S102 - as above
    assert (space["ranks"].rank, space["ranks"].share, space["ranks"].shares) == (3, 1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(april.ConfigError, match="the ranks are on several machines; give address="):
        april.Ranks.of_torch()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(april.ConfigError, match=r"call torch\.distributed\.init_process_group"):
        april.Ranks.of_torch()
