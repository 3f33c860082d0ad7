"""Rollout functions out of what exists: a program that brings its own client, a function of many prompts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from april.core.types import Prompt
from april.driver.llm import LLM, BlockingLLM, RolloutFunction
from april.errors import RolloutError, UsageError

MOST_OUTPUT = 1 << 20
"""Bytes of each of a program's streams that are kept: the last ones."""
PATIENCE_S = 5.0
"""Seconds that a program has to end after SIGTERM, before SIGKILL."""


class ProgramResult(NamedTuple):
    """How a program has ended: its exit code (below 0: the signal), and the last of what it has written."""

    returncode: int
    stdout: str
    stderr: str


def program(
    command: Sequence[str] | Callable[[Prompt], Sequence[str]],
    *,
    stdin: Callable[[Prompt], str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | Callable[[Prompt], str | os.PathLike[str]] | None = None,
) -> RolloutFunction:
    """A rollout function that runs a program for each sample, whose client finds the policy in its environment.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are those of the sample. The program's end
    is the function's, and what it returns is a :class:`ProgramResult`, which the reward sees as ``response.output``. It
    runs in a process group of its own, which is ended with the sample.

    Args:
        command: the program and its arguments, or what makes them of the prompt. No shell is involved.
        stdin: what the program reads, made of the prompt; None means nothing.
        env: variables beside those of this process; None as a value is not possible, "" is.
        cwd: the directory in which it runs, or what makes one for the prompt.

    Raises UsageError for a command that is no list of strings.
    """
    if not callable(command):
        command = _words(command)

    async def rollout(prompt: Prompt, llm: LLM) -> ProgramResult:
        words = _words(command(prompt)) if callable(command) else command
        url, key = llm.base_url, llm.api_key
        variables = {
            **os.environ, **(env or {}), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key,
        }  # fmt: skip
        running = _Running()
        pipe = asyncio.subprocess.PIPE
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: running, *words, cwd=cwd(prompt) if callable(cwd) else cwd, env=variables,
                start_new_session=True, stdin=asyncio.subprocess.DEVNULL if stdin is None else pipe, stdout=pipe,
                stderr=pipe,
            )  # fmt: skip
        except OSError as error:
            raise RolloutError(f"{words[0]} cannot be started: {error}") from error
        try:
            if stdin is not None:
                reads: Any = transport.get_pipe_transport(0)
                reads.write(stdin(prompt).encode())
                reads.write_eof()
            await asyncio.shield(running.exited)
        finally:
            await asyncio.shield(_end(transport, running))
        code = transport.get_returncode()
        assert code is not None
        return ProgramResult(code, *(kept.decode(errors="replace") for kept in running.kept.values()))

    rollout.__qualname__ = f"program {command[0] if not callable(command) else command.__qualname__}"
    return rollout


def _words(command: Any) -> list[str]:
    listed = isinstance(command, Sequence) and not isinstance(command, str)
    words = [os.fspath(word) for word in command] if listed else []
    if not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"program: the command must be a list of strings, got {command!r}")
    return words


class _Running(asyncio.SubprocessProtocol):
    """A program that runs. What it has started may hold its streams open for longer than it is there itself."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.kept = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last of it."""
        self.kept[fd] += data
        del self.kept[fd][:-MOST_OUTPUT]

    def process_exited(self) -> None:
        """It has ended itself."""
        self.exited.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and nobody has its streams any more."""
        self.closed.set_result(None)


async def _end(transport: asyncio.SubprocessTransport, running: _Running) -> None:
    """End the program, and whatever it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), number)
        await asyncio.wait([running.closed], timeout=PATIENCE_S)
    transport.close()


def batched(function: Callable[..., Any]) -> Callable[[Prompt, BlockingLLM], Any]:
    """A rollout function out of one that takes a list of prompts and returns a list of as many completions.

    ``function(prompts, base_url=..., api_key=...)`` is called for each sample, in a thread, with a list of one: the
    ``data`` of its prompt. Its client asks at ``base_url``; the completion is what the reward sees as
    ``response.output``. Samples wait for each other no more than those of any other rollout function.
    """

    def rollout(prompt: Prompt, llm: BlockingLLM) -> Any:
        completions = function([prompt.data], base_url=llm.base_url, api_key=llm.api_key)
        if not isinstance(completions, Sequence) or isinstance(completions, str) or len(completions) != 1:
            raise UsageError(
                f"{rollout.__qualname__} was given one prompt and must return a list of one completion, got "
                f"{completions!r:.100}"
            )
        return completions[0]

    rollout.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    return rollout
