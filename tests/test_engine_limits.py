"""What an engine cannot do is data: each promise that it does not keep has its own cause, and that is what is told."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_servers.openai import FakeOpenAIServer, FakeTrtllmServer
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import connected, facts_of, listening

from april.core.engine_limits import Limit, LimitCode
from april.engines.abilities import ABILITIES
from april.engines.protocol import AbortMeans, Capabilities, LogprobKind
from april.testing.conformance import Outcome, Subject, check_named

CAUSES = {ability.name for ability in ABILITIES if ability.causes and ability.name != "in_flight_updates"}
"""Fields whose lack has a cause; of many engines, no kind keeps requests over an update."""


def short_of(c: Capabilities) -> set[str]:
    """Fields of the capabilities that are less than they could be."""
    less = {
        "abort_means": c.abort_means is not AbortMeans.BY_ID,
        "eos_token_ids": not c.eos_token_ids,
        "honours_seeds": not c.honours_seeds,
        "returns_partials": not c.returns_partials,
        "logprob_kind": c.logprob_kind in (LogprobKind.RAW, LogprobKind.UNKNOWN),
        "updates_from_disk": not c.updates_from_disk,
        "verifies_weights": not c.verifies_weights,
    }
    assert less.keys() == CAUSES
    return {field for field, is_less in less.items() if is_less}


VLLM: list[dict[str, Any]] = [
    {}, {"developer": False}, {"scale_out": False}, {"processes": 2}, {"logprobs": "raw"},
    {"device": "cpu", "chunked_prefill": True},
    {"copies": 2}, {"without": ("/weight_info",)}, {"without": ("/abort_requests",)},
]  # fmt: skip
SGLANG: list[dict[str, Any]] = [
    {}, {"incremental": False}, {"logprobs": "raw"},
]  # fmt: skip
OPENAI: list[dict[str, Any]] = [{}, {"kind": LogprobKind.PROCESSED, "honours_seeds": False}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((FakeVllmServer, options) for options in VLLM),
        *((FakeSglangServer, options) for options in SGLANG),
        *((FakeOpenAIServer, options) for options in OPENAI),
        (FakeTrtllmServer, {}),
    ],
)
@pytest.mark.parametrize("eos", [None, (2,)], ids=["eos unknown", "eos known"])
def test_what_is_less_has_a_cause_and_what_is_not_has_none(
    kind: type[Any], options: dict[str, Any], eos: tuple[int, ...] | None
) -> None:
    """Capabilities and limits are two words for one thing: neither says what the other does not."""
    can = facts_of(kind(**options), eos_token_ids=eos).capabilities

    short = short_of(can)
    caused = {field for field in CAUSES if can.cause(field) is not None}
    # the tokens that a cumulative stream may lose are no means of abort
    waits = {"abort_means"} if any(limit.code is LimitCode.CUMULATIVE_STREAMS for limit in can.limits) else set()
    # a label is one way to know that weights from a directory have arrived
    assert short <= caused
    assert caused - waits - {"updates_from_disk"} <= short
    assert len({limit.code for limit in can.limits}) == len(can.limits)


@pytest.mark.parametrize(
    ("options", "tied", "words"),
    [
        ({"developer": False}, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"device": "cpu"}, True, "save the model with tie_word_embeddings false"),
    ],
    ids=["developer routes are closed", "the model would be reloaded wrongly"],
)
async def test_the_suite_names_the_cause_of_what_is_not_offered(
    options: dict[str, Any], tied: bool, words: str, tmp_path: Path
) -> None:
    """Of two servers that load no weights from a directory each hears its own reason; so does who gives one."""
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}), "utf-8")
    server = FakeVllmServer(root=str(tmp_path), **options)

    async with listening(server):
        verdict = await check_named("version_exactness")(Subject(open=partial(connected, "vllm", server)))
        assert verdict.outcome is Outcome.NOT_OFFERED
        assert words in verdict.detail


def test_each_ability_is_declared_once() -> None:
    """A row is of one field, no two rows are of the same, and a lack that is no remark has a code that explains it."""
    names = [ability.name for ability in ABILITIES]
    assert len(set(names)) == len(names)
    assert set(names) <= {field.name for field in fields(Capabilities)}
    nothing = Capabilities(logprob_kind=LogprobKind.UNKNOWN, vocab_size=9, max_context=9, returns_partials=False,
                           abort_means=AbortMeans.CLOSE, verifies_weights=False, streams=False, honours_seeds=False,
                           needs={"adapters": "a", "attachments": "b"})  # fmt: skip
    lacking = [ability for ability in ABILITIES if ability.shown(nothing, None) is None]
    assert all(ability.subject and (ability.remark is None) <= bool(ability.causes) for ability in lacking)
    assert len(lacking) >= 9


def test_one_sentence() -> None:
    """Subject, consequence and remedy; a server may be named otherwise where it is the subject, and only there."""
    limit = Limit(LimitCode.OTHER, "does not", server="http://h")
    assert limit.sentence == "http://h does not."
    assert limit.of("It").sentence == "It does not."
    own = Limit(LimitCode.OTHER, "Seeds have no effect", "add --seeds", ("--seeds",))
    assert own.of("It").sentence == "Seeds have no effect; add --seeds."
