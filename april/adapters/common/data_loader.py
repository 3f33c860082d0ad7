"""Wraps a trainer's data loader so that the trainer's checkpoint, which has the loader's state, includes april's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

KEY = "april"
"""Key of april's part in the loader's state; a trainer without april ignores it."""


class CheckpointedLoader:
    """A trainer's data loader whose saved state includes april's; all other calls are passed on to the loader.

    Args:
        save: Function ``(loader_state) -> state`` that calls ``loader_state()`` and adds april's state to the result.
        load: Function that restores april's part of a saved state (None if the state has no such part). Returns a true
            value if the saved epoch had no prompts left.
    """

    def __init__(
        self, loader: Any, save: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]], load: Callable[[Any], Any]
    ) -> None:
        self._loader, self._save, self._load = loader, save, load
        self._ended = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:  # the saved epoch has no rows left, but the loader would begin the next epoch here
            self._ended = False
            return iter(())
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, with april's under the key ``april``."""
        return self._save(self._loader.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loader's position in the saved epoch, and pass april's part of the state to ``load``."""
        theirs = dict(state)
        ours = theirs.pop(KEY, None)
        self._loader.load_state_dict(theirs)
        self._ended = bool(self._load(ours))


class RowQueue:
    """A thread-safe queue of rows from a trainer's data loader, from which april draws prompts.

    Rows that were read from the loader but are not in april's own state are saved too, so that none is lost.
    ``read_rows`` returns the loader's next rows, and raises an error if there are none.
    """

    def __init__(self, read_rows: Callable[[], Iterable[Any]]) -> None:
        self._read_rows = read_rows
        self._lock = threading.Lock()
        self._recent: deque[Any] = deque()
        """Latest drawn rows; a state that april saves now may not contain them yet."""
        self.ahead: deque[Any] = deque()
        """Rows that were read from the loader and that april has not drawn yet."""
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
        """Return the loader's state, and the rows that april's state lacks: all after the first ``position`` rows."""
        with self._lock:
            while len(self._recent) > self.drawn - position:
                self._recent.popleft()
            return loader_state(), [*self._recent, *self.ahead]

    def restore(self, position: int, ahead: Sequence[Any]) -> None:
        """Restore a saved queue, from which ``position`` rows were drawn; the saved rows ``ahead`` come next."""
        self.drawn = position
        self.ahead.extend(ahead)
