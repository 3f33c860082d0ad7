"""Attempt book: records every engine request in flight, and builds requests with their tokens, budget and seed.

Invariant: an attempt is in the book from its submission until its end is handled, once; attempt ids have a fixed
length (engines match ids by prefix) and are never reused, not even after a restart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from april.core.attachments import rows_of
from april.core.engine_table import EngineTable
from april.core.sampling import attempt_seed
from april.core.settings import CoreSettings
from april.core.tape import AttemptTape
from april.core.types import Attempt, Chain, GenerateCall, OnWeightUpdate, Request, Sample, SampleId
from april.core.versions import PolicyVersion

EVALUATION_MARK = 0xFFFF
"""Takes the place of the incarnation in the attempt ids of evaluations, so that they differ from those of training."""


class AttemptBook:
    """Opens and closes attempts, and counts them per engine."""

    def __init__(self, settings: CoreSettings, engines: EngineTable) -> None:
        self._settings = settings
        self._engines = engines
        self._number = self._evaluation_number = 0
        self.in_flight: dict[str, Attempt] = {}
        """Attempts of training in flight, by id."""
        self.of_evaluations: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.of_evaluations)

    def __iter__(self) -> Iterator[Attempt]:
        return itertools.chain(self.of_evaluations.values(), self.in_flight.values())

    def get(self, attempt_id: str) -> Attempt | None:
        """Return the attempt in flight with this id; None if there is none (any more)."""
        return self.in_flight.get(attempt_id) or self.of_evaluations.get(attempt_id)

    def room(self, chain: Chain) -> int:
        """Return the longest response that the chain may have, environment tokens included, by all limits."""
        return min(self._settings.max_response_len, self._engines.max_context - len(chain.prompt))

    def budget(self, call: GenerateCall) -> int:
        """Return how many tokens the call may still generate, by its own limit and those of chain and sample."""
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
        keeps = s.on_weight_update is OnWeightUpdate.KEEP and evaluation is None
        request = Request(
            attempt_id=f"{s.run_id:016x}{incarnation:04x}{number:012x}",
            token_ids=np.concatenate((chain.prompt, chain.tape.tokens)) if held else chain.prompt,
            sampling=replace(sampling, stop=()) if sampling.stop else sampling,  # april itself finds stop strings
            priority=0 if sample.urgent else 1,
            sample_key=sample.key,
            response_offset=held - call.start,
            stream=keeps or bool(sampling.stop),  # with keep, a weight update ends requests without a token
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
        """Return True if the call's tokens end in EOS or a stop token, as a partial from a saved state may."""
        tape = call.chain.tape
        if len(tape) - call.start <= call.sampling.min_tokens:
            return False
        return int(tape.tokens[-1]) in self._end_ids(call)

    def _end_ids(self, call: GenerateCall) -> frozenset[int]:
        eos, stops = self._engines.eos_token_ids, call.sampling.stop_token_ids
        return eos.union(stops) if stops else eos


class Places:
    """Counts the places (slots for requests in flight) over all engines, and how many are free.

    Each attempt takes a place until it has ended. A started rollout function has a place reserved until its first call
    or its end, so that no more functions are started than can generate. Reservations limit the start of functions, not
    calls, so a function may wait for a tool or a client for any time. Evaluations ignore the reservations of training.

    Evaluations have places of their own beyond the ``total`` of training, and may use those that training leaves free.

    Args:
        total: number of places of training.
        share: number of places that only evaluations take, as a share of ``total``. Also the share of the requests in
            flight up to which evaluations go before training when the engines are full.
        attempts: the requests in flight.
    """

    def __init__(self, total: int, share: float, attempts: AttemptBook) -> None:
        self._attempts, self._share = attempts, share
        self.reserved: set[SampleId] = set()
        """Ids of samples whose function was started and has not made a call yet."""
        self.reserved_by_evaluations = 0
        """Number of evaluations' samples in ``reserved``."""
        self.change(total)

    @property
    def free(self) -> int:
        """Number of requests of training that may be sent; below 0 while too many are in flight."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """Number of training's places that are taken, by its requests or by those of evaluations beyond their own."""
        attempts = self._attempts
        beyond = len(attempts.of_evaluations) - self.own
        return len(attempts.in_flight) + beyond if beyond > 0 else len(attempts.in_flight)

    @property
    def free_for_evaluations(self) -> int:
        """Number of requests of evaluations that may be sent."""
        attempts = self._attempts
        return max(self.total - len(attempts.in_flight), self.own) - len(attempts.of_evaluations)

    @property
    def evaluations_have_their_share(self) -> bool:
        """True if the next request would give evaluations more than their share of the requests in flight."""
        return len(self._attempts.of_evaluations) >= self._share * (len(self._attempts) + 1)

    @property
    def share_of_evaluations(self) -> int:
        """Number of the requests in flight that may belong to evaluations when the engines are full."""
        return math.ceil(self._share * len(self._attempts))

    def startable(self, *, evaluation: bool = False) -> int:
        """Return how many rollout functions of training, or of an evaluation, may be started."""
        if evaluation:
            return self.free_for_evaluations - self.reserved_by_evaluations
        training = len(self._attempts.in_flight) + len(self.reserved) - self.reserved_by_evaluations
        evaluations = len(self._attempts.of_evaluations) + self.reserved_by_evaluations
        return self.total - training - max(evaluations - self.own, 0)

    def reserve(self, sample: Sample) -> None:
        """Reserve a place for a sample whose rollout function is being started."""
        self.reserved.add(sample.id)
        self.reserved_by_evaluations += sample.evaluation is not None

    def change(self, total: int) -> None:
        """Set the number of training's places."""
        self.total = total
        self.own = math.ceil(round(self._share * total, 9))
        """Number of places that only evaluations take."""
        self.max_taken = max(total, self.taken)
        """Largest valid ``taken``: requests from before ``total`` was lowered are not cut."""

    def release(self, sample: Sample) -> None:
        """Release the sample's reservation, if it has one: its function made a call or ended."""
        if sample.id in self.reserved:
            self.reserved.remove(sample.id)
            self.reserved_by_evaluations -= sample.evaluation is not None
