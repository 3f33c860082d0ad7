"""Makes rollout functions from agent programs that call the policy through OpenAI's or Anthropic's API."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from april.core.types import Prompt
from april.driver.llm import LLM, RolloutFunction
from april.driver.user_code import RemoteFunctionError, name_of
from april.errors import UsageError
from april.text.server_text import clean

if TYPE_CHECKING:
    from april.agents.endpoint import ServedSession

MAX_OUTPUT_BYTES = 1 << 20
"""Bytes that are kept from the end of each output stream of a program."""
TERMINATE_S = 5.0
"""Seconds that a program has to end after SIGTERM, before SIGKILL."""


class ProgramResult(NamedTuple):
    """The result of a program: its exit code (negative for a signal), and the end of its output."""

    returncode: int
    stdout: str
    stderr: str


def program(
    command: Sequence[str] | Callable[..., Sequence[str]],
    *,
    stdin: Callable[[Prompt], str] | None = None,
    env: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None,
    cwd: str | os.PathLike[str] | Callable[..., str | os.PathLike[str]] | None = None,
) -> RolloutFunction:
    """Return a rollout function that runs a program for each sample, with the policy's address in its environment.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY point to the sample's endpoint. The
    function returns when the program ends; its :class:`ProgramResult` is ``response.output`` for the reward. The
    program runs in a process group of its own, which is ended with the sample.

    In the strings of ``command``, ``env`` and ``cwd``, ``{base_url}`` and ``{api_key}`` are replaced by the sample's
    values. Each of the three may also be a function of the prompt, with parameters ``base_url`` and ``api_key`` if it
    needs the values; nothing is replaced in the function's result, because a prompt may contain such braces.

    Args:
        command: program and arguments. No shell is involved.
        stdin: function that makes the program's standard input from the prompt; None means no input.
        env: environment variables to add to those of this process; a value may be "", but not None.
        cwd: working directory; None means that of this process.

    A sample fails if its program ends without having received an answer. The error names the command, the exit code,
    the end of the output, and why april refused the last request. If the programs of all first samples fail in the
    same way, the run ends with this error, as with any rollout function.

    Raises UsageError for a command that is not a list of strings or paths.
    """
    if not callable(command):
        command = _checked_command(command)

    async def rollout(prompt: Prompt, llm: LLM) -> ProgramResult:
        served = cast("ServedSession", llm.endpoint())
        address = {"base_url": served.url, "api_key": served.key}
        words = _checked_command(_for_sample(command, prompt, address))
        directory = _for_sample(cwd, prompt, address)
        variables = {
            **os.environ, **(_for_sample(env, prompt, address) or {}),
            "OPENAI_BASE_URL": served.url, "OPENAI_API_KEY": served.key,
            "ANTHROPIC_BASE_URL": served.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": served.key,
        }  # fmt: skip
        process = _ProgramProcess()
        pipe = asyncio.subprocess.PIPE
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: process, *words, cwd=directory, env=variables, start_new_session=True, stdout=pipe, stderr=pipe,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else pipe,
            )  # fmt: skip
        except OSError as error:
            why = f"{words[0]} cannot be started: {error}".replace(served.key, "KEY")
            raise RemoteFunctionError(why, f"start of {words[0]}") from error
        try:
            if stdin is not None:
                reads: Any = transport.get_pipe_transport(0)
                reads.write(stdin(prompt).encode())
                reads.write_eof()
            await asyncio.shield(process.exited)
        finally:
            await asyncio.shield(_terminate(transport, process))
        code = transport.get_returncode()
        assert code is not None
        result = ProgramResult(code, *(kept.decode(errors="replace") for kept in process.output_tails.values()))
        if not served.has_received_answers:
            raise _unanswered(" ".join(words), result, served)
        return result

    rollout.__qualname__ = f"program {name_of(command) if callable(command) else command[0]}"
    return rollout


def _for_sample(value: Any, prompt: Prompt, address: Mapping[str, str]) -> Any:
    """Return an argument of :func:`program` for one sample: call it if it is a function, otherwise fill in the address.

    Only the braces of ``{base_url}`` and ``{api_key}`` are replaced; other braces stay.
    """
    if callable(value):
        parameters = inspect.signature(value).parameters
        return value(prompt, **{name: part for name, part in address.items() if name in parameters})
    if isinstance(value, Mapping):
        return {name: _for_sample(text, prompt, address) for name, text in value.items()}
    if isinstance(value, list):
        return [_for_sample(text, prompt, address) for text in value]
    for name, part in address.items():
        value = value if value is None else os.fspath(value).replace(f"{{{name}}}", part)
    return value


def _unanswered(command: str, result: ProgramResult, served: ServedSession) -> RemoteFunctionError:
    """Return the error for a program that ended without having received an answer from april."""
    output = (result.stderr.strip() or result.stdout.strip()).replace(served.key, "KEY")
    last = [line for line in output.splitlines() if line.strip()][-3:]
    code, refusal = f"exit code {result.returncode}", served.last_refusal
    command = clean(command.replace(served.key, "KEY"), 200)
    text = (
        f"{command} ended with {code} before it had received an answer from april"
        + (f"; april refused its last request: {refusal}" if refusal else "")
        + (f"; its last output: {clean(' | '.join(last), 400)}" if last else "")
    )
    # the path differs from sample to sample, and programs that fail in the same way may print it
    return RemoteFunctionError(text, f"{code}, {refusal or ''.join(last[-1:])}".replace(served.path, "PATH"))


def _checked_command(command: Any) -> list[str]:
    listed = isinstance(command, Sequence) and not isinstance(command, str)
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command] if listed else []
    if not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"program: the command must be a list of strings or paths, got {command!r}")
    return words


class _ProgramProcess(asyncio.SubprocessProtocol):
    """A running program, which may exit (``exited``) while processes that it started hold its streams (``closed``)."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.output_tails = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output_tails[fd] += data
        del self.output_tails[fd][:-MAX_OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)


async def _terminate(transport: asyncio.SubprocessTransport, process: _ProgramProcess) -> None:
    """End the program and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), number)
        await asyncio.wait([process.closed], timeout=TERMINATE_S)
    transport.close()
