"""A worker's end of a torch group, made as SGLang makes it: ``torch_group_peer.py PORT GROUP [TENSORS]``.

It prints "joined", the sum of each tensor of shape [3] that it has received, or the type of what was raised.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(seconds=60)


def main(port: str, group: str, count: str = "0") -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    helper: Any = c10d._new_process_group_helper
    meets = dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=LIMIT)
    try:
        store, rank, size = next(meets)
        made, _ = helper(
            size, rank, [], c10d.Backend("gloo"), dist.PrefixStore(group, store), group_name=group, timeout=LIMIT
        )
        c10d._world.pg_group_ranks[made] = {0: 0, 1: 1}
        print("joined", flush=True)
        for _ in range(int(count)):
            tensor = torch.empty(3)
            dist.broadcast(tensor, src=0, group=made)
            print(float(tensor.sum()), flush=True)
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
    finally:
        # torch's own threads would else still run where the interpreter ends, which now and then aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
