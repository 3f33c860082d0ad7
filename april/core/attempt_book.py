"""Attempt book: every engine request in flight, and with which tokens, budget and seed it was sent.

Invariant: an attempt is in the book from its submission until it is accounted for, once; its id is of fixed
length (engines match ids by prefix) and never used again, not even after a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from april.core.attachments import rows_of
from april.core.engine_table import EngineTable
from april.core.sampling import attempt_seed
from april.core.settings import CoreSettings
from april.core.tape import AttemptTape
from april.core.types import Attempt, Chain, GenerateCall, Sample, SampleId
from april.core.versions import PolicyVersion

EVALUATION_MARK = 0xFFFF
"""Stands where attempt ids have the incarnation, so that no id of an evaluation is one of training."""


class AttemptBook:
    """Opens and closes attempts, and counts them per engine."""

    def __init__(self, settings: CoreSettings, engines: EngineTable) -> None:
        self._settings = settings
        self._engines = engines
        self._number = self._evaluation_number = 0
        self.in_flight: dict[str, Attempt] = {}
        """Attempts of training."""
        self.of_evaluations: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.of_evaluations)

    def __iter__(self) -> Iterator[Attempt]:
        return itertools.chain(self.of_evaluations.values(), self.in_flight.values())

    def get(self, attempt_id: str) -> Attempt | None:
        """The attempt; None for one that is accounted for."""
        return self.in_flight.get(attempt_id) or self.of_evaluations.get(attempt_id)

    def room(self, chain: Chain) -> int:
        """Longest response, tokens of the environment included: its own limit and the context's."""
        return min(self._settings.max_response_len, self._engines.max_context - len(chain.prompt))

    def budget(self, call: GenerateCall) -> int:
        """Tokens the call may still generate: its own limit, and what is left of the response and of the sample."""
        chain, most = call.chain, self._settings.max_sample_tokens
        held = len(chain.tape.tokens)
        left = min(self.room(chain) - held, call.sampling.max_tokens - (held - call.start))
        return left if most is None else min(left, most - call.sample.generated)

    def open(self, call: GenerateCall, engine: str, version: PolicyVersion) -> Attempt:
        """A new attempt that continues ``call`` where its sample stands; the engine has the weights of ``version``."""
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
        attempt = Attempt(
            id=f"{s.run_id:016x}{incarnation:04x}{number:012x}",
            call=call,
            engine=engine,
            token_ids=np.concatenate((chain.prompt, chain.tape.tokens)) if held else chain.prompt,
            sampling=sampling,
            tape=AttemptTape(needs_rows=bool(extras)),
            extras=extras,
            extras_from=rows_of(chain.extras) if extras else 0,
            end_ids=self._end_ids(call),
            oldest=version,
            urgent=sample.urgent,
            in_flight=s.on_weight_update,
        )
        attempts[attempt.id] = attempt
        self._engines.states[engine].add(1)
        sample.attempts += 1
        call.attempt = attempt
        return attempt

    def close(self, attempt_id: str) -> Attempt | None:
        """The attempt, no longer in flight; None for one that is already accounted for."""
        attempt = self.in_flight.pop(attempt_id, None)
        if attempt is None and (attempt := self.of_evaluations.pop(attempt_id, None)) is not None:
            assert attempt.sample.evaluation is not None
            attempt.sample.evaluation.in_flight -= 1
        if attempt is not None:
            self._engines.states[attempt.engine].add(-1)
            attempt.call.attempt = None
        return attempt

    def ends_in_stop(self, call: GenerateCall) -> bool:
        """A partial out of a saved state that ends in EOS is finished: its attempt had not ended yet."""
        tape = call.chain.tape
        if len(tape) - call.start <= call.sampling.min_tokens:
            return False
        return int(tape.tokens[-1]) in self._end_ids(call)

    def _end_ids(self, call: GenerateCall) -> frozenset[int]:
        eos, stops = self._engines.eos_token_ids, call.sampling.stop_token_ids
        return eos.union(stops) if stops else eos


class Places:
    """Places in flight: how many more requests may be sent, to whatever engine.

    Each attempt has one until it is accounted for. A rollout function that was started has one reserved until it asks
    for something or ends, so that no more functions are started than can generate. What is reserved keeps functions
    from starting, not calls: a function may wait for a tool or a client as long as it likes. Evaluations start without
    regard to those of training.
    """

    def __init__(self, total: int, attempts: AttemptBook) -> None:
        self.total = self.most = total
        """``most``: so many may be taken. What was sent before there were fewer places is not cut for that."""
        self._attempts = attempts
        self.reserved: set[SampleId] = set()
        """Samples whose function was started and has asked for nothing yet."""
        self._of_evaluations = 0
        """Those of evaluations among them."""

    @property
    def free(self) -> int:
        """The number of requests that may be sent; below 0 while too many are in flight."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        attempts = self._attempts
        return len(attempts.in_flight) + len(attempts.of_evaluations)

    def to_start(self, *, evaluation: bool = False) -> int:
        """Return how many functions may be started, of training or of an evaluation."""
        return self.free - (self._of_evaluations if evaluation else len(self.reserved))

    def reserve(self, sample: Sample) -> None:
        """Its function is started."""
        self.reserved.add(sample.id)
        self._of_evaluations += sample.evaluation is not None

    def change(self, total: int) -> None:
        """So many there are from now on."""
        self.total, self.most = total, max(total, self.taken)

    def give_back(self, sample: Sample) -> None:
        """Give the place back, if there is one: the function has asked for something, or is over."""
        if sample.id in self.reserved:
            self.reserved.remove(sample.id)
            self._of_evaluations -= sample.evaluation is not None
