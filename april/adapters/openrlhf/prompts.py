"""OpenRLHF's loader of prompts, as april draws from it and as OpenRLHF saves it.

Invariants: a prompt that the loader has given is in april's books or in ``ahead`` of the saved state, never in neither;
the state that OpenRLHF puts into its checkpoint holds both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from april.adapters.openrlhf.samples import row_of

KEY = "april"
"""In the state of the loader; OpenRLHF without april passes over it."""


class Prompts:
    """Iterates over the present episode's prompts, for april; draws come from april's thread.

    Args:
        encode: text to token ids.
    """

    resumes = True
    """OpenRLHF's loader goes on by its own state."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._rows: Iterator[Any] = iter(())
        self._recent: deque[list[Any]] = deque()
        """Drawn last; those that april's state does not hold yet are saved from here."""
        self._ahead: deque[list[Any]] = deque()
        self.drawn = 0
        """Prompts handed out, those before a restart included."""
        self.ended = False
        """The present episode has no more."""

    def begin(self, rows: Iterator[Any]) -> None:
        """The prompts of an episode, or of the rest of one after a restart."""
        self._rows, self.ended = rows, False

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._ahead:
                row = self._ahead.popleft()
            else:
                try:
                    row = list(row_of(next(self._rows)))
                except StopIteration:
                    self.ended = True
                    raise
            self._recent.append(row)
            self.drawn += 1
        return {"token_ids": self._encode(row[0]), "prompt": row[0], "label": row[1]}

    def save(self, position: int, loader_state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The loader's state, and what was drawn from it and is not among the ``position`` prompts that april holds."""
        with self._lock:
            while len(self._recent) > self.drawn - position:
                self._recent.popleft()
            return loader_state(), {"ahead": [*self._recent, *self._ahead], "ended": self.ended}

    def go_on(self, position: int, saved: Mapping[str, Any]) -> None:
        """As before a restart, where april had drawn ``position``."""
        self.drawn = position
        self._ahead.extend(list(row) for row in saved["ahead"])


class CarryingLoader:
    """The loader of prompts with april's state in its own; everything else is the loader's.

    Args:
        loader: OpenRLHF's.
        save: ``(loader_state) -> state`` with april's in it.
        load: takes april's part of a state; returns whether the saved episode's prompts had ended.
    """

    def __init__(
        self, loader: Any, save: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]], load: Callable[[Any], bool]
    ) -> None:
        self._loader, self._save, self._load = loader, save, load
        self._ended = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:  # the loader would begin the next episode here
            self._ended = False
            return iter(())
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, and april's under ``april``."""
        return self._save(self._loader.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The rest of the saved episode; april goes on from its part when it is first asked for a batch."""
        theirs = dict(state)
        ours = theirs.pop(KEY, None)
        self._loader.load_state_dict(theirs)
        self._ended = self._load(ours)
