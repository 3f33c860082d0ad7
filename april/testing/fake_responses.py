"""How long a fake response is, and what it says.

Invariant: a whole response depends on the conversation before it, the sample key and the sampling parameters only, so a
request that continues it gets the rest of the same response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from april.engines.protocol import Int32, Request
from april.errors import EngineError
from april.testing.fake_tokens import conversation, fake_response

Lengths = int | Mapping[tuple[int, int], int] | Callable[[Request], int]


class FakeResponder:
    """The responses of one engine: synthetic ones of given ``lengths``, or those that ``responses`` returns."""

    def __init__(
        self,
        engine: str,
        lengths: Lengths,
        responses: Callable[[Request], Sequence[int] | Int32] | None,
        vocab_size: int,
        eos_token_id: int,
    ) -> None:
        self._engine = engine
        self._lengths = lengths
        self._responses = responses
        self._vocab_size = vocab_size
        self._eos = eos_token_id

    def stops(self, request: Request) -> set[int]:
        """Token ids that end the response."""
        return {self._eos, *request.sampling.stop_token_ids}

    def whole(self, request: Request) -> Int32:
        """The whole response that a request begins or continues, int32 [T]; ends in a stop token."""
        sampling = request.sampling
        least = max(request.response_offset + sampling.min_tokens, 1)
        if self._responses is None:
            said, length = np.empty(0, np.int32), max(self._length(request), least)
        else:
            said = self._said(request)
            if len(said) >= least:
                return said
            said, length = said[:-1], least
        drawn = fake_response(
            conversation(request), request.sample_key, length, self._vocab_size, self._eos, sampling.stop_token_ids
        )
        return np.concatenate((said, drawn[len(said) :]))

    def _said(self, request: Request) -> Int32:
        """What the function says, up to the first stop; one is appended if there is none."""
        assert self._responses is not None
        tokens = np.asarray(self._responses(request), np.int32)
        ends = np.flatnonzero(np.isin(tokens, list(self.stops(request))))
        stop = (*request.sampling.stop_token_ids, self._eos)[0]
        return tokens[: ends[0] + 1] if ends.size else np.append(tokens, np.int32(stop)).astype(np.int32)

    def _length(self, request: Request) -> int:
        if isinstance(self._lengths, int):
            return self._lengths
        if isinstance(self._lengths, Mapping):
            key = request.sample_key
            try:
                return self._lengths[key]  # type: ignore[index]  # without a key: the error below
            except KeyError:
                raise EngineError(
                    f"engine {self._engine}: the table of lengths has no entry for sample {key}; add it, or give a "
                    "number, a function or a defaultdict"
                ) from None
        return self._lengths(request)
