"""How a process ends that was a rank of torch.distributed."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_rank() -> NoReturn:
    """End this process, which has done all it had to, without the interpreter's own end.

    The caches of FSDP2 keep a process group beyond ``destroy_process_group``, and with it gloo's threads. One that
    gives back the tensor of the last collective while the interpreter ends aborts the process (pytorch, #179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
