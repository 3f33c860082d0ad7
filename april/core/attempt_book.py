"""Records every attempt (engine request) in flight, and builds requests with their tokens, budget and seed.

Invariants: an attempt is in the book from its submission until its end is handled; each end is handled exactly once.
Attempt ids have a fixed length, because engines match ids by prefix; no id is used twice, even across restarts. Each
attempt continues one chain (conversation) of its sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from april.core.attachments import rows_of
from april.core.engine_table import EngineTable
from april.core.sampling import attempt_seed
from april.core.settings import CoreSettings
from april.core.tape import AttemptTape
from april.core.types import Attempt, Chain, GenerateCall, OnWeightUpdate, Request
from april.core.versions import PolicyVersion

EVALUATION_MARK = 0xFFFF
"""Number in attempt ids of evaluations, in place of the incarnation (number of restarts) in those of training."""


class AttemptBook:
    """Opens and closes attempts, and counts them per engine."""

    def __init__(self, settings: CoreSettings, engines: EngineTable) -> None:
        self._settings = settings
        self._engines = engines
        self._number = self._evaluation_number = 0
        self.in_flight: dict[str, Attempt] = {}
        """Training requests (attempts) in flight, by attempt id."""
        self.of_evaluations: dict[str, Attempt] = {}
        """Attempts of evaluations in flight, by id."""

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.of_evaluations)

    def __iter__(self) -> Iterator[Attempt]:
        return itertools.chain(self.of_evaluations.values(), self.in_flight.values())

    def get(self, attempt_id: str) -> Attempt | None:
        """Return the attempt in flight with this id; None if there is no such attempt, or it has ended."""
        return self.in_flight.get(attempt_id) or self.of_evaluations.get(attempt_id)

    def room(self, chain: Chain) -> int:
        """Return the maximum number of response tokens of the chain, environment tokens included."""
        return min(self._settings.max_response_len, self._engines.max_context - len(chain.prompt))

    def budget(self, call: GenerateCall) -> int:
        """Return how many tokens the call may still generate by its own limit and the limits of chain and sample."""
        chain, most = call.chain, self._settings.max_sample_tokens
        held = len(chain.tape.tokens)
        left = min(self.room(chain) - held, call.sampling.max_tokens - (held - call.start))
        return left if most is None else min(left, most - call.sample.generated)

    def open(self, call: GenerateCall, engine: str, version: PolicyVersion) -> Attempt:
        """Create the attempt that continues ``call`` after its present tokens; the engine has weights ``version``."""
        chain, sample = call.chain, call.sample
        evaluation, s, held = sample.evaluation, self._settings, len(chain.tape.tokens)
        run_seed, key, incarnation, attempts = s.run_seed, sample.id, version.incarnation, self.in_flight
        if evaluation is None:
            self._number = number = self._number + 1
        else:
            self._evaluation_number = number = self._evaluation_number + 1
            run_seed, key, incarnation = evaluation.request.seed, sample.key, EVALUATION_MARK
            attempts = self.of_evaluations
            evaluation.in_flight += 1
        extras = s.extras if evaluation is None else ()
        seed = attempt_seed(run_seed, key.group, key.index, held, sample.restarts, chain.number)
        sampling = call.sampling.after(held - call.start, seed).capped(self.budget(call))
        able = self._engines.states[engine].limits
        # with KEEP, a weight update ends requests that have no token yet; only a stream shows whether they have one
        keeps = s.on_weight_update is OnWeightUpdate.KEEP and evaluation is None and able.streams
        # An engine knows only the text of its own request, so april searches for stop strings itself once a call was
        # cut. Under a grammar it always does: if an engine stops at a string that april does not find, the call is
        # sent again, and a call with a grammar begins again with the same seed, so it would stop there for ever.
        begins = held == call.start and not call.sampling.grammar
        searched = able.stop_strings and begins and not call.failures
        request = Request(
            attempt_id=f"{s.run_id:016x}{incarnation:04x}{number:012x}",
            token_ids=np.concatenate((chain.prompt, chain.tape.tokens)) if held else chain.prompt,
            sampling=replace(sampling, stop=()) if sampling.stop and not searched else sampling,
            priority=0 if sample.urgent else 1,
            sample_key=sample.key,
            response_offset=held - call.start,
            stream=keeps or (bool(sampling.stop) and not searched),
            in_flight=s.on_weight_update,
            attached=chain.attached,
            extras=extras,
            extras_from=rows_of(chain.extras) if extras else 0,
        )
        attempt = Attempt(
            request=request, call=call, engine=engine, tape=AttemptTape(needs_rows=bool(extras)),
            end_ids=self._end_ids(call), oldest=version,
        )  # fmt: skip
        attempts[attempt.id] = attempt
        self._engines.states[engine].add(1)
        sample.attempts += 1
        call.attempt = attempt
        return attempt

    def close(self, attempt_id: str) -> Attempt | None:
        """Remove the attempt from the book and return it; None if it is not in flight."""
        attempt = self.in_flight.pop(attempt_id, None)
        if attempt is None and (attempt := self.of_evaluations.pop(attempt_id, None)) is not None:
            assert attempt.sample.evaluation is not None
            attempt.sample.evaluation.in_flight -= 1
        if attempt is not None:
            self._engines.states[attempt.engine].add(-1)
            attempt.call.attempt = None
        return attempt

    def ends_in_stop(self, call: GenerateCall) -> bool:
        """Return True if the call's tokens, perhaps restored from a saved state, already end in EOS or a stop token."""
        tape = call.chain.tape
        if len(tape) - call.start <= call.sampling.min_tokens:
            return False
        return int(tape.tokens[-1]) in self._end_ids(call)

    def _end_ids(self, call: GenerateCall) -> frozenset[int]:
        eos, stops = self._engines.eos_token_ids, call.sampling.stop_token_ids
        return eos.union(stops) if stops else eos
