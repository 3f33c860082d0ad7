"""One rank as a process, for tests: ``one_of_several.py RANK WORLD ADDRESS TOKEN DEADLINE_S``.

Each batch is a line on stdout; a line on stdin lets it go on to the next one.
"""

from __future__ import annotations

import json
import sys

from rank_threads import CONFIG, engine, reward

import april


def main() -> None:
    """A loop of one's own, without a model."""
    rank, world_size, address, token, deadline_s = sys.argv[1:]
    ranks = april.Ranks(
        rank=int(rank), world_size=int(world_size), address=address, token=token, rank_deadline_s=float(deadline_s)
    )
    options = {"prompts": [[1 + i, 2] for i in range(8)], "engines": [engine()]} if ranks.rank == 0 else {}
    try:
        with april.RankScheduler(CONFIG, ranks=ranks, reward=reward, **options) as rollouts:
            while True:
                batch = rollouts.next_batch()
                print(json.dumps([[*s.id] for s in batch.samples]), flush=True)
                sys.stdin.readline()
                rollouts.weight_update(transfer=lambda: None, trained=batch.id)
    except (april.RankError, april.DataExhausted) as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
