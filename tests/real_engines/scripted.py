"""The scripted model of the suite for gateways inside a real vLLM or SGLang: the server computes, the script chooses.

Every token is sampled by the server itself, from logits in which only the script's next token is left. vLLM's
log-probabilities are those of the model, before that; SGLang's are computed after it, so there the script's token is
lifted just above all others, which greedy sampling takes. A context that asks for nothing of the script is left alone.

While the file exists that ``HOLD`` names, a step in which a long answer is under way takes HELD_STEP_S.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.gateway_suite.script import LONG_WORDS, MARKS, REPLIES, TOKENIZER, VOCAB, reply, word_of

HOLD, ANSWER = "APRIL_TESTS_HOLD", "APRIL_TESTS_ANSWER"
"""Variables of the server's environment: a file's name; token ids, with commas, that answer every conversation."""
HELD_STEP_S = 0.15
LIFT = 1.0
"""How far the script's token is above the others, where it is lifted."""
START = MARKS.index("<|im_start|>")
HEAD = [START, *TOKENIZER.encode("assistant\n")]
NO_THOUGHT = TOKENIZER.encode("<think>\n\n</think>\n\n")


@cache
def _answer() -> list[int]:
    return [int(word) for word in os.environ.get(ANSWER, "").split(",") if word]


def _of_chat(ids: list[int]) -> int | None:
    """The place at which the answer of a conversation begins; None: nothing of the script is asked for."""
    last = len(ids) - 1 - ids[::-1].index(START)
    begin = last + len(HEAD)
    if ids[last:begin] != HEAD or not any(f"#{word}" in TOKENIZER.decode(ids[:begin]) for word in REPLIES):
        return None
    return begin + len(NO_THOUGHT) * (ids[begin : begin + len(NO_THOUGHT)] == NO_THOUGHT)


def _of_text(ids: list[int]) -> int | None:
    """The same of a text, which ends with the word that is asked for, or goes on with the beginning of its answer."""
    mark = TOKENIZER.encode("#")[0]
    last = len(ids) - 1 - ids[::-1].index(mark) if mark in ids else len(ids)
    for begin in range(len(ids), last, -1):
        if TOKENIZER.decode(ids[last + 1 : begin]) in REPLIES and reply(ids[:begin])[: len(ids) - begin] == ids[begin:]:
            return begin
    return None


class Line:
    """What the script says behind a request's tokens, which may end in the middle of an answer."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: Sequence[int] = ()
        self.long = False
        ids = list(prompt)
        if _answer():
            self.tokens = _answer() if START in ids else ()
        elif max(ids) < VOCAB and (begin := (_of_chat if START in ids else _of_text)(ids)) is not None:
            self.tokens = reply(ids[:begin])[len(ids) - begin :]
            self.long = word_of(ids[:begin]) in LONG_WORDS

    def next(self, count: int) -> int | None:
        """The token behind ``count`` that were generated; None: the model's own."""
        return self.tokens[count] if count < len(self.tokens) else None


def slow_down() -> None:
    """Take a while, if the engine is held."""
    if os.path.exists(os.environ.get(HOLD, "")):
        time.sleep(HELD_STEP_S)


try:
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
except ImportError:
    AdapterLogitsProcessor = object


class VllmScript(AdapterLogitsProcessor):  # type: ignore[misc]
    """``vllm serve --logits-processors tests.real_engines.scripted:VllmScript``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """One for each request."""
        line: Line | None = None

        def process(prompt: list[int], made: list[int], logits: Any) -> Any:
            nonlocal line
            line = Line(prompt) if line is None else line
            if (token := line.next(len(made))) is not None:
                kept = logits[token].clone()
                logits.fill_(float("-inf"))
                logits[token] = kept
            self.long = self.long or line.long
            return logits

        return process

    long = False

    def apply(self, logits: Any) -> Any:
        self.long = False
        logits = super().apply(logits)
        if self.long:
            slow_down()
        return logits


class SglangScript:
    """A custom logit processor; SGLang finds it in this module, in the process that runs the model."""

    def __call__(self, logits: Any, params: list[dict[str, Any]] | None = None) -> Any:
        held = False
        for row, param in enumerate(params or ()):
            request = param["__req__"]
            line = LINES.get(request.rid)
            if line is None:
                line = LINES[request.rid] = Line(request.origin_input_ids)
                while len(LINES) > KEPT:
                    del LINES[next(iter(LINES))]
            if (token := line.next(len(request.output_ids))) is not None:
                # an answer to everything is no matter of log-probabilities, and is to come at any temperature
                logits[row, token] = logits[row].max() + (LIFT if not _answer() else 100.0)
            held = held or line.long
        if held:
            slow_down()
        return logits


KEPT = 4096
LINES: dict[str, Line] = {}
"""By request id, as SGLang makes a processor anew for each step; the last ones."""


def script_sglang() -> None:
    """Give each request of this SGLang server the script."""
    import json

    import dill  # type: ignore[import-not-found]
    from sglang.srt.managers.io_struct import GenerateReqInput  # type: ignore[import-not-found]

    from tests.real_engines.scripted import SglangScript as script

    text = json.dumps({"callable": dill.dumps(script).hex()})
    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalized(self: Any) -> Any:
        self.custom_logit_processor = text
        self.sampling_params = {**(self.sampling_params or {}), "custom_params": {"script": True}}
        return normalize(self)

    GenerateReqInput.normalize_batch_and_arguments = normalized


if __name__ == "__main__":  # ``python -m tests.real_engines.scripted`` is SGLang's server, with the script
    from sglang.launch_server import load_plugins, run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    script_sglang()
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
