"""The clients, each as a sample's rollout function."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from april.agents import Verifiers, program
from april.core.types import Prompt
from tests.clients import environments as envs
from tests.clients.bench import TURN, Case, Script
from tests.gateway_suite.script import TOKENIZER
from tests.real_engines.environments import environment

PROGRAMS = Path(__file__).parent / "programs"


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it: with white space that no client writes."""
    return f'<tool_call>\n{{"name":  "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def in_turn(*answers: str) -> Callable[[str], str]:
    """A script: the first answer in the first turn of the assistant, and so on."""

    def says(conversation: str) -> str:
        return answers[min(conversation.count(TURN), len(answers)) - 1]

    return says


CALCULATOR = in_turn(
    "First of all I add the two numbers.\n" + call("add", b=3, a=2),
    "That was it, and now both others at once.\n" + call("multiply", a=5, b=7) + "\n" + call("add", a=5, b=5),
    "The sum is 5, and seven times the sum is 35.",
    call("add", a=35, b=-1),
    "One less than that is 34, if I am not mistaken.",
)


def _told(output: Any) -> Any:
    if output.returncode:
        raise AssertionError(f"exit status {output.returncode}: {output.stderr[-1500:]}")
    return json.loads(output.stdout.strip().splitlines()[-1])


def _calculator(name: str, command: Sequence[str]) -> Case:
    return Case(
        name=name, rollout=program(command, env={"OPENAI_AGENTS_DISABLE_TRACING": "1"}), script=CALCULATOR,
        seen=lambda output: _told(output)["transcript"], tells=_told,
    )  # fmt: skip


def sdks() -> list[Case]:
    """OpenAI's and Anthropic's Python clients."""
    python = str(environment(envs.SDKS) / "bin" / "python")
    cases = []
    for dialect in ("chat", "responses"):
        for modes in ((), ("stream",), ("async",), ("async", "stream")):
            name = " ".join(("openai", dialect, *modes))
            cases.append(_calculator(name, [python, str(PROGRAMS / "openai_client.py"), dialect, *modes]))
    for modes in ((), ("stream",), ("async",), ("async", "stream")):
        name = " ".join(("anthropic messages", *modes))
        cases.append(_calculator(name, [python, str(PROGRAMS / "anthropic_client.py"), *modes]))
    return cases


def javascript() -> list[Case]:
    where = envs.of_npm("sdks-js")
    node = [str(where / "node_modules" / ".bin" / "node"), str(PROGRAMS / "sdks.mjs"), str(where)]
    return [
        _calculator(" ".join((f"{'anthropic' if dialect == 'messages' else 'openai'}.js", dialect, *modes)),
                    [*node, dialect, *modes])
        for dialect in ("chat", "responses", "messages") for modes in ((), ("stream",))
    ]  # fmt: skip


def frameworks() -> list[Case]:
    python = str(environment(envs.FRAMEWORKS) / "bin" / "python")
    found = {"openai-agents": ("chat", "responses"), "pydantic-ai": ("chat", "responses", "messages")}
    files = {"openai-agents": "openai_agents.py", "pydantic-ai": "pydantic_agent.py"}
    return [
        _calculator(" ".join((name, dialect, *modes)), [python, str(PROGRAMS / files[name]), dialect, *modes])
        for name, dialects in found.items() for dialect in dialects for modes in ((), ("stream",))
    ]  # fmt: skip


def repairer(tool: str = "bash", argument: str = "command", last: str = "") -> Script:
    """What the model says to a harness whose shell is a tool of this name."""

    def shell(said: str, command: str) -> str:
        return said + "\n" + call(tool, **{argument: command})

    return in_turn(
        shell("Let me look at what there is.", "ls; cat sums.py"),
        shell("It subtracts. I put that right.", "sed -i 's/a - b/a + b/' sums.py"),
        shell("Is it right now?", "python3 check.py"),
        *([shell("It is, and that is all.", last)] if last else []),
        "The sum in sums.py is a sum now.",
    )


DAY = "2026-01-01T00:00:00Z"
TASK = "check.py fails. Repair sums.py."
SHOWS_THE_REST = 'cd "$1" && shift && "$@"; s=$?; git diff; exit $s'
"""Runs a harness in a directory, and writes what it has changed behind its own output."""


def _repository(name: str) -> str:
    """A directory with a repository in which something is wrong, made anew."""
    where = WORK / name
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    (where / "sums.py").write_text("def add(a, b):\n    return a - b\n", "utf-8")
    (where / "check.py").write_text("from sums import add\n\nassert add(2, 3) == 5\nprint('good')\n", "utf-8")
    (where / ".gitignore").write_text("__pycache__\n", "utf-8")
    who = {"GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "n@example.org", "GIT_COMMITTER_NAME": "n",
           "GIT_COMMITTER_EMAIL": "n@example.org", "GIT_AUTHOR_DATE": DAY, "GIT_COMMITTER_DATE": DAY}  # fmt: skip
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a sum"]):
        subprocess.run(["git", *words], cwd=where, check=True, env=os.environ | who)
    return str(where)


def _harness(
    name: str, command: Sequence[str], script: Script, version: str, of_the_moment: str = "(?!)", **env: str
) -> Case:
    def words(prompt: Prompt) -> list[str]:
        return ["sh", "-c", SHOWS_THE_REST, "sh", _repository(name), *command]

    def seen(output: Any) -> str:
        diff = output.stdout.partition("diff --git")[2]
        if output.returncode or "+    return a + b" not in diff:
            raise AssertionError(f"exit status {output.returncode}: {output.stdout[-1500:]} {output.stderr[-1500:]}")
        return str(diff)

    (WORK / "home").mkdir(parents=True, exist_ok=True)
    env = {"HOME": str(WORK / "home"), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return Case(
        name=name, rollout=program(words, env=env), script=script, seen=seen,
        tells=lambda output: {"versions": {name: version}}, of_the_moment=of_the_moment,
    )  # fmt: skip


def mini() -> list[Case]:
    python = environment(envs.MINI) / "bin" / "python"
    command = [
        str(python.with_name("mini")), "--task", TASK, "--yolo", "--exit-immediately", "--model", "openai/policy",
        "--output", str(WORK / "mini.json"),
    ]  # fmt: skip
    script = repairer(last="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return [_harness(
        "mini-swe-agent", command, script, envs.version_of(python, "mini-swe-agent"), MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors", LITELLM_LOCAL_MODEL_COST_MAP="True",
    )]  # fmt: skip


def verifiers() -> list[Case]:
    """Two episodes of one environment, with verifiers' own harness in a process of its own."""
    from importlib.metadata import version

    from verifiers.v1 import SingleAgentEnv, SingleAgentEnvConfig

    sys.path.insert(0, str(PROGRAMS))
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    environment = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": "sums_taskset"}, agent=agent))
    wrapped = Verifiers(environment, TOKENIZER)
    prompts = list(wrapped.prompts)

    def seen(episode: Any) -> Any:
        (trace,) = episode.traces
        assert trace.reward == 1.0, trace
        return [[m.model_dump(mode="json") for m in branch.messages] for branch in trace.branches]

    return [
        Case(
            name=f"verifiers bash {number}", rollout=wrapped.rollout, script=repairer(), seen=seen, data=prompt,
            tells=lambda episode: {"versions": {"verifiers": version("verifiers")}},
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def codex() -> list[Case]:
    """OpenAI's Codex, which speaks Responses and streams."""
    where = envs.of_npm("codex") / "node_modules"
    # its provider is configured, not in the environment; april refuses what only OpenAI's server can do for it
    shell = """exec "$0" exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check --model policy \\
        -c web_search=disabled -c analytics.enabled=false --disable multi_agent -c model_provider=april \\
        -c "model_providers.april={name='april', base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY'}" "$@" </dev/null
    """
    command = ["sh", "-c", shell, str(where / ".bin" / "codex"), TASK]
    version = json.loads((where / "@openai" / "codex" / "package.json").read_text("utf-8"))["version"]
    moment = r"[a-z]+_[0-9a-f-]{16,}|Wall time: [0-9.]+|Chunk ID: \w+"
    return [_harness("codex", command, repairer("exec_command", "cmd"), version, moment, CODEX_HOME=str(WORK / "home"))]


def claude_code() -> list[Case]:
    """Anthropic's Claude Code, which speaks Messages and streams."""
    where = envs.of_npm("claude-code") / "node_modules"
    command = [
        str(where / ".bin" / "claude"), "--print", TASK, "--allowedTools", "Bash", "--model", "policy",
        "--output-format", "json",
    ]  # fmt: skip
    version = json.loads((where / "@anthropic-ai" / "claude-code" / "package.json").read_text("utf-8"))["version"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}
    return [_harness("claude-code", command, repairer("Bash"), version, **quiet)]


WORK = Path(tempfile.mkdtemp(prefix="april-clients-"))
KINDS: dict[str, Callable[[], list[Case]]] = {
    "sdks": sdks, "javascript": javascript, "frameworks": frameworks, "mini": mini, "verifiers": verifiers,
    "codex": codex, "claude-code": claude_code,
}  # fmt: skip
