"""docs/tutorial.md runs as pasted: the three programs, with a tiny model in the place of the one on the hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from fake_servers.vllm import FakeVllmServer
from page_blocks import ROOT, blocks_of
from sglang_fixtures import ServerThread
from tiny_models import tiny_model

VOCAB_SIZE = 512
"""Of the fake server."""
PAGE = ROOT / "docs" / "tutorial.md"
PROGRAMS = [b.text for b in blocks_of(PAGE) if b.language == "python"]


class Tokenizer:
    """A character is a token; EOS is that of the tiny model."""

    eos_token_id = 2

    def apply_chat_template(self, chat: Any, add_generation_prompt: bool, return_dict: bool) -> dict[str, list[int]]:
        """The question is of the user."""
        assert [turn["role"] for turn in chat] == ["system", "user"]
        return {"input_ids": [3 + ord(c) % (VOCAB_SIZE - 3) for c in chat[1]["content"]]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Every third response has a number."""
        return " ".join(str(int(i) % 10) if int(i) % 3 else "x" for i in ids)


class Sums(list[dict[str, Any]]):
    """Entries as those of reasoning-gym, which score an answer."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """1 for the very answer."""
        return float(answer == entry["answer"])


@pytest.fixture
def server() -> Iterator[FakeVllmServer]:
    """One that the second program finds at its address."""
    with ServerThread(found := FakeVllmServer()):
        yield found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, server: FakeVllmServer) -> list[ModuleType]:
    """The three of the page as modules, the first as `train`."""
    entries = Sums({"question": f"{i} + 1 = ?", "answer": str(i % 10)} for i in range(900))
    gym = ModuleType("reasoning_gym")
    gym.create_dataset = lambda name, **given: entries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda model: Tokenizer())
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda model, dtype: tiny_model(vocab_size=VOCAB_SIZE)
    )
    made = []
    for name, text in zip(("train", "train_servers", "train_ranks"), PROGRAMS, strict=True):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        there = text.replace("http://127.0.0.1:8000", server.url)
        there = there.replace('"eos_token_ids"', f'"vocab_size": {VOCAB_SIZE}, "eos_token_ids"')  # it has no files
        exec(compile(there, f"tutorial.md-{name}", "exec"), vars(module))  # noqa: S102 - this is what the test is about
        made.append(module)
    return made


def test_the_tutorial_runs_as_pasted(
    programs: list[ModuleType],
    server: FakeVllmServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Alone, on a server that loads the weights of every step, and as a rank: 25 steps each, some tokens are older."""
    alone, servers, ranks = programs
    alone.main()
    servers.WEIGHTS = str(tmp_path)
    servers.main()
    assert server.weights == "0"
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    begin = torch.distributed.init_process_group
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda kind: begin(kind, store=store, rank=0, world_size=1)
    )
    ranks.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward ")]
    assert len(lines) == 75
    assert any(" 0% from older" not in line for line in lines)
    (shown,) = [b.text for b in blocks_of(PAGE) if b.language == "text"]
    assert len({re.sub(r"[\d.]+", "0", line) for line in [*lines, *shown.splitlines()]}) == 1
