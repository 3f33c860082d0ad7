"""Wraps a trainer's data loader so that its state includes april's, and one checkpoint holds both."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

KEY = "april"
"""Key of april's part in the loader's state; a trainer without april ignores it."""


class CheckpointedLoader:
    """A trainer's data loader whose saved state includes april's; everything else is passed on to the loader.

    Args:
        loader: Data loader of the trainer.
        save: Function that calls the given function for the loader's state, and returns it with april's part added.
        load: Function that loads april's part of a state (None if there is none); returns a true value if the saved
            epoch's prompts had ended.
    """

    def __init__(
        self, loader: Any, save: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]], load: Callable[[Any], Any]
    ) -> None:
        self._loader, self._save, self._load = loader, save, load
        self._ended = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:  # the saved epoch is over; the loader would start the next one here
            self._ended = False
            return iter(())
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, with april's under the key ``april``."""
        return self._save(self._loader.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loader's state, for the rest of the saved epoch, and pass april's part to ``load``."""
        theirs = dict(state)
        ours = theirs.pop(KEY, None)
        self._loader.load_state_dict(theirs)
        self._ended = bool(self._load(ours))


class RowQueue:
    """A thread-safe queue of rows from a trainer's data loader, which april draws.

    A saved state contains each row that the loader has given and april's own state does not hold.

    Args:
        read_rows: Function that returns further rows of the loader, in order; an error that it raises ends them.
    """

    def __init__(self, read_rows: Callable[[], Iterable[Any]]) -> None:
        self._read_rows = read_rows
        self._lock = threading.Lock()
        self._recent: deque[Any] = deque()
        """Rows drawn last; a state that does not hold them yet is saved with them."""
        self.ahead: deque[Any] = deque()
        """Rows that the loader has given and april has not drawn."""
        self.drawn = 0
        """Number of rows drawn, including those before a restart."""

    def draw(self) -> Any:
        """Return the next row."""
        with self._lock:
            if not self.ahead:
                self.ahead.extend(self._read_rows())
            row = self.ahead.popleft()
            self._recent.append(row)
            self.drawn += 1
        return row

    def save(self, position: int, loader_state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
        """Return the loader's state and the rows it gave after the first ``position``, which april's state covers."""
        with self._lock:
            while len(self._recent) > self.drawn - position:
                self._recent.popleft()
            return loader_state(), [*self._recent, *self.ahead]

    def restore(self, position: int, ahead: Sequence[Any]) -> None:
        """Continue after a restart, at ``position`` drawn rows, with the saved rows ``ahead`` first."""
        self.drawn = position
        self.ahead.extend(ahead)
