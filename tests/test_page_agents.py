"""docs/agents.md runs as it stands: each shape of a rollout function on a scheduler with a scripted model behind it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pages import Block, executes
from verifiers_stand_in import Environment, install

pytest.importorskip("renderers")
from renderers import Qwen3RendererConfig

import april
from april.testing import FakeEngine, conversation
from tests.gateway_suite.script import EOS, TOKENIZER, TOOL, VOCAB, reply, says

PLAIN = Qwen3RendererConfig(enable_thinking=False)
AGENT = """#!{python}
import json, os, sys, urllib.request
messages = [{{"role": "user", "content": sys.argv[2]}}]
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
body = json.dumps({{"messages": messages}}).encode()
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"], end="")
"""
"""A program that is an agent: its task is in its arguments, the policy in its environment."""


def prompts() -> Iterator[dict[str, Any]]:
    """Prompts whose data has what the functions of the page ask for; the model answers it with "hi"."""
    for number in range(20):
        text = f"{number} #hello"
        chat = [{"role": "user", "content": text}]
        yield {"token_ids": TOKENIZER.encode(text), "messages": chat, "question": text, "task": text}


def reader(**more: Any) -> dict[str, Any]:
    """What the examples take as given; the scheduler has an engine with the scripted model."""
    engine = FakeEngine(
        "e", responses=lambda request: reply(conversation(request).tolist()), vocab_size=VOCAB, eos_token_id=EOS,
        seconds_per_token=0.001,
    )  # fmt: skip
    scheduler = partial(april.RolloutScheduler, engines=[engine], renderer=PLAIN, check=True)
    page = type("april", (), {"RolloutScheduler": scheduler, "loss_weights": staticmethod(april.loss_weights)})
    return {
        "april": page, "config": april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=400),
        "prompts": prompts(), "tokenizer": TOKENIZER, "reward": lambda prompt, response: float(response.output == "hi"),
    } | more  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def trained(space: dict[str, Any], said: str = "hi<|im_end|>", **more: Any) -> april.Batch:
    """A batch of the page's rollout function, each sample of which is one conversation with this."""
    options = {"prompts": space["prompts"], "tokenizer": TOKENIZER, "renderer": PLAIN, "reward": space["reward"]} | more
    with space["april"].RolloutScheduler(space["config"], rollout=space["rollout"], **options) as rollouts:
        batch = rollouts.next_batch()
    assert batch.one_row_each
    for sample in batch.samples:
        assert TOKENIZER.decode(sample.tokens[sample.loss_mask == 1]) == said
    return batch


@executes("agents.md-1")
def test_messages_and_tools(code: list[Block]) -> None:
    """The function asks until no tool is called; its turns are one conversation, without loss on the tool's result."""

    async def run_tool(name: str, arguments: str) -> str:
        assert (name, json.loads(arguments)) == ("add", {"a": 1, "b": 2})
        return "3 #hello"

    chats = [{"token_ids": [5], "messages": [{"role": "user", "content": f"{i} #add"}]} for i in range(9)]
    tools = [{"type": "function", "function": TOOL}]
    space = code[0].run(reader(TOOLS=tools, run_tool=run_tool))
    batch = trained(space, says("add") + "<|im_end|>hi<|im_end|>", prompts=chats)
    assert batch.rewards.tolist() == [1.0] * 4


@executes("agents.md-2")
@pytest.mark.usefixtures("client_left_open")
def test_a_client_of_ones_own(code: list[Block]) -> None:
    """OpenAI's client in a coroutine; what it returns is what the reward sees."""
    assert trained(code[0].run(reader())).rewards.tolist() == [1.0] * 4


@executes("agents.md-3")
def test_a_program(code: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program finds its client's address in its environment; the reward sees how it has ended."""
    agent = tmp_path / "my-agent"
    agent.write_text(AGENT.format(python=sys.executable), "utf-8")
    agent.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    space = code[0].run(reader(reward=lambda prompt, response: float(response.output[:2] == (0, "hi"))))
    assert trained(space).rewards.tolist() == [1.0] * 4


@executes("agents.md-4")
def test_an_environment_of_verifiers(code: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks are the prompts, its episodes the samples; a stand-in for the package says "hi" to each."""
    install(monkeypatch)
    monkeypatch.setattr(sys.modules["verifiers.v1"], "load_environment", lambda path: Environment(), raising=False)
    with code[0].run(reader(CONFIG="of the environment"))["rollouts"] as rollouts:
        batch = rollouts.next_batch()
    assert batch.rewards.tolist() == [1.0] * 4
    assert [TOKENIZER.decode(s.tokens[s.loss_mask == 1]) for s in batch.samples] == ["hi<|im_end|>"] * 4


@executes("agents.md-5")
async def test_an_orchestrator_outside(code: list[Block]) -> None:
    """It opens sessions until the batch is there, asks as their agent, and says their rewards."""
    space = code[0].run(reader(KEY="of the test"))
    sessions = space["sessions"]
    sessions.port = 0  # another may have that of the page
    async with space["rollouts"] as rollouts, aiohttp.ClientSession(headers=bearer("of the test")) as http:
        waiting = asyncio.create_task(rollouts.anext_batch())
        while not waiting.done():
            await asyncio.sleep(0.001)
            if not sessions.url:
                continue
            async with http.post(f"{sessions.url}/sessions") as response:
                if response.status == 429:
                    continue
                session = await response.json()
            asked = {"messages": session["data"]["messages"]}
            url, key = f"{session['base_url']}/chat/completions", bearer(session["api_key"])
            async with http.post(url, json=asked, headers=key) as response:
                said = (await response.json())["choices"][0]["message"]["content"]
            url = f"{sessions.url}/sessions/{session['id']}/end"
            await http.post(url, json={"reward": 2.0 * (said == "hi")})
        assert waiting.result().rewards.tolist() == [2.0] * 4
    sessions.close()


@executes("agents.md-6")
def test_a_renderer(code: list[Block]) -> None:
    """The scheduler takes the settings of one."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> str:
        await llm.generate()
        return "hi"

    with code[0].run(reader(rollout=rollout))["rollouts"] as rollouts:
        assert rollouts.next_batch().rewards.tolist() == [1.0] * 4


@executes("agents.md-7")
def test_rows_of_a_sample_weigh_as_one(code: list[Block]) -> None:
    """GRPO's weights over samples of which each has two rows sum to 1."""
    batch = trained(reader(rollout=lambda prompt, llm: llm.generate() and "hi"))
    numbers = batch.sample_numbers // 2
    rows = type("Rows", (), {"sample_numbers": numbers})
    space = code[0].run({"april": april, "arrays": batch.padded(), "batch": rows})
    assert space["weights"].sum() == pytest.approx(1.0)
