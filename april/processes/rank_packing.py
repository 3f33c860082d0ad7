"""Packs the calls of a trainer's ranks to a scheduler in another process, and the results of the calls, into bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from april.core.batch import Batch
from april.core.ledger import Ledger
from april.core.types import Prompt
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.prompt_reader import as_prompt, has_no_conversation, iterate, without_tokens
from april.driver.rewards import EvaluationResult, Response
from april.driver.weight_update import absolute
from april.errors import ConfigError, RankError, RolloutError
from april.processes.rank_messages import ErrorMessage, error_from_message, error_message
from april.serialization.own_values import pack, unpack
from april.serialization.plain_values import why_not_plain

QUERY_RESULTS: dict[str, Any] = {
    "state_dict": dict[str, Any], "version": PolicyVersion, "ledger": dict[str, Ledger],
    "held_groups": frozenset[int], "validate": None, "story": str,
    "record_report": None,
}  # fmt: skip
"""Attributes and methods of the scheduler that a single rank may ask for, with the type of each result."""
CALL_RESULTS: dict[str, Any] = {
    "next_batch": Batch, "weight_update": tuple[PolicyVersion, bytes], "load_state_dict": tuple[PolicyVersion, bytes],
    "evaluate": EvaluationResult, "lower_staleness": int, "commit": None, "extend": None, "pause": None, "resume": None,
    "add_engine": str, "remove_engine": None,
}  # fmt: skip
"""Methods that the ranks call together, with the type of each result. The bytes after a version hold a few weight
values of rank 0, with which the other ranks check that they have the same model."""
_PROMPT_METHODS = {"evaluate", "extend"}
_MAX_TOKEN_ID = 1 << 31
"""Upper bound of token ids before a call is sent; the scheduler checks the ids against its vocabulary."""


class _PackedCall(msgspec.Struct):
    """A call with its arguments by name, or the error because of which it could not be packed."""

    method: str
    arguments: dict[str, Any] = {}
    prompts: list[Prompt] | None = None
    transfer: bool = False
    """True if the ranks have a function that transfers the weights."""
    error: ErrorMessage | None = None


def pack_call(method: str, arguments: Mapping[str, Any]) -> bytes:
    """Pack a call for :func:`unpack_call`; raises ConfigError for arguments that cannot go to another process."""
    call = _PackedCall(method, {name: plain_value(value) for name, value in arguments.items()})
    if method in _PROMPT_METHODS:
        prompts = enumerate(iterate(call.arguments.pop("prompts"), f"{method}: "))
        call.prompts = [_as_plain_prompt(method, prompt, i) for i, prompt in prompts]
    if callable(arguments.get("transfer")):
        call.transfer = True
        del call.arguments["transfer"]
    if isinstance(path := call.arguments.get("path"), str):
        call.arguments["path"] = absolute(path)  # the scheduler's process has another working directory
    try:
        return pack(call)
    except TypeError as error:
        raise ConfigError(f"{method}: an argument cannot be sent to the core's actor: {error}") from None


def pack_failure(error: Exception) -> bytes:
    """Pack the error of :func:`pack_call` in place of the call, so that it is raised on all ranks."""
    return pack(_PackedCall("", error=error_message(error)))


def unpack_call(content: bytes, transfer: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
    """Return method and arguments of a call; ``transfer`` makes all ranks transfer the weights.

    Raises RankError for a method that is not in CALL_RESULTS, and the error that :func:`pack_failure` has packed.
    """
    call = unpack(content, _PackedCall)
    if call.error is not None:
        raise error_from_message(call.error)
    if call.method not in CALL_RESULTS:
        raise RankError(f"a rank calls {call.method!r}, which ranks cannot call", (0,))
    more: dict[str, Any] = {} if call.prompts is None else {"prompts": call.prompts}
    return call.method, call.arguments | more | ({"transfer": transfer} if call.transfer else {})


def plain_value(value: Any) -> Any:
    """Return a path as its text, a numpy scalar as its number, and any other value unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def plain_argument(value: Any) -> Any:
    """Return :func:`plain_value` of an argument of a query, or of each value of a mapping."""
    if isinstance(value, Mapping):
        return {name: plain_value(each) for name, each in value.items()}
    return plain_value(value)


def _as_plain_prompt(method: str, item: Any, number: int) -> Prompt:
    chat = isinstance(item, Mapping) and item.get("messages") and not {"token_ids", "input_ids"} & item.keys()
    if chat or (isinstance(item, Mapping) and item.get("images")):
        raise ConfigError(
            f"{method}: prompt {number} is a chat or has images, which can only be read in the scheduler's process; "
            "give it among the scheduler's prompts, or give token ids here"
        )
    # accept a prompt without tokens: only the scheduler knows whether the rollout function makes its own
    bare = item and has_no_conversation(item)
    prompt = without_tokens(item, number) if bare else as_prompt(item, _MAX_TOKEN_ID, number)
    refuse_not_plain(prompt)
    return prompt


def refuse_not_plain(prompt: Prompt) -> None:
    """Raise RolloutError for a prompt whose data cannot go to another process."""
    data = dict(prompt.data)
    why = why_not_plain(data, "data")
    why = why or next((f"the key {key!r}, which is not a string" for key in data if type(key) is not str), None)
    if why is not None:
        raise RolloutError(
            f"the data of prompt {prompt.position} cannot be sent to another rank: {why}; use numbers, text, bytes, "
            "lists and dicts"
        )


def with_detokenizer(result: EvaluationResult, detokenizer: Detokenizer | None) -> EvaluationResult:
    """Return an evaluation with this detokenizer in its responses.

    With None, the evaluation can be sent to another rank: outputs that cannot be sent are dropped, too.
    """

    def changed(r: Response) -> Response:
        sendable = detokenizer is not None or why_not_plain(r.output, "it") is None
        return replace(r, output=r.output if sendable else None, detokenizer=detokenizer)

    return replace(result, responses=tuple(tuple(map(changed, row)) for row in result.responses))
