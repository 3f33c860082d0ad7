"""What the ranks of a trainer share: one scheduler, of which each gets its rows, and the prompts of an evaluation."""

from __future__ import annotations

from typing import Any

from april.config.settings import Config
from april.scheduler import RolloutScheduler


def scheduler_of(trainer: Any, config: Config, address: str | None, **arguments: Any) -> Any:
    """A RolloutScheduler, or what has its face on each of several ranks; called on every rank.

    ``address``: where rank 0 listens; None: on its own machine only.
    """
    if trainer.accelerator.num_processes == 1:
        return RolloutScheduler(config, **arguments)
    # here, and not above: one process needs no sockets
    from april import Ranks, RankScheduler

    ranks = Ranks.of_torch() if address is None else Ranks.of_torch(address=address)
    return RankScheduler(config, ranks=ranks, **arguments)


def rows_of_all_ranks(trainer: Any, rows: list[list[int]]) -> list[list[int]]:
    """Token ids, of which each rank has as many rows, in the order of the ranks."""
    import torch

    accelerator = trainer.accelerator
    lengths = torch.tensor([len(row) for row in rows], device=accelerator.device)
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=accelerator.device)
    for place, ids in zip(padded, rows, strict=True):
        place[: len(ids)] = torch.tensor(ids)
    everywhere = accelerator.gather(accelerator.pad_across_processes(padded, dim=1)).tolist()
    counts = accelerator.gather(lengths).tolist()
    return [row[:count] for row, count in zip(everywhere, counts, strict=True)]
