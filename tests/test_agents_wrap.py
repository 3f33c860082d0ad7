"""What exists as a rollout function: a program in a process group of its own, an environment of verifiers."""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verifiers_stand_in import Environment, install

import april
from april.agents import ProgramResult, Verifiers, program
from april.errors import ConfigError, RolloutError, UsageError
from april.testing import FakeEngine, conversation
from tests.gateway_suite.script import EOS, TOKENIZER, VOCAB, reply

renderers = pytest.importorskip("renderers")
DOOR = SimpleNamespace(url="http://127.0.0.1:1/x/v1", key="secret", has_received_answers=True, last_refusal="")
LLM: Any = SimpleNamespace(endpoint=lambda: DOOR)


def prompt(**data: Any) -> april.Prompt:
    return april.Prompt(np.array([5], np.int32), data)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# ---------------------------------------------------------------- programs


async def test_a_program_has_its_address_directory_and_input() -> None:
    """Each of them is made of the prompt; the end is its exit code and what it has written."""
    code = "import os, sys; print(os.environ['ANTHROPIC_BASE_URL'], os.environ['OPENAI_API_KEY'], os.environ['MORE'])"
    code += "; print(os.getcwd(), sys.stdin.read()); print('no', file=sys.stderr); sys.exit(3)"
    made = program(
        lambda p: python(code), stdin=lambda p: p.data["task"], env={"MORE": "m"}, cwd=lambda p: p.data["where"]
    )
    found = await made(prompt(task="do it", where="/"), LLM)
    assert found == ProgramResult(3, "http://127.0.0.1:1/x secret m\n/ do it\n", "no\n")


async def test_a_program_is_told_its_address_where_it_looks(tmp_path: Path) -> None:
    """In its arguments, in a variable of its own, in the name of its directory, and in a file of settings. Braces in
    the text of a prompt, such as a program's, stay as they are."""

    def settings(prompt: april.Prompt, base_url: str, api_key: str) -> Path:
        (tmp_path / "settings").write_text(base_url, "utf-8")
        return tmp_path / f"of {api_key}"

    (tmp_path / "of secret").mkdir()
    code = "import os, sys; print(sys.argv[1], os.environ['AT'], open('../settings').read(), os.getcwd())"
    task, url = '{}f"{base_url}/{api_key}"', DOOR.url
    for command, env, cwd in (
        ([*python(code), task], {"AT": "{api_key}@{base_url}"}, settings),
        (
            lambda p: [*python(code), p.data["task"]],
            lambda p, api_key: {"AT": f"{api_key}@{url}"},
            f"{tmp_path}/of {{api_key}}",
        ),
    ):
        made = program(command, env=env, cwd=cwd)
        shown = task if callable(command) else f'{{}}f"{url}/secret"'
        found = await made(prompt(task=task), LLM)
        assert found.stdout == f"{shown} secret@{url} {url} {tmp_path}/of secret\n"


async def test_a_program_ends_with_its_sample_and_so_does_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process group is ended when the function is cancelled, a child that ignores SIGTERM included."""
    monkeypatch.setattr("april.agents.rollout_functions.TERMINATE_S", 0.05)
    pid = tmp_path / "pid"
    child = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child += f"open({str(pid)!r} + '.new', 'w').write(str(os.getpid())); os.rename({str(pid)!r} + '.new', {str(pid)!r})"
    child += "; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    running = asyncio.ensure_future(program(python(code))(prompt(), LLM))
    while not pid.exists():  # noqa: ASYNC110 - a process of its own
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    number = int(pid.read_text("utf-8"))
    while alive(number):  # noqa: ASYNC110 - whoever takes over orphans reaps it
        await asyncio.sleep(0.01)


async def test_what_a_program_leaves_running_does_not_keep_its_sample() -> None:
    """The program's end is the sample's; a child with its streams is ended then."""
    found = await program(["sh", "-c", "sleep 600 & echo $!"])(prompt(), LLM)
    assert found.returncode == 0
    while alive(int(found.stdout)):  # noqa: ASYNC110 - whoever takes over orphans reaps it
        await asyncio.sleep(0.01)


async def test_the_last_of_what_a_program_writes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stream; a program that does not read what it is given is no error."""
    monkeypatch.setattr("april.agents.rollout_functions.MAX_OUTPUT_BYTES", 4)
    code = "import sys; sys.stdout.write('abcdefgh'); sys.stderr.write('12345')"
    found = await program(python(code), stdin=lambda p: "x" * 300_000)(prompt(), LLM)
    assert found == ProgramResult(0, "efgh", "2345")


REFUSED = """
import os, urllib.request as u
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b'{"messages": [], "n": 2}', head))
"""
UNHEARD = """
import os, socket
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
body = b'{"messages": [{"role": "user", "content": "#hello"}]}'
head = f"POST {url.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n"
key = f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n\\r\\n"
socket.create_connection((url.hostname, url.port)).sendall((head + key).encode() + body)
raise SystemExit("I cannot wait with " + os.environ["OPENAI_API_KEY"])
"""


def run_programs(command: list[str]) -> None:
    """Run a step whose samples are programs."""
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=60)
    engine = FakeEngine("e", vocab_size=VOCAB, eos_token_id=EOS, seconds_per_token=0.05)
    with april.RolloutScheduler(
        config, prompts=[{"token_ids": [20]}] * 6, rollout=program(command), reward=lambda p, r: 1.0, engines=[engine],
        tokenizer=TOKENIZER, renderer=renderers.Qwen3RendererConfig(enable_thinking=False), progress=False,
    ) as rollouts:  # fmt: skip
        rollouts.next_batch()


@pytest.mark.parametrize(("command", "says"), [
    (python("import no_such_agent"), r"-c import no_such_agent ended with exit code 1 .* named 'no_such_agent'$"),
    (python(REFUSED), r"exit code 1 .*april refused its last request: messages must be a list.*HTTP Error 400"),
    (python("pass"), r"-c pass ended with exit code 0 before it had received an answer from april$"),
    (python("from os import environ as e; exit(f'no {e[\"OPENAI_BASE_URL\"]} for {e[\"OPENAI_API_KEY\"]}')"),
     r"exit code 1 .*its last output: no http://.* for KEY$"),
    (["no-such-program"], "no-such-program cannot be started: .*No such file"),
])  # fmt: skip
def test_a_program_that_gets_no_answer_ends_the_run(command: list[str], says: str) -> None:
    """Programs that all fail alike end the run, with command, exit code, april's own refusal and the last lines."""
    with pytest.raises(RolloutError, match=says):
        run_programs(command)


def test_a_program_that_leaves_before_its_answer_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """A request that april accepted is no answer; the key that the program printed is not shown."""
    with pytest.raises(april.AprilError):
        run_programs(python(UNHEARD))
    assert "its last output: I cannot wait with KEY" in caplog.text


def alive(number: int) -> bool:
    """Whether a process is there, and is more than the entry of one that has ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("command", ["ls", [], [1], ["ls", None], [b"ls"], None])
def test_a_command_is_a_list_of_words(command: Any) -> None:
    """Anything else is refused at once."""
    with pytest.raises(UsageError, match="must be a list of strings or paths, got"):
        program(command)


class Command:
    """Makes the command of each prompt."""

    def __call__(self, prompt: april.Prompt, name: str = "ls") -> list[str]:
        return [name]


@pytest.mark.parametrize(
    ("command", "name"),
    [([Path("a", "ls")], "a/ls"), (Command(), "Command"), (functools.partial(Command(), name="ps"), "Command")],
)
def test_a_command_may_have_paths_or_be_whatever_is_called(command: Any, name: str) -> None:
    """Warnings name the function as its user knows it."""
    assert program(command).__qualname__ == f"program {name}"


# ---------------------------------------------------------------- verifiers


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def scheduler(environment: Environment, **changes: Any) -> april.RolloutScheduler:
    """A scheduler whose prompts, rollout function and reward are an environment's."""
    engine = FakeEngine(
        "e", responses=lambda request: reply(conversation(request).tolist()), vocab_size=VOCAB, eos_token_id=EOS,
        seconds_per_token=1e-5,
    )  # fmt: skip
    wrapped = Verifiers(environment, TOKENIZER)
    values = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 99, "max_failed_groups": 1}
    arguments: dict[str, Any] = {"prompts": wrapped.prompts, "rollout": wrapped.rollout, "reward": wrapped.reward}
    return april.RolloutScheduler(
        april.Config(**values), engines=[engine], tokenizer=TOKENIZER, check=True, progress=False,
        renderer=renderers.Qwen3RendererConfig(enable_thinking=False), **(arguments | changes),
    )  # fmt: skip


def test_an_agent_that_is_not_trained_has_no_policy(package: None) -> None:
    """Its request is refused by name, and no token of it is the sample's."""
    environment = Environment((True, False))
    with scheduler(environment) as rollouts:
        batch = rollouts.next_batch()
    assert batch.one_row_each
    assert batch.rewards.tolist() == [1.0] * 4
    refused = [said["message"] for said in environment.said if said != "hi"]
    assert all("give 'agent1' a model of its own" in message for message in refused)
    assert all("agent1.model, agent1.client.base_url and" in message for message in refused)
    assert len(refused) >= 4


def test_two_agents_that_are_trained_have_no_one_reward(package: None) -> None:
    """The reward function says what to do; with one of yours, their answers are rows of one sample."""
    environment = Environment((True, True))
    with pytest.raises(april.AprilError, match="2 traces to train"), scheduler(environment) as rollouts:
        rollouts.next_batch()
    total = sum
    with scheduler(
        environment, reward=lambda prompt, response: total(t.reward for t in response.output.traces)
    ) as rollouts:
        batch = rollouts.next_batch()
    assert batch.rewards.tolist() == [3.0] * len(batch.rewards)
    assert not batch.one_row_each


def test_an_episode_that_failed_is_a_sample_that_failed(package: None) -> None:
    """With the error that the environment says."""
    environment = Environment(errors=(SimpleNamespace(type="SandboxError", message="no room"),))
    with pytest.raises(april.AprilError, match="SandboxError: no room"), scheduler(environment) as rollouts:
        rollouts.next_batch()
    assert environment.up == 0


def test_what_is_served_starts_once_and_stops_with_the_scheduler(package: None) -> None:
    """All episodes use the same servers and one client, in later steps too; another scheduler starts them again."""
    environment = Environment()
    for served in (1, 2):
        with scheduler(environment) as rollouts:
            for _ in range(2):
                batch = rollouts.next_batch()
                assert (environment.up, environment.served, len(environment.urls)) == (1, served, served)
                assert batch.rewards.tolist() == [1.0] * 4
                assert [TOKENIZER.decode(s.tokens[s.loss_mask == 1]) for s in batch.samples] == ["hi<|im_end|>"] * 4
        assert environment.up == 0


def test_without_the_package_or_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are named."""
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match="pip install verifiers"):
        Verifiers(Environment())
