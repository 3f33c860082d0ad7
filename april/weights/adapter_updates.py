"""Prepares a PEFT model's weights for engines: saves the adapter to a directory, or merges it into a copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from april.config.engines import THIS_MACHINE, AddressedEngineConfig
from april.config.settings import Config
from april.engines.http.adapter_files import why_unservable
from april.engines.protocol import Engine, KeepsAdapters
from april.errors import ConfigError
from april.weights.adapter import AdapterDirectories, adapter_of, is_adapted, merged_copy

log = logging.getLogger("april")


class AdapterUpdates:
    """Writes the trainer's adapters to directories that april creates and removes, from which engines load them."""

    def __init__(self, config: Config) -> None:
        directory = config.adapters_dir
        self._directories = AdapterDirectories(None if directory is None else Path(directory))
        self._remote_urls = [] if directory is not None or not isinstance(config.engine, AddressedEngineConfig) else [
            url for url in config.engine.urls if urlsplit(url).hostname not in THIS_MACHINE
        ]  # fmt: skip
        self._warned = False

    def prepare(self, caller: str, weights: Any, engines: Sequence[Engine]) -> tuple[str | None, Any]:
        """Return (directory of the adapter, None), or (None, weights to be sent). No engine is called yet.

        Raises ConfigError if the engines accept neither the model's adapter nor a merged model.
        """
        if not is_adapted(weights):
            return None, weights
        if all(engine.capabilities.shares_weights for engine in engines):
            return None, weights
        lacking = [engine for engine in engines if engine.capabilities.adapters is None]
        if lacking:
            need = lacking[0].capabilities.remedy("adapters")
            if not all(engine.capabilities.collective for engine in engines):
                raise ConfigError(
                    f"{caller}: weights= is a model with an adapter (PEFT), but engine {lacking[0].name} accepts none; "
                    f"{need}"
                )
            if not self._warned:
                log.warning(
                    "engine %s accepts no adapters, so april sends it the whole model, with the adapter merged into a "
                    "copy; %s",
                    lacking[0].name, need,
                )  # fmt: skip
            self._warned = True
            return None, merged_copy(weights)
        if self._remote_urls:
            raise ConfigError(
                f"{caller}: {self._remote_urls[0]} is on another machine and loads an adapter from a directory; set "
                "adapters_dir to one that all servers can read"
            )
        adapter = adapter_of(weights)
        scales = all(e.capabilities.adapters is not None and e.capabilities.adapters.scales for e in engines)
        if (why := why_unservable(adapter.settings, scales=scales)) is not None:
            raise ConfigError(f"{caller}: the adapter cannot be served: {why}; give a merged copy of the model")
        return self._directories.write(adapter), None

    def remove_unused(self, engines: Sequence[Engine], call_on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """Remove directories that no server can read again; ``call_on_loop`` calls a function on april's loop."""
        self._directories.remove_others(
            call_on_loop(lambda: {p for e in engines if isinstance(e, KeepsAdapters) for p in e.adapter_paths()})
        )

    def close(self) -> None:
        self._directories.close()
