"""The scheduler of a run's actors as a trainer's rank has it: the face of RolloutScheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from april.config.settings import Config
from april.engines.protocol import Engine
from april.errors import AprilError, ConfigError
from april.processes.actor_calls import link_of
from april.processes.member import Member
from april.processes.open_call import OpenCall
from april.processes.packed_call import Asked, pack_call, pack_failure
from april.processes.rank_scheduler import RankScheduler
from april.processes.ranks import MeetingPoint, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What the core's actor gives a rank that attaches."""

    link: int
    first_call: int
    config: Config
    ranks: Ranks


class ActorMember(Member):
    """A rank's seat before the core's actor."""

    center = "the core"

    def __init__(self, ranks: Ranks, core: Any, number: int) -> None:
        super().__init__(ranks)
        self._core = core
        self._number = number

    def open(self, point: MeetingPoint | None = None) -> None:
        """The link is there already; see :func:`attached`."""

        async def join() -> None:
            self.join(link_of(self._core, self._number))

        self._thread.run(join)


class ActorScheduler(RankScheduler):
    """The face of :class:`april.RolloutScheduler` for one rank of a run, from :func:`april.ray.attach`.

    A call that changes something is made by every rank, in the same order and with the same arguments; a call that only
    looks is answered to whoever asks. Prompts for ``evaluate`` and ``extend`` and the state for ``load_state_dict``
    are those that rank 0 gives.
    """

    def __init__(self, core: Any, rank: int, seat: Seat, tokenizer: Any = None) -> None:
        self._rank = rank
        self._member = member = ActorMember(seat.ranks, core, seat.link)
        self._sit_down(seat.config, seat.ranks, member, tokenizer, seat.first_call)
        member.open()

    @property
    def engines(self) -> list[Engine]:
        """None: they are in other processes."""
        return []

    @property
    def _rollouts(self) -> Any:
        return Asked()

    def _weight_update(self, path: Any, transfer: Any, trained: int | None) -> Any:
        if path is None and transfer is None:
            raise ConfigError(
                "weight_update: the engines of a run are in other processes and cannot read the trainer's model in "
                "place; give path=, or transfer="
            )
        return super()._weight_update(path, transfer, trained)

    def _as_another_rank(self, seat: Member, made: Any, call: OpenCall) -> Any:
        wrong: Exception | None = None
        if self._rank == 0:
            try:
                self._member.arguments = pack_call(*made.run(_not_here))
            except Exception as error:
                wrong = error
                self._member.arguments = pack_failure(error)
        try:
            return super()._as_another_rank(seat, made, call)
        except AprilError as told:
            raise told if wrong is None else wrong from None

    def __repr__(self) -> str:
        return f"<ActorScheduler rank {self._rank} of {self.ranks.world_size}>"


def _not_here(step: str, function: Any, content: bytes = b"") -> None:
    """Steps of a call are carried out when the core says so."""
