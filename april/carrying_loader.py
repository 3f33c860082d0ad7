"""A trainer's loader of prompts with april's state in its own, so that one checkpoint holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

KEY = "april"
"""Where april's part stands in the loader's state; a trainer without april passes over it."""


class CarryingLoader:
    """Everything but the state is the loader's.

    Args:
        loader: the trainer's.
        save: ``(loader_state) -> state`` with april's part in it.
        load: takes april's part of a state (None: there is none); true if the saved epoch's prompts had ended.
    """

    def __init__(
        self, loader: Any, save: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]], load: Callable[[Any], Any]
    ) -> None:
        self._loader, self._save, self._load = loader, save, load
        self._ended = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ended:  # the loader would begin the next epoch here
            self._ended = False
            return iter(())
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, and april's under ``april``."""
        return self._save(self._loader.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The rest of the saved epoch; april goes on from its part when it is first asked for a batch."""
        theirs = dict(state)
        ours = theirs.pop(KEY, None)
        self._loader.load_state_dict(theirs)
        self._ended = bool(self._load(ours))
