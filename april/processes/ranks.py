"""Says which rank of a trainer this process is, and lets the ranks find rank 0's server."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from april.config.engines import checked_key
from april.config.values import LONGEST_S
from april.core.whole_numbers import whole_number
from april.errors import ConfigError, RankError
from april.processes.addresses import new_token, split_address

LOOPBACK = "127.0.0.1:0"
_rendezvous_numbers = itertools.count()
"""Numbers the Rendezvous objects of this process, so that each has a key of its own in torch's store."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process among those of one trainer. Without arguments, it is the only rank.

    Under ``torch.distributed`` use :meth:`of_torch`. Otherwise every process gives the same ``world_size``, ``address``
    and ``token``.

    Raises:
        ConfigError: numbers out of range, or several ranks without an address or a token.
    """

    rank: int = 0
    """number of this rank; rank 0 has the scheduler, the prompts, the reward and the engines"""
    world_size: int = 1
    data_rank: int | None = None
    """number of this rank's share of each batch, the same for a whole tensor-parallel group; None means ``rank``"""
    data_size: int | None = None
    """number of shares into which a batch is split; None means ``world_size``"""
    address: str = ""
    """address at which rank 0 listens, as "host:port" """
    token: str = ""
    """secret of 64 hexadecimal digits, the same on all ranks; :func:`april.new_token` makes one"""
    rank_timeout_s: float = 1800.0
    """seconds that a rank which has made a call waits for the other ranks to make the same call"""
    rank_deadline_s: float = 60.0
    """seconds without a heartbeat after which a rank counts as dead; the exit of its process is noticed at once"""
    store: Any = None
    """store of torch.distributed in which rank 0 publishes its address; None if ``address`` and ``token`` are given"""

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "data_rank", "data_size"):
            given = getattr(self, name)
            number = whole_number(given)
            if number is None and (given is not None or name in ("rank", "world_size")):
                raise ConfigError(f"ranks: {name} must be a whole number, got {given!r}")
            object.__setattr__(self, name, number)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"ranks: rank {self.rank} is not one of {self.world_size} ranks, which are numbered from 0"
            )
        if not 0 <= self.share < self.shares <= self.world_size:
            raise ConfigError(
                f"ranks: data_rank {self.share} of data_size {self.shares} is not among {self.world_size} ranks"
            )
        if not all(isinstance(s, (int, float)) and s > 0 for s in (self.rank_timeout_s, self.rank_deadline_s)):
            raise ConfigError("ranks: rank_timeout_s and rank_deadline_s must be above 0")
        if self.world_size > 1 and self.store is None and not (self.address and self.token):
            raise ConfigError(
                "ranks: several ranks need the address at which rank 0 listens and a common token; Ranks.of_torch() "
                "finds both under torch.distributed"
            )
        if self.token:
            checked_key(self.token)
        if self.rank and self.store is None and not split_address(self.address)[1]:
            raise ConfigError(f"ranks: rank 0 cannot be reached at {self.address}; give the port at which it listens")

    def __repr__(self) -> str:
        return f"<Ranks rank={self.rank} of {self.world_size}, share {self.share} of {self.shares}>"

    @property
    def share(self) -> int:
        """Number of the share of a batch that this rank gets."""
        return self.rank if self.data_rank is None else self.data_rank

    @property
    def shares(self) -> int:
        """Number of shares into which batches are split."""
        return self.world_size if self.data_size is None else self.data_size

    @classmethod
    def of_torch(
        cls, *, data_rank: int | None = None, data_size: int | None = None, address: str = LOOPBACK,
        rank_timeout_s: float = 1800.0, rank_deadline_s: float = 60.0,
    ) -> Ranks:  # fmt: skip
        """Return the rank in ``torch.distributed``'s default group, of any backend; only the group's store is used.

        Every rank calls this after ``init_process_group``. A process that torchrun did not start is the only rank.

        Args:
            data_rank: number of this rank's batch share, if several ranks get the same one (tensor, pipeline or context
                parallelism); None means the rank.
            data_size: number of shares; None means the number of ranks.
            address: address at which rank 0 listens, reachable from all ranks; port 0 means any free one.
            rank_timeout_s: see the class.
            rank_deadline_s: see the class.

        Raises:
            ConfigError: torchrun has started several processes, and ``init_process_group`` was not called; or they are
                on several machines and no address was given.
        """
        torch_ranks: Any = sys.modules.get("torch.distributed")
        if torch_ranks is None or not (torch_ranks.is_available() and torch_ranks.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError("Ranks.of_torch: call torch.distributed.init_process_group() first, on every rank")
            return cls(rank_timeout_s=rank_timeout_s, rank_deadline_s=rank_deadline_s)
        world_size = torch_ranks.get_world_size()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if here < world_size and address == LOOPBACK:
            raise ConfigError(
                'Ranks.of_torch: the ranks are on several machines; give address="<address of rank 0\'s machine>:0"'
            )
        return cls(
            rank=torch_ranks.get_rank(), world_size=world_size, data_rank=data_rank, data_size=data_size,
            address=address, token="", rank_timeout_s=rank_timeout_s, rank_deadline_s=rank_deadline_s,
            store=torch_ranks.distributed_c10d._get_default_store(),
        )  # fmt: skip

    def rendezvous(self) -> Rendezvous:
        """Return a new Rendezvous; every rank must call this once for each scheduler, so that their keys match."""
        return Rendezvous(self)


class Rendezvous:
    """Address and token of rank 0's server, which are given by the user or exchanged through torch's store."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._key = f"april/ranks/{next(_rendezvous_numbers)}"
        self.token = ranks.token or (new_token() if ranks.rank == 0 else "")
        """The token; empty on a rank other than 0 that gets the token from torch's store."""
        self.server_listens = ranks.store is not None
        """True if ranks learn the server's address only once it listens, so that a failed connection is not retried."""

    def publish(self, address: str) -> None:
        """Publish the address at which rank 0 listens; "" means that it could not listen."""
        if self._ranks.store is not None:
            self._ranks.store.set(self._key, f"{address} {self.token}")

    def find(self) -> tuple[str, str]:
        """Return address and token, once rank 0 has published them; raises RankError if it does not in time."""
        store = self._ranks.store
        if store is None:
            return self._ranks.address, self._ranks.token
        timeout_s = self._ranks.rank_timeout_s
        try:
            store.wait([self._key], timedelta(seconds=min(timeout_s, LONGEST_S)))
            address, _, token = bytes(store.get(self._key)).decode("ascii").partition(" ")
        except Exception as error:  # whatever torch raises
            raise RankError(
                f"rank 0 did not publish its address within {timeout_s:g} s (rank_timeout_s), or torch's store is "
                f"gone: {type(error).__name__}",
                (0,),
            ) from None
        if not address:
            raise RankError("rank 0 could not listen for the other ranks; its own error says why", (0,))
        return address, token
