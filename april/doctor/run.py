"""``april doctor`` behind its command line: from arguments to a report and an exit code."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from april.config.engines import checked_key, checked_url
from april.config.settings import Config
from april.doctor.examine import Patience, examine_config, examine_urls
from april.doctor.findings import Report
from april.doctor.show import show
from april.errors import ConfigError


def examine(urls: Sequence[str], config: Path | None, api_key_env: str | None, patience: Patience) -> Report:
    """Examine what was named on the command line.

    Raises:
        ConfigError: neither or both were named, an address is none, or the configuration is wrong.
    """
    if bool(urls) == (config is not None):
        raise ConfigError("name servers (april doctor http://127.0.0.1:8000) or a configuration (--config april.yaml)")
    if config is not None:
        if api_key_env is not None:
            raise ConfigError("--api-key-env is for servers named by address; the configuration has engine.api_key_env")
        return asyncio.run(examine_config(Config.from_yaml(config), patience))
    key = None
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env: the environment variable {api_key_env} is not set")
        checked_key(key)
    return asyncio.run(examine_urls(list(dict.fromkeys(map(checked_url, urls))), key, patience))


def present(report: Report, as_json: bool) -> int:
    """Print the report; 0 if april can use the servers, else 1."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, Console())
    return 0 if report.verdict.usable else 1
