"""Several ranks of one trainer, each with a scheduler of its own: they are told when they make the same rollouts.

That is no error of any single one, so it is found only where they meet: in the store through which the ranks of
``torch.distributed`` have found each other. Nothing is waited for, and torch is not imported.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading

from april.core.types import Prompt

log = logging.getLogger("april")

_said: set[str] = set()
"""What this process has put into the store: its own second scheduler is no other rank."""


def warn_of_equal_rollouts(seed: int, first: Prompt) -> threading.Thread | None:
    """Log a warning if another rank has drawn the same first prompt under the same seed; looked up beside the caller.

    None: this process is no rank of several, as far as ``torch.distributed`` knows.
    """
    torch_ranks = sys.modules.get("torch.distributed")
    if torch_ranks is None or not (torch_ranks.is_available() and torch_ranks.is_initialized()):
        return None
    if torch_ranks.get_world_size() < 2:
        return None
    digest = hashlib.sha256(f"{seed}/".encode() + first.token_ids.tobytes()).hexdigest()[:32]
    if digest in _said:
        return None
    _said.add(digest)

    def compare() -> None:
        try:
            store = torch_ranks.distributed_c10d._get_default_store()
            equal = store.add(f"april/first_rollouts/{digest}", 1)
        except Exception as error:  # a warning that cannot be looked up is none
            log.debug("the ranks' store could not be asked: %s", error)
            return
        if equal > 1:
            log.warning(
                "another rank of this trainer began with the same prompt and seed=%d: ranks with a scheduler each "
                "generate the same responses then. Give all ranks shares of the same batches (april.RankScheduler), or "
                "each its own share of the prompts (prompts[rank::world_size]) and a seed of its own",
                seed,
            )

    thread = threading.Thread(target=compare, name="april-ranks", daemon=True)
    thread.start()
    return thread
