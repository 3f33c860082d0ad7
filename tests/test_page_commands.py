"""Every command on a page is one: `april` does as it says, other programs take its words, make knows its target.

A program of this repository is started up to the point at which it has read its words, and its own parser judges them.
What needs a real trainer or server is run with the same flags by `make test-engines` and `make test-adapters`.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page_trainers as trainers
import pytest
import typer
from fake_servers.vllm import FakeVllmServer
from page_blocks import COMMANDS, ROOT, Block, block, blocks, command_lines
from sglang_fixtures import ServerThread
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from april import cli
from april.engines.simulated.decode_cost import DecodeCost
from april.record.file import RunRecord
from april.simulate import plan, plan_run, profile, workload
from april.simulate.simulation import Simulation
from april.view import pictures
from tests.adapters.environments import TRL_VERSION

MAKE = (ROOT / "Makefile").read_text("utf-8")
SERVERS = "".join(path.read_text("utf-8") for path in sorted((ROOT / "tests" / "real_engines").glob("*.py")))
TRAINERS = {"slime.md": trainers.slime, "openrlhf.md": trainers.openrlhf, "verl.md": trainers.verl}
"""Pages with flags of a trainer."""
RUN_ELSEWHERE = {
    "examples/multi_turn_tool.py": "test_multi_turn_example.py",
    "tests/ranks/sharded_generation.py": "test_sharded_model.py",
}
"""Programs without words of their own, and the test that runs them."""
ONLY_READ = {
    "python examples/own_loop.py": "run in small by test_examples.py",
    "python examples/multi_turn_tool.py": "run by test_multi_turn_example.py",
    "python -m torch.distributed.run --standalone --nproc-per-node 2 examples/own_loop_ranks.py": "two processes: "
    "make test-ranks runs such a trainer, test_examples.py this one as one process",
    "python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks/sharded_generation.py": "run by "
    "test_sharded_model.py",
    "python -m benchmarks.": "takes minutes, some a model or a GPU",
    "python -m april.testing.conformance": "takes a real server: make test-engines",
    "python -m tests.real_engines.benchmark": "takes a real server and an hour; make test-engines starts the same ones",
    "python -m tests.adapters.real_slime": "takes a source tree of slime",
    "python -m sglang": "a real server: make test-engines",
    "vllm serve": "a real server: make test-engines",
    "python -m verl.trainer.main_ppo": "a real trainer: make test-adapters",
    "python -m april.adapters.openrlhf": "a real trainer: make test-adapters",
    "python train.py": "the reader's own program: test_tutorial.py runs it",
    "torchrun": "the reader's own program; make test-adapters runs TRL on two ranks",
    "pip install": "make test installs this package, make test-adapters the others",
    "make ": "what make verify makes",
    ". .venv/bin/activate": "of the shell alone: test_readme.py holds the block against what .ci/run runs",
}
"""Commands, by how they begin, that are read here and not run, and why; those of `april` are all run."""
SAID = {"--logprobs-mode", "--scheduling-policy"}
"""Flags of which docs/servers.md says that the suite starts no server with them."""
SMALL = {
    "simulate": [
        "--engines", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--prompt-len", "20",
        "--max-response-len", "600", "--steps", "4", "--ramp", "1", "--no-sweep",
    ],
    "plan": ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-response-len", "300", "--engines", "1",
             "--processes", "1"],
}  # fmt: skip
"""Words that stand behind those of the page, where they win, to be quick."""
PROFILE = profile.Profile(cost=DecodeCost(0.01, 1e-4, 1e-7), requests=90, held_out=0.01, speeds={1: 90.0})


async def measured(*_: Any) -> profile.Profile:
    """Of a server, which takes time; tests/test_profile.py measures one."""
    return PROFILE


class Understood(Exception):
    """A program has read its words."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the commands read: records, lengths, a profile."""
    home = tmp_path_factory.mktemp("pages")
    (home / "runs").mkdir()
    small = workload.Workload(groups=4, samples=4, engines=1, max_response_len=300, median_len=60)
    simulation = Simulation(
        small.core_settings(small.one_shot(8)), small.cost, small.lengths, engines=1, prompt_len=small.prompt_len,
        train_s=1.0, record=RunRecord(home / "runs" / "record.jsonl"),
    )  # fmt: skip
    simulation.run(20)
    simulation.close()
    for name in ("runs/own_loop.jsonl", "before.jsonl", "after.jsonl"):
        shutil.copy(home / "runs" / "record.jsonl", home / name)
    (home / "lengths.jsonl").write_text(
        "\n".join(f'{{"lengths": [{9 + i}, {70 + 9 * i}]}}' for i in range(16)), "utf-8"
    )
    PROFILE.write(home / "runs" / "profile.json")
    (home / "april.yaml").write_text("max_staleness: 3", "utf-8")
    return home


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it is the working directory; simulations are short, and nothing is drawn."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 2000)
    monkeypatch.setattr(plan_run, "find_spec", lambda name: None)
    monkeypatch.setattr(pictures, "in_all_widths", lambda *drawn: "")
    monkeypatch.setattr(profile, "profile", measured)
    for name, few in (("BRIEF", (3, 1)), ("LONG", (4, 1)), ("ROUNDS", 0)):
        monkeypatch.setattr(plan, name, few)
    return tmp_path


def april(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the real command prints, on fake servers at the addresses of the page; it ends with 0."""
    small = SMALL.get(words[0], [])
    if words[0] == "simulate":
        monkeypatch.setattr(cli, "find_spec", lambda name: None)  # no picture
    if words[0] == "plan" and words[1].startswith("runs/"):
        small = ["--processes", "1"]  # the rest is that of the run
    first, second = FakeVllmServer(), FakeVllmServer()
    with ServerThread(first, second):
        urls = {"http://127.0.0.1:8000": first.url, "http://127.0.0.1:8001": second.url}
        if "--config" in words:
            own = {"rollout_batch_size": 8, "max_response_len": 90, "engine": {"kind": "vllm", "urls": [first.url]}}
            Path("april.yaml").write_text(json.dumps(own), "utf-8")
        environment = {"COLUMNS": "80", "NO_COLOR": "1"}
        result = CliRunner().invoke(cli.app, [*(urls.get(w, w) for w in words), *small], env=environment)
    assert result.exit_code == 0, result.output
    return result.output


def program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module or a script of this repository reads its words, and would now begin."""
    if (test := RUN_ELSEWHERE.get(words[0])) is not None:
        assert len(words) == 1
        assert Path(words[0]).stem in (ROOT / "tests" / test).read_text("utf-8")
        return
    parse_args = argparse.ArgumentParser.parse_args

    def understood(parser: argparse.ArgumentParser, *given: Any) -> None:
        raise Understood(parse_args(parser, *given))

    def run(function: Callable[..., Any]) -> None:
        app = typer.Typer()
        app.command()(function)
        raise Understood(typer.main.get_command(app).make_context(words[1], words[2:]))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understood)
    monkeypatch.setattr(typer, "run", run)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[1:] if module else words)
    with pytest.raises(Understood):  # noqa: PT012 - of either
        if module:
            for name in (words[1], f"{words[1]}.__main__"):  # another test may have imported it
                monkeypatch.delitem(sys.modules, name, raising=False)
            runpy.run_module(words[1], run_name="__main__")
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own parser takes its words, and the program the rest; train.py and train_ranks.py are the reader's."""
    found = get_args_parser().parse_args(words)
    assert int(found.nproc_per_node) > 0
    if found.training_script not in ("train.py", "train_ranks.py"):
        program([*(["-m"] if found.module else []), found.training_script, *found.training_script_args], monkeypatch)


def server(words: list[str]) -> None:
    """Of the real ones, with flags that `make test-engines` starts them with, too."""
    unknown = {word for word in words if word.startswith("--") and f'"{word}"' not in SERVERS} - SAID
    assert not unknown, f"the suite starts no server with {unknown}"


def pip(words: list[str]) -> None:
    """This package with extras that it has; others in the version that `make test-adapters` runs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for word in words:
        named = re.fullmatch(r"\.(?:\[(\w+)\])?", word)
        others = ("install", f"trl=={TRL_VERSION}", "reasoning-gym")
        assert word in others or (named and (named[1] is None or named[1] in extras)), word


def make(target: str) -> None:
    """One that `make verify` makes as well."""
    verify = re.findall(r"^verify: (.*)$", MAKE, re.M)[0].split()
    assert target in verify


def execute(words: list[str], page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command by whoever understands it; one that nobody does fails."""
    match words:
        case ["april", *rest]:
            april(rest, monkeypatch)
        case ["python", "-m", "torch.distributed.run", *rest] | ["torchrun", *rest]:
            torchrun(rest, monkeypatch)
        case ["vllm", "serve", "MODEL", *rest]:
            server(rest)
        case ["python", "-m", "sglang.launch_server" | "sglang_router.launch_router", *rest]:
            server(rest)
        case ["python", "-m", "verl.trainer.main_ppo", *rest] | ["python", "-m", "april.adapters.openrlhf", *rest]:
            TRAINERS[page](rest)
        case ["python", "train.py"] | [".", ".venv/bin/activate"]:
            pass
        case ["python", *rest]:
            program(rest, monkeypatch)
        case ["pip", *rest]:
            pip(rest)
        case ["make", target]:
            make(target)
        case _:
            TRAINERS[page](words)


@pytest.mark.parametrize("block", blocks(*COMMANDS), ids=str)
def test_every_command_is_understood(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of each block of commands; flags of a trainer that stand alone are read together."""
    lines = list(command_lines(block.text))
    assert lines
    if lines[0][0].startswith("--"):
        lines = [[word for line in lines for word in line]]
    for words in lines:
        with monkeypatch.context() as patch:
            execute(words, block.page, patch)


def test_what_is_not_run_has_a_reason() -> None:
    """Every command is one of april's or listed with its reason, nothing listed is left over, and targets are made."""
    pages = [b for b in blocks(*COMMANDS) if not next(command_lines(b.text))[0].startswith("--")]
    lines = {" ".join(words) for b in pages for words in command_lines(b.text)}
    flags_alone = {line for line in lines if re.match(r"[\w.]+[=:]", line)}  # overrides of verl
    needed = {
        start for line in lines - flags_alone if not line.startswith("april ")
        for start in [max((s for s in ONLY_READ if line.startswith(s)), key=len, default=line)]
    }  # fmt: skip
    assert needed == set(ONLY_READ)
    for target in re.findall(r"make ([a-z-]+)(?= |$)", "\n".join(ONLY_READ.values()), re.M):
        if target != "verify":
            make(target)


def shapes(text: str) -> set[str]:
    """Its lines with every number as 0, and without lines that are drawn."""
    named = re.sub(r"^( *)[> ] (?:N' = |refill, )[^%x\n]*?(?=  +[\d,]+ +[\d.]+x)", r"\1NAME", text, flags=re.M)
    lines = (" ".join(re.sub(r"\d[\d,.]*", "0", line).split()) for line in named.splitlines())
    return {line for line in lines if line.strip("\u2500")}


@pytest.mark.parametrize(
    ("page", "word", "command"),
    [
        ("simulate.md", "One workload", "simulate --sweep"),
        ("choosing.md", "What cannot be had", "plan lengths.jsonl"),
    ],
)
def test_tables_have_the_lines_of_the_page(
    page: str, word: str, command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Titles, columns and rows as the command prints them today; the figures are those of a longer run."""
    name, *words = command.split()
    monkeypatch.setitem(SMALL, name, [word for word in SMALL[name] if word != "--no-sweep"])
    missing = shapes(block(page, word).text) - shapes(april([name, *words], monkeypatch))
    assert not missing


def test_own_lengths_as_on_the_page(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are a file that `april simulate` takes."""
    (place / "own.jsonl").write_text(block("simulate.md", '"lengths"').text, "utf-8")
    assert "own.jsonl" in april(["simulate", "--lengths", "own.jsonl"], monkeypatch)
