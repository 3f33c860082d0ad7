"""The part of :class:`core_player.CorePlayer` that plays reward functions and the filter."""

from __future__ import annotations

from april.core import events as ev
from april.core.types import SampleId


class RewardsPlayer:
    """``send``, ``world`` and the rest are those of the whole player."""

    def ask_score(self, group_id: int, indices: list[int]) -> None:
        """A reward is wanted."""
        lives = self.world.held[group_id].lives
        assert all(lives[i].where in ("scoring", "finished") for i in indices)
        assert all((group_id, i) in self.functions for i in indices), "what was returned is gone"
        self.to_score.append((group_id, [(i, lives[i].run) for i in indices]))

    def is_current(self, request: tuple[int, list[tuple[int, int]]]) -> bool:
        """The layer above passes nothing on that belongs to a function that was cancelled."""
        held = self.world.held.get(request[0])
        return held is not None and all(held.lives[i].run == run for i, run in request[1])

    def give_score(self, request: tuple[int, list[tuple[int, int]]], how: str) -> None:
        """The reward function returns, raises, or gives a number that is none."""
        group_id, wanted = request
        rewards = [(i, self.handed + i / 8) for i, _ in wanted]
        if not self.is_current(request):
            if group_id not in self.world.held:
                assert self.send(ev.Scored(group_id, rewards)) == []
            return
        lives = self.world.held[group_id].lives
        if how == "good":
            self.scored.append(request)
            for i, reward in rewards:
                lives[i].where, lives[i].reward = "finished", reward
            self.complete(group_id)
            self.send(ev.Scored(group_id, rewards))
            return
        bad = wanted[self.handed % len(wanted) if how == "nan" else 0][0]
        blamed = lives[bad] if lives[bad].where == "scoring" else next(x for x in lives if x.where == "scoring")
        blamed.failures += 1
        if blamed.failures >= self.settings.max_attempt_failures:
            self.world.drop_group(group_id, "failed")
        if how == "nan":
            self.send(ev.Scored(group_id, [(i, float("nan") if i == bad else reward) for i, reward in rewards]))
        else:
            self.send(ev.SampleFailed(SampleId(group_id, bad), "raised"))

    def judge(self, request: tuple[int, int], how: str) -> None:
        """The filter gives its verdict, which may be an old one."""
        group_id, judgement, held = *request, self.world.held.get(request[0])
        error = "raised" if how == "error" else None
        event = ev.GroupJudged(group=group_id, judgement=judgement, keep=how == "keep", error=error)
        if held is None or held.judgement != judgement:
            assert self.send(event) == []
            return
        held.judgement = None
        if how == "keep":
            held.accepted = True
        elif how == "reject":
            self.world.drop_group(group_id, "filtered")
        else:
            held.filter_failures += 1
            if held.filter_failures >= self.settings.max_attempt_failures:
                self.world.drop_group(group_id, "failed")
        self.send(event)
