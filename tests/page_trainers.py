"""Flags of slime, OpenRLHF and verl on a page, read by the adapters as in a run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import yaml
from page_blocks import ROOT

from april.adapters.openrlhf.arguments import config_of, split_flags
from april.adapters.slime.arguments import config_of as config_of_slime
from april.adapters.verl.settings import settings_of
from tests.adapters import openrlhf_stand_in, slime_stand_in, stand_in_verl

SWITCH = ["hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl"]
GROUP = ROOT / "april" / "adapters" / "verl" / "conf" / "april" / "verl.yaml"


def value(word: str) -> Any:
    """As a command line has it: a number, or a word."""
    return yaml.safe_load(word)


def flags(words: list[str]) -> dict[str, Any]:
    """``--name VALUE``; a flag without a value is true."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name, found[word[2:]] = word[2:], True
        else:
            found[name] = value(word)
    return found


def slime(words: list[str], own: Mapping[str, Any] | None = None) -> None:
    """Functions of april's are there; every other flag is one that the adapter knows, and takes."""
    given = {name.replace("-", "_"): v for name, v in flags(words).items()}
    for path in given.values():
        if str(path).startswith("april."):
            module, _, function = path.rpartition(".")
            assert callable(getattr(import_module(module), function))
    given.pop("rollout_function_path", None)
    given.setdefault("n_samples_per_prompt", 8)
    if own and "group_quorum" in own:
        given |= {"custom_reward_post_process_path": "april.adapters.slime.post_process_rewards"}
    args = slime_stand_in.namespace(april=dict(own or {}), sglang_router_ip="127.0.0.1", sglang_router_port=1, **given)
    config_of_slime(args, ["http://127.0.0.1:8000"])


def openrlhf(words: list[str]) -> None:
    """april's flags are settings of april; OpenRLHF's are those that the adapter reads."""
    theirs, ours = split_flags(words)
    given = flags(theirs)
    args = openrlhf_stand_in.namespace(**{"rollout.max_new_tokens": 100})
    for path in given:
        node: Any = args
        for name in path.split("."):
            node = getattr(node, name)  # one that nobody knows is not there
    if "rollout.batch_size" in given:
        given["rollout.vllm_generate_batch_size"] = given["rollout.batch_size"]
    config_of(openrlhf_stand_in.namespace(**given), ours)


def verl(words: list[str]) -> None:
    """The group `+april=verl` is there for hydra, and april takes what it says with the overrides behind it."""
    config = stand_in_verl.config(actor_rollout_ref__rollout__n=8)
    switch = [word for word in words if word in SWITCH]
    assert switch in ([], SWITCH)
    merged(config, yaml.safe_load(GROUP.read_text("utf-8")))
    for word in words:
        if word in (*SWITCH, "..."):
            continue
        path, given, text = word.partition("=")
        assert given, word
        *above, last = path.split(".")
        node: Any = config
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value(text)
    settings_of(config)


def merged(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    """``more`` put over it, mapping by mapping."""
    for name, under in more.items():
        if isinstance(under, Mapping):
            merged(config.setdefault(name, {}), under)
        else:
            config[name] = under
