"""The README is true: its loop runs as it stands, and every command in it is run by CI."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_servers.vllm import FakeVllmServer, fake_vllm_response
from sglang_fixtures import ServerThread
from tiny_models import tiny_model

import april

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """Fenced blocks of one language, indentation of list items taken off."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page, re.S | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def block(word: str, page: str = README) -> str:
    """The one Python block that contains ``word``."""
    (found,) = [b for b in blocks("python", page) if word in b]
    return found


def test_the_loop_in_the_readme_runs_and_is_at_most_15_lines() -> None:
    """config, prompts, reward, next_batch, train, weight_update: copied from the README, run on a real model."""
    code, batch_code = blocks("python")[:2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    for word in ("Config(", "prompts", "reward", "next_batch()", "train(", "weight_update()"):
        assert word in code
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trained: list[april.Batch] = []

    def train(model: Any, batch: april.Batch) -> None:
        arrays = batch.padded()
        ids = torch.from_numpy(arrays["response_ids"]).long()
        loss = model(input_ids=ids).logits.float().logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained.append(batch)

    space: dict[str, Any] = {
        "model": model,
        "train": train,
        "steps": 2,
        "dataset": ((f"question {i}", i % 7) for i in range(1000)),
        "tokenize": lambda text: [3 + ord(c) % 90 for c in text],
        "verify": lambda tokens, answer: len(tokens) % 7 == answer,
    }
    exec(compile(code + batch_code, "README.md", "exec"), space)  # noqa: S102 - this is what the test is about

    assert len(trained) == 2
    assert [len(b.group_sizes) for b in trained] == [8, 8]
    assert trained[1].metrics["staleness_max"] <= 1
    assert space["arrays"]["response_ids"].shape == space["now"].shape == space["arrays"]["logprobs"].shape
    assert len(space["ratio"]) == trained[1].lengths.sum()
    # the last batch, seen after the update that was made with it: near the ratio of one, yet not equal to it
    assert 0 < (space["ratio"].log().abs()).mean() < 1


def test_the_readme_is_short() -> None:
    """A reader in a hurry: at most 1,500 words."""
    assert len(README.split()) <= 1500


def test_the_flags_in_the_docs_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argparse lines, copied from docs/settings.md, with a command line."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    space: dict[str, Any] = {"april": april, "argparse": argparse}
    flags = ["--rollout-batch-size", "4", "--over-sampling-batch-size", "6", "--max-response-len", "9"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])

    exec(compile(block("add_april_arguments", page), "settings.md", "exec"), space)  # noqa: S102 - this is what the test is about

    assert space["config"] == april.Config(rollout_batch_size=4, over_sampling_batch_size=6, max_response_len=9)


def test_the_restart_in_the_readme_works(tmp_path: Path) -> None:
    """Saved through torch, loaded with weights_only: the lines before and after the restart, copied from the README."""
    before, after = block("torch.load").split("# after a restart")
    config = april.Config(rollout_batch_size=1, over_sampling_batch_size=2, n_samples_per_prompt=1, max_response_len=60)
    space: dict[str, Any] = {"torch": torch, "model": tiny_model(), "path": tmp_path / "checkpoint.pt"}
    prompts = [[3, 4, 5 + i] for i in range(4)]
    delivered = []
    with april.RolloutScheduler(config, prompts=prompts, model=space["model"], check=True) as rollouts:
        space["rollouts"], space["batch"] = rollouts, rollouts.next_batch()
        delivered += [s.prompt.position for s in space["batch"].samples]
        exec(compile(before, "README.md", "exec"), space)  # noqa: S102 - this is what the test is about
    with april.RolloutScheduler(config, prompts=prompts, model=space["model"], check=True) as rollouts:
        space["rollouts"] = rollouts
        exec(compile("#" + after, "README.md", "exec"), space)  # noqa: S102 - this is what the test is about
        assert rollouts.version == (1, 1)  # the saved weights are trained on the first batch
        for _ in range(3):
            delivered += [s.prompt.position for s in rollouts.next_batch().samples]

    assert sorted(delivered) == [0, 1, 2, 3]


def test_the_restart_in_the_readme_works_on_servers(tmp_path: Path) -> None:
    """A server that went on without the checkpoint gets its weights back; they have written all that is delivered."""
    before = block("torch.load").split("# after a restart")[0]
    code = block("save_pretrained(directory)")
    config = april.Config(rollout_batch_size=1, over_sampling_batch_size=3, n_samples_per_prompt=1, max_response_len=90)
    prompts = [[3, 4, 5 + i] for i in range(9)]
    server = FakeVllmServer()

    class Model:
        """Its weights are the name of their directory."""

        def state_dict(self) -> dict[str, Any]:
            return {}

        def save_pretrained(self, path: Path) -> str:
            path.mkdir(exist_ok=True)
            (path / "model.safetensors").touch()
            return str(path)

    model = Model()
    space: dict[str, Any] = {"torch": torch, "model": model, "path": tmp_path / "checkpoint.pt"}
    with ServerThread(server):
        engine = {"kind": "vllm", "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2]}
        settings = april.Config(**{**config.model_dump(exclude={"engine"}), "engine": engine})
        with april.RolloutScheduler(settings, prompts=prompts, check=True) as rollouts:
            rollouts.next_batch()
            rollouts.weight_update(path=model.save_pretrained(tmp_path / "w1"))
            space["rollouts"], space["batch"] = rollouts, rollouts.next_batch()
            exec(compile(before, "README.md", "exec"), space)  # noqa: S102 - this is what the test is about
            for name in ("w2", "w3"):
                rollouts.weight_update(path=model.save_pretrained(tmp_path / name))
                rollouts.next_batch()
        assert server.weights == "w3"
        with april.RolloutScheduler(settings, prompts=prompts, check=True) as rollouts:
            space |= {"rollouts": rollouts, "directory": tmp_path / "w2"}
            space["saved"] = torch.load(space["path"], weights_only=True)
            with pytest.raises(april.ConfigError, match=r"load_state_dict: 127\.0.* would keep the weights"):
                rollouts.load_state_dict(space["saved"]["rollouts"])
            assert rollouts.version == (0, 0)
            exec(compile(code, "README.md", "exec"), space)  # noqa: S102 - as above
            assert (rollouts.version, server.weights) == ((1, 2), "w2")
            batch = rollouts.next_batch()
        for sample in batch.samples:
            said = sample.prompt.token_ids.tolist()
            for part in sample.segments:
                tokens = sample.tokens[part.start : part.start + part.count].tolist()
                assert tokens == fake_vllm_response(said, weights=f"w{part.version.n}", max_tokens=part.count)[0]
                said += tokens


def test_the_multi_turn_function_in_the_readme_runs() -> None:
    """The coroutine with a tool, copied from the README."""
    space: dict[str, Any] = {}
    exec(compile(block("run_tool"), "README.md", "exec"), space)  # noqa: S102 - this is what the test is about

    async def run_tool(tokens: Any) -> list[int]:
        return [5, 6, 7]

    space["run_tool"] = run_tool
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=300)
    with april.RolloutScheduler(
        config, prompts=[[3, 4, 5]] * 2, rollout=space["rollout"], model=tiny_model(), check=True
    ) as rollouts:
        batch = rollouts.next_batch()

    for sample in batch.samples:
        assert (sample.loss_mask == 0).sum() == 3
        assert sample.tokens[sample.loss_mask == 0].tolist() == [5, 6, 7]


def test_the_engine_field_in_the_readme_is_one() -> None:
    """The lines for servers, copied from the README, make a configuration with two engines, of each kind it names."""
    code = block('"kind": "vllm"')
    for kind in ("vllm", "sglang", "openai"):
        assert f'"{kind}"' in code
        space: dict[str, Any] = {"april": april}
        exec(compile(code.replace('"vllm"', f'"{kind}"', 1), "README.md", "exec"), space)  # noqa: S102 - as above
        assert (space["config"].engine.kind, len(space["config"].engine.urls)) == (kind, 2)


def test_the_extras_in_the_readme_are_those_of_the_package() -> None:
    """Every extra has a row with the packages that it brings; so has the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {"(none)": project["dependencies"], **project["optional-dependencies"]}
    rows = dict(re.findall(r"^\| `?([\w()]+)`? \| [^|]+ \|([^|]*)\|$", README, re.M))

    for name, packages in wanted.items():
        named = [re.split(r"[>=<\[]", package)[0] for package in packages]
        assert rows[name].strip() == ("" if named == ["april-rl"] else ", ".join(named)), name


def test_every_command_in_the_readme_is_run_by_ci() -> None:
    """A command that nobody runs stops being true one day."""
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]

    assert commands
    assert [c for c in commands if c not in ci] == []


def test_links_in_the_documents_lead_somewhere() -> None:
    """Relative links of README, docs and contributing notes."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: str) -> set[str]:
    """Of the headings of a page, as forges make them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


def test_anchors_in_the_documents_are_headings() -> None:
    """Links into a page, or within it, name a heading that is there."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
            there = anchors((page.parent / target if target else page).read_text("utf-8"))
            assert anchor in there, f"{page.name}: {target}#{anchor}"


def test_the_servers_on_the_page_are_started_as_the_suite_starts_them() -> None:
    """docs/servers.md has, for a CPU, the flags with which the real servers are run, and names those that are more."""
    page = (ROOT / "docs" / "servers.md").read_text("utf-8")
    commands = (ROOT / "tests" / "real_engines" / "commands.py").read_text("utf-8")
    vllm, sglang, router = (
        part.partition("return Server(")[0] for part in re.split(r"^def \w+_server\(", commands, flags=re.M)[1:]
    )

    def flags(text: str) -> set[str]:
        return set(re.findall(r"--[a-z][a-z-]+[a-z]", text))

    def shown(word: str) -> set[str]:
        (found,) = [b for b in re.findall(r"^```\w*\n(.*?)^```$", page, re.S | re.M) if word in b]
        return flags(found)

    assert shown("VLLM_CPU_KVCACHE_SPACE") - {"--logprobs-mode", "--scheduling-policy"} == (
        flags(vllm) - {"--served-model-name"}
    )
    assert shown("SGLANG_USE_CPU_ENGINE") == flags(sglang) - {"--enable-metrics"}
    assert shown("launch_router") == flags(router) - {"--prometheus-port"}
