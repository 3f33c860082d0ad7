"""No number from an engine is believed before it was looked at, and no end of a response.

One owner for all engines. Which numbers can be true at all, ``april.core.numbers`` knows, for saved states as well.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from april.core.numbers import wrong_ids, wrong_logprobs
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import WireError
from april.server_text import quoted

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def check_chunk(
    chunk: Chunk, vocab_size: int, room: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless the chunk can be true.

    Checked: int32 and float32 arrays of one length, at most ``room`` tokens, ids in [0, vocab_size), log-probabilities
    that a sampled token can have, a version between ``oldest`` (that of the tokens before; None: any) and ``newest``.
    """
    tokens, logprobs = chunk.tokens, chunk.logprobs
    for array, what, dtype in ((tokens, "tokens", _INT32), (logprobs, "log-probabilities", _FLOAT32)):
        if getattr(array, "dtype", None) != dtype or array.ndim != 1:
            raise WireError(f"{what} must be a flat array of {dtype}, got {type(array).__name__}")
    count = len(tokens)
    if len(logprobs) != count:
        raise WireError(f"{count} tokens came with {len(logprobs)} log-probabilities")
    if count > room:
        raise WireError(f"{count} tokens came where {room} were left of the budget")
    if count == 0:
        return
    if chunk.version > newest or (oldest is not None and chunk.version < oldest):
        since = "any" if oldest is None else str(oldest)
        raise WireError(f"policy version {chunk.version} came where {since} to {newest} was possible")
    wrong = wrong_ids(tokens, vocab_size) or wrong_logprobs(logprobs)
    if wrong is not None:
        raise WireError(wrong)


def check_end(
    end: Chunk, request: Request, count: int, last_token: int, max_context: int, eos_token_ids: Collection[int]
) -> None:
    """Raise WireError unless a response can have ended as its engine says.

    LENGTH needs the budget, or the engine's context, used up: what is shorter was cut off by something else, or tokens
    got lost on the way. STOP needs a last token that ends responses, and no fewer than ``min_tokens``. An ABORT that
    nobody asked for is a cut like any other.

    Args:
        end: the chunk that ended it.
        request: as it was sent; without stop strings, which engines never see.
        count: tokens that came, at least 1; ``last_token`` is the last of them.
        max_context: of the engine.
        eos_token_ids: ids that end every response; empty: not known, and the engine's word is taken for it.
    """
    sampling = request.sampling
    if end.finish is EngineFinish.LENGTH:
        if count < sampling.max_tokens and len(request.token_ids) + count < max_context:
            raise WireError(
                f'the response has ended for want of room ("length") after {count} of {sampling.max_tokens} tokens; if '
                f"the engine's context is smaller than {max_context}, set engine.max_len to what it was started with; "
                "if it keeps to max_new_tokens of the model's generation_config.json (vLLM: unless it was started with "
                "--generation-config vllm), set max_response_len to that"
            )
    elif end.finish is EngineFinish.STOP:
        said = end.stopped_at
        if isinstance(said, str):
            raise WireError(f"the response has stopped at the text {quoted(said)}, and april had not asked for that")
        if said is not None and said != last_token:
            raise WireError(f"the response has stopped at token {said}, and its last token is {last_token}")
        if eos_token_ids and last_token not in eos_token_ids and last_token not in sampling.stop_token_ids:
            raise WireError(
                f"the response has stopped, but its last token ({last_token}) is neither EOS nor a stop token; if it "
                f"ends responses, add it to engine.eos_token_ids ({sorted(eos_token_ids)})"
            )
        if count < sampling.min_tokens:
            raise WireError(f"the response has stopped after {count} tokens where min_tokens is {sampling.min_tokens}")
