"""Conversations in random lives: an environment's tokens, stop strings, functions that are lost, late events.

Requests, weights, restarts and everything else are those of :class:`trainer_lives.Life`.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from seeds import seeds
from trainer_books import Key, Token
from trainer_lives import Life, Saved
from trainer_player import Request

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.types import AttemptFailure, EngineFinish, GenerationMode, OnStale, SampleId, SampleState

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "48"))
PARTS = 4


class Talks(Life):
    """Functions with a conversation of their own, which is compared with the books at every answer."""

    def __init__(self, seed: int, mode: GenerationMode) -> None:
        super().__init__(seed, mode)
        self.turns = self.rng.randint(1, 3)
        self.strays = 0.1 if self.habits.function_troubles else 0.0
        self.deaths: Counter[Key] = Counter()
        """Of processes in which a function computed."""

    def new_process(self) -> None:
        """Nobody remembers what was said."""
        super().new_process()
        self.known: dict[Key, list[int]] = {}
        """Response tokens that each function knows of, its own and those of its environment."""
        self.strayed: set[Key] = set()
        self.relived: set[Key] = set()
        """Those whose function was lost once: it may be answered from the tape, or from nothing."""
        self.gone: list[str] = getattr(self, "gone", [])
        """Requests that are accounted for, those of older processes too."""
        self.untold_stops: list[str] = []
        """Requests whose stop string the core has not heard of."""
        self.scored: list[list[Key]] = []

    # ---------------------------------------------------------------- what functions ask

    def on_StartSample(self, command: do.StartSample) -> None:
        """It begins with the prompt."""
        key = tuple(command.sample.id)
        self.known[key] = []
        assert self.functions.get(key) != "lost", "begins again while its request runs"
        super().on_StartSample(command)

    def call(self, key: Key) -> None:
        """It appends to its conversation, or asks for something else: of a saved state that is a divergence."""
        if key[0] < 0:
            super().call(key)
            return
        tape, known = self.books.tapes[key], self.known[key]
        replays = len(tape) > len(known)
        first = self.processes == 1 and key not in self.relived
        may_stray = self.settings.on_stale is not OnStale.RESTART and (replays or first)
        prompt = [5, 10 + self.books.held[key[0]]]
        if may_stray and self.rng.random() < self.strays:
            self.seen["diverged" if replays else "rewrote its past"] += 1
            if replays:
                self.strayed.add(key)
            else:
                self.causes["failed", key[0]] += 1
            self.functions[key] = "waiting"
            self.post(ev.CallMade(SampleId(*key), SamplingParams(max_tokens=9), np.array([4], np.int32)))
            return
        turn = self.asked[key]
        self.asked[key] += 1
        salt = 7 * key[0] + 3 * key[1] + turn
        room = self.settings.max_response_len - len(known)
        added = [900_000 + salt + i for i in range(salt % 4 if turn else 0)]
        asked = None if salt % 3 == 0 else np.array([*prompt, *known, *added], np.int32)
        cut = [] if asked is None else added[:room]
        if not replays:
            tape += [Token(token, 0.0, None, "") for token in cut]
        self.seen["environment"] += len(cut)
        known += cut
        limit = self.settings.max_response_len if turn + 1 >= self.turns else 2 + key[1]
        self.functions[key] = "waiting"
        self.post(ev.CallMade(SampleId(*key), SamplingParams(max_tokens=limit), asked))

    def on_CallCompleted(self, command: do.CallCompleted) -> None:
        """What it is answered follows what it knows, and is what engines sent for it."""
        key, (start, end, _) = tuple(command.call.sample.id), command.call.result
        if key[0] >= 0:
            assert start == len(self.known[key])
            self.known[key] += [token.id for token in self.books.tapes[key][start:end]]
            assert command.call.sample.chains[0].tape.tokens[:end].tolist() == self.known[key]
        super().on_CallCompleted(command)

    def on_CancelSample(self, command: do.CancelSample) -> None:
        """One whose function did not ask what it had asked before begins again, under that name."""
        key = tuple(command.sample.id)
        if key in self.strayed and command.sample.state is not SampleState.DROPPED:
            self.runs[key] += 1
            self.functions.pop(key)
            self._begin_again(key, "replay_diverged")
        else:
            super().on_CancelSample(command)
        self.strayed.discard(key)

    # ---------------------------------------------------------------- functions that are lost

    def lose(self) -> None:
        """A rollout function dies with its process: it begins again, and nothing else hears of it."""
        runs = {key: state for key, state in self.functions.items() if state in ("started", "waiting", "between")}
        if not runs:
            return
        key = self.rng.choice(sorted(runs))
        if runs[key] != "waiting":
            if self.deaths[key] + 1 >= self.settings.max_attempt_failures:
                return  # it would be to blame
            self.deaths[key] += 1
        self.functions.pop(key)
        self.runs[key] += 1
        self.evaluated.pop(key, None)
        self.relived.add(key)
        for request in self.running.values():
            if request.key == key and request.lost is None:
                request.stalled = True  # it is asked to end
                if key[0] < 0:
                    request.lost = "failed"
                else:
                    self.functions[key] = "lost"
        self.seen[f"lost: evaluation={key[0] < 0}"] += 1
        self.post(ev.FunctionLost(SampleId(*key)))

    # ---------------------------------------------------------------- stop strings

    def send(self, attempt_id: str, count: int, ends: float) -> Request:
        """What comes after a stop string is counted, and dropped by name."""
        request = self.running[attempt_id]
        tape = request.attempt.tape
        if not tape.stopped:
            return super().send(attempt_id, count, ends)
        count = min(count, request.attempt.request.sampling.max_tokens - tape.parsed)
        tape.after_stop += count
        self.books.sent += count
        return request

    def stop(self) -> None:
        """A response has a stop string: the core hears of it, unless the request ends in the same moment."""
        going_on = [i for i, r in self.running.items() if r.key[0] >= 0 and not r.attempt.tape.stopped]
        if not going_on:
            return
        attempt_id = self.rng.choice(going_on)
        request = self.send(attempt_id, 2, 0.0)
        if not request.tokens or request.ends:
            return
        request.attempt.tape.stopped = True
        self.send(attempt_id, self.rng.choice([0, 2, 1000]), 0.0)
        breaks = ["breaks off"] if self.habits.engine_troubles else []
        how = self.rng.choice(["now", "saved", "later", "ends", *breaks])
        self.seen[f"stop string: {how}"] += 1
        if how == "saved":
            self.checkpoint()
        if how in ("now", "saved"):
            self.tell_stop(attempt_id)
        elif how == "later":
            self.untold_stops.append(attempt_id)
        elif how == "ends":
            self.end(attempt_id, self.rng.choice(list(EngineFinish)))
        else:
            self.break_off(attempt_id, AttemptFailure.BROKE_OFF)

    def tell_stop(self, attempt_id: str) -> None:
        """The core hears of a stop string, perhaps when its request has ended."""
        runs = attempt_id in self.running
        self.post(ev.StopFound(attempt_id))
        assert not runs or attempt_id in self.to_end

    def _over(self, attempt_id: str, *, corrupt: bool = False) -> Request:
        request = super()._over(attempt_id, corrupt=corrupt)
        self.books.lose(request.attempt.tape.after_stop, "after_stop")
        self.gone.append(attempt_id)
        if self.functions.get(request.key) == "lost" and request.lost is None:
            del self.functions[request.key]
        return request

    def save(self, trained_through: int | None) -> Saved:
        """Requests that run when a checkpoint is taken are never heard of again."""
        saved = super().save(trained_through)
        saved.books.lose(sum(r.attempt.tape.after_stop for r in self.running.values()), "after_stop")
        self.gone += self.running
        return saved

    # ---------------------------------------------------------------- what changes nothing

    def score(self, request: list[tuple[Key, int]], how: str) -> None:
        """Rewards that were given may be given again."""
        super().score(request, how)
        self.scored.append([key for key, _ in request])

    def late(self) -> None:
        """The end of a request that is accounted for, or of an older process, and rewards that come twice."""
        if gone := [i for i in self.gone if i not in self.running]:
            attempt_id = self.rng.choice(gone)
            for event in (
                ev.AttemptFailed(attempt_id=attempt_id, error="late"), ev.AttemptEnded(attempt_id, EngineFinish.STOP),
                ev.AttemptStalled(attempt_id), ev.StopFound(attempt_id),
            ):  # fmt: skip
                assert self.handle(event) == []
        for keys in self.scored:
            group = keys[0][0]
            if group >= 0 and (group not in self.books.held or all(
                (group, i) in self.books.finished for i in self.books.groups[group].members
            )):  # fmt: skip
                assert self.handle(ev.Scored(group, [(index, -77.0) for _, index in keys])) == []

    def one_event(self) -> None:
        """Something of this, or something else."""
        what = self.rng.random()
        if what < 0.05:
            self.stop()
        elif what < 0.08 and self.untold_stops:
            self.tell_stop(self.untold_stops.pop(self.rng.randrange(len(self.untold_stops))))
        elif what < 0.1:
            self.late()
        elif what < 0.13:
            self.lose()
        else:
            super().one_event()

    def next_of_what_is_due(self) -> None:
        """Those stop strings first."""
        if self.untold_stops:
            self.tell_stop(self.untold_stops.pop())
        else:
            super().next_of_what_is_due()


def live(number: int, mode: GenerationMode) -> Counter[str]:
    """One life to its good end; what has happened in it."""
    life = Talks(number, mode)
    life.happen(250)
    life.end_well()
    return life.seen


@pytest.mark.parametrize("part", seeds(PARTS))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_conversations_are_kept_to_the_token(mode: GenerationMode, part: int) -> None:
    """Cut, failed, stopped and replayed: every function is answered what was generated for it, and all is accounted."""
    for number in range(part, LIVES // 2, PARTS):
        live(number, mode)


@pytest.mark.no_cover
def test_lives_are_full_of_conversations() -> None:
    """What the test above leaves unsaid has happened."""
    seen: Counter[str] = Counter()
    for number in range(LIVES // 3):
        seen += live(LIVES + number, GenerationMode.STEPWISE)
    stops = [f"stop string: {how}" for how in ("now", "saved", "later", "ends", "breaks off")]
    lost = [f"lost: evaluation={evaluation}" for evaluation in (False, True)]
    replays = ["diverged", "rewrote its past", "restarted", "began again: replay_diverged"]
    for what in ("environment", *replays, *stops, *lost):
        assert seen[what], f"no life had: {what}"
