"""AReaL's loader of prompts, with april's state in its own: AReaL saves and loads both at the same moments.

Invariant: a prompt that the loader has given is held by april, trained, or among the prompts drawn ahead; a state that
AReaL saves names april's file of that very moment, so that the two cannot be of different checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from april.errors import RolloutError

log = logging.getLogger("april")

KEY = "april"
"""In the loader's state; AReaL without april passes over it."""


class CarryingLoader:
    """The loader that AReaL's trainer has; everything but its state is the loader's.

    Args:
        loader: AReaL's.
        save: writes april's state, and says where (None: this rank has none).
        load: is told so after a restart.
    """

    def __init__(self, loader: Any, save: Callable[[], str | None], load: Callable[[str], None]) -> None:
        self._loader, self._save, self._load = loader, save, load

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, and where april's is."""
        return {**self._loader.state_dict(), KEY: self._save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The rest of the saved epoch; april goes on when it is first asked for a batch."""
        theirs = dict(state)
        if KEY not in theirs:
            log.warning(
                "AReaL's recover checkpoint was saved without april: what was unfinished then is lost, and its prompts "
                "are not asked again in this epoch"
            )
        ours = theirs.pop(KEY, None)
        self._loader.load_state_dict(theirs)
        if ours is not None:
            self._load(ours)


class Prompts:
    """The loader's batches, epoch after epoch.

    Args:
        loader: its order is another one in each epoch, as AReaL has it, also after a restart.
        epoch: that begins, or is gone on with.
    """

    def __init__(self, loader: Any, epoch: int = 0) -> None:
        self._loader = loader
        self.epoch = epoch
        self._batches = self._all()

    def next(self) -> list[Any]:
        """Rows of the next batch, all of which are the caller's now."""
        return list(next(self._batches))

    def _all(self) -> Iterator[Any]:
        empty = 0
        while True:
            set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            for batch in self._loader:
                empty = 0
                yield batch
            empty += 1
            if empty > 1:  # the first may be the end of an epoch that a restart goes on with
                raise RolloutError("the loader of prompts gives no batch; is the data set smaller than a batch?")
            self.epoch += 1
