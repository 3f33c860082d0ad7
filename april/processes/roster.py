"""All hosts of a core: where each command goes, which host is home to which group, and what the end of one means.

No asyncio and no clock: times are given. A host is known by its name; a connection by its desk.

Invariant: a command for an engine whose host is gone is answered here, at once, as an engine that does not answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.state import RolloutCore
from april.core.types import SETTLED, EngineFinish, Group, SampleId
from april.errors import EngineUnreachable
from april.processes.desk import HostDesk
from april.processes.messages import why_not_plain

log = logging.getLogger("april")

HERE = ""
"""Name of the host in the core's own process."""

Executor = Callable[[Any], None]


class Roster:
    """See above.

    Args:
        local: what carries out commands in the core's own process.
        functions_run: whether there are rollout functions to run; the default one is answered here, without a message.
        post: takes the events of answers that are known at once.
        failed: told what a call of an engine has raised, by the call's number, before its event is posted.
        collected: told of each desk that has something to send.
    """

    def __init__(
        self,
        core: RolloutCore,
        local: Mapping[type[do.Command], Executor],
        *,
        functions_run: bool,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
        collected: Callable[[HostDesk], None],
    ) -> None:
        self._core = core
        self._local = local
        self._post = post
        self._failed = failed
        self._collected = collected
        self._desks: dict[str, HostDesk] = {}
        """By host, those that are here."""
        self._heard: dict[str, float] = {}
        """By host: when it said something last."""
        self._owners: dict[str, HostDesk | None] = {}
        """By engine, of all that other hosts have brought; None: its host is gone."""
        self._homes: dict[int, str] = {}
        """By group: the host that runs its functions."""
        self._groups: dict[int, Group] = {}
        """Those that other hosts have heard of."""
        self._at_home: Counter[str] = Counter()
        self._warned = False
        by_sample = self._for_sample if functions_run else self._here
        self.executors: dict[type[do.Command], Executor] = {
            do.StartSample: by_sample,
            do.CallCompleted: self._for_call if functions_run else self._here,
            do.CancelSample: self._cancel,
            do.ScoreSample: self._for_sample,
            do.ScoreGroup: self._for_group,
            do.JudgeGroup: self._for_group,
            do.Submit: self._submit,
            do.Abort: self._for_engine,
            do.Fence: self._for_engine,
            do.ProbeEngine: self._for_engine,
            do.PauseEngine: self._for_engine,
            do.LoadEngine: self._for_engine,
            do.ResumeEngine: self._for_engine,
        }

    @property
    def desks(self) -> list[HostDesk]:
        """Of the hosts that are here."""
        return list(self._desks.values())

    # ---------------------------------------------------------------- hosts that come and go

    def why_not(self, engines: Iterable[str]) -> str | None:
        """Why a host cannot bring engines of these (global) names, or None."""
        for name in engines:
            if name in self._core.engines.states and name not in self._owners:
                return f"there is an engine {name} already"
        return None

    def join(self, desk: HostDesk, now: float, *, known: bool = False) -> Iterator[ev.Event]:
        """A host is here; an older connection of its is over. ``known``: the core began with its engines."""
        if (before := self._desks.get(desk.name)) is not None:
            yield from self.lost(before, "it has joined anew")
        self._desks[desk.name], self._heard[desk.name] = desk, now
        self._owners.update(dict.fromkeys(desk.engines, desk))
        limits = desk.engines.values()
        if limits and (not known or any(engine.written for engine in limits)):
            yield ev.EnginesJoined(list(desk.engines.values()))

    def lost(self, desk: HostDesk, why: str, *, for_good: bool = False) -> Iterator[ev.Event]:
        """What follows from the end of a connection; its host may come back, unless it has left ``for_good``."""
        if self._desks.get(desk.name) is not desk:
            return
        del self._desks[desk.name], self._heard[desk.name]
        for engine in desk.engines:
            self._owners[engine] = None
        orphans = [group for group, home in self._homes.items() if home == desk.name]
        for group in orphans:
            del self._homes[group]
        del self._at_home[desk.name]
        if for_good and desk.idle:  # it leaves in peace: nobody waits for anything there, and nothing has failed
            if desk.engines:
                yield ev.EnginesLeft(list(desk.engines))
            if orphans:
                yield ev.FunctionsLost(orphans)
            return
        # that its engines are dead comes before what follows from it: nothing goes there, or begins, in vain
        for event in desk.lost(why):
            if orphans and not isinstance(event, ev.EngineFailed):
                yield ev.FunctionsLost(orphans, died=not for_good)
                orphans = []
            yield event
        if orphans:
            yield ev.FunctionsLost(orphans, died=not for_good)
        if for_good and desk.engines:
            yield ev.EnginesLeft(list(desk.engines))

    def heard(self, desk: HostDesk, now: float) -> None:
        """It has said something."""
        if self._desks.get(desk.name) is desk:
            self._heard[desk.name] = now

    def begin_anew(self, now: float) -> None:
        """This process itself did not run for a while: what hosts have said meanwhile is on its way."""
        self._heard = dict.fromkeys(self._heard, now)
        for desk in self._desks.values():
            desk.fenced = dict.fromkeys(desk.fenced)

    def overdue(self, now: float, deadline_s: float) -> dict[HostDesk, str]:
        """Hosts that are silent, or do not end what they were told to end, for ``deadline_s``; and which it is."""
        late = {}
        for name, at in self._heard.items():
            desk = self._desks[name]
            if now - at >= deadline_s:
                late[desk] = f"it has said nothing for {deadline_s:g} s"
            elif any(now - since >= deadline_s for since in desk.fenced.values() if since is not None):
                late[desk] = f"requests that it was to end at once still run after {deadline_s:g} s"
            for attempt_id, since in desk.fenced.items():
                desk.fenced[attempt_id] = now if since is None else since
        return late

    # ---------------------------------------------------------------- what is settled

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """These are in a batch: nobody needs what hosts have of them."""
        gone = [sample for sample in samples if sample.group in self._groups]
        self._forget(gone)
        for number in {sample.group for sample in gone}:
            if all(s.state in SETTLED for s in self._groups[number].samples):
                self._settled(number)

    def settled(self, group: Group) -> None:
        """Nothing is left to do for it."""
        if group.id in self._groups:
            self._forget([sample.id for sample in group.samples])
            self._settled(group.id)

    def evaluated(self, evaluation: int) -> None:
        """An evaluation is over."""
        for group in [g for n, g in self._groups.items() if n < 0]:
            if group.evaluation is not None and group.evaluation.request.evaluation == evaluation:
                self.settled(group)

    def _forget(self, samples: list[SampleId]) -> None:
        for desk in self._desks.values() if samples else ():
            desk.forget(samples)
            self._collected(desk)

    def _settled(self, number: int) -> None:
        del self._groups[number]
        if (home := self._homes.pop(number, None)) is not None:
            self._at_home[home] -= 1

    # ---------------------------------------------------------------- where commands go

    def _here(self, command: do.Command) -> None:
        self._local[type(command)](command)

    def _send(self, desk: HostDesk | None, command: do.Command) -> None:
        if desk is None:
            self._local[type(command)](command)
        else:
            desk.execute(command)
            self._collected(desk)

    def _home(self, group: Group) -> HostDesk | None:
        """The host that runs the functions of a group; None: the one here."""
        name = self._homes.get(group.id)
        if name is None:
            hosts = [HERE, *(d.name for d in self._desks.values() if d.functions)]
            if hosts[1:] and (why := why_not_plain(group.prompt.data)) is not None:
                self._warn_of_data(why)
                hosts = [HERE]
            name = self._homes[group.id] = min(hosts, key=lambda host: self._at_home[host])
            self._at_home[name] += 1
            self._groups[group.id] = group
        return self._desks[name] if name else None

    def _warn_of_data(self, why: str) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            log.warning(
                "prompts have data that cannot travel (%s): their functions run in the scheduler's process alone; give "
                "numbers, strings, bytes, lists and mappings", why,
            )  # fmt: skip

    def _for_sample(self, command: do.StartSample | do.ScoreSample) -> None:
        self._send(self._home(command.sample.group), command)

    def _for_call(self, command: do.CallCompleted) -> None:
        self._send(self._home(command.call.sample.group), command)

    def _for_group(self, command: do.ScoreGroup | do.JudgeGroup) -> None:
        self._send(self._home(command.group), command)

    def _cancel(self, command: do.CancelSample) -> None:
        group = command.sample.group
        self._send(self._home(group) if group.id in self._homes else None, command)

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        if attempt.engine not in self._owners:
            self._local[do.Submit](command)
        elif (desk := self._owners[attempt.engine]) is None:
            self._post(ev.AttemptFailed.of(attempt, _gone(attempt.engine)))
        else:
            self._groups[attempt.sample.group.id] = attempt.sample.group
            self._send(desk, command)

    def _for_engine(self, command: Any) -> None:
        name: str = command.engine
        if name not in self._owners:
            self._local[type(command)](command)
        elif (desk := self._owners[name]) is not None:
            self._send(desk, command)
        elif isinstance(command, do.ProbeEngine):
            self._post(ev.EngineProbed(engine=name, probe=command.probe, answered=False, detail=_gone(name)))
        elif isinstance(command, (do.PauseEngine, do.LoadEngine, do.ResumeEngine)):
            self._failed(command.call, EngineUnreachable(_gone(name)))
            self._post(ev.EngineCallEnded(name, command.call, ev.CallResult.UNREACHABLE, _gone(name)))
        elif isinstance(command, do.Fence):
            for attempt_id in command.attempt_ids:
                self._post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT, fenced=True))


def _gone(engine: str) -> str:
    return f"engine {engine}: host {engine.partition('/')[0]} is gone"
