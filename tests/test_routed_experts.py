"""The experts of tokens, from servers: every row by the conversation and the weights that read it, or a named error."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_async_llm import FakeAsyncLLM, install_vllm
from fake_servers.base import Experts, PlannedFault, RequestFault
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from numpy.typing import NDArray
from server_fixtures import BOTH, PROMPT, begun, facts_of, read, request, saved, served, until, update

import april
from april.core.engine_limits import LimitCode
from april.core.versions import PolicyVersion
from april.doctor.findings import Level, abilities
from april.engines.fit import why_unfit
from april.engines.http.token_rows import (
    InvalidRows,
    Routing,
    experts_of_numbers,
    narrow_ids,
    routing_of,
)
from april.engines.protocol import EngineFinish
from april.engines.vllm.in_process import VllmInProcessEngine
from april.errors import EngineError, WireError

ROWS = ("routed_experts",)
EXPERTS = Experts(layers=3, top_k=2, count=300)
SHAPE = {"expert_shape": (3, 2)}
LONG = 10**6


def server(kind: str, experts: Experts = EXPERTS, **options: Any) -> Any:
    made = (FakeVllmServer if kind == "vllm" else FakeSglangServer)(**options)
    made.experts = experts
    return made


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", BOTH)
async def test_rows_of_a_whole_response(kind: str, stream: bool) -> None:
    """One row for each token of the conversation but its last, prompt included, in two bytes where one is too few."""
    async with served(kind, server=server(kind), config=SHAPE) as (there, engine):
        assert engine.capabilities.extras == ROWS
        got = await read(engine, request(extras=ROWS, stream=stream))
        rows = got.extras["routed_experts"]
        assert np.array_equal(rows, EXPERTS.rows(PROMPT + got.tokens, ["w0"] * len(got.tokens)))
        assert rows.dtype == np.uint16
        assert not (await read(engine, request())).extras
        assert len(there.runs) == 2


@pytest.mark.parametrize("kind", BOTH)
async def test_a_resumed_request_brings_the_rows_that_are_missing(kind: str, tmp_path: Path) -> None:
    """Cut, updated, continued: the old rows are those of the old weights, the new ones begin at the first missing."""
    async with served(kind, server=server(kind, mean_length=LONG), stepped=True, config=SHAPE) as (there, engine):
        first = await begun(there, read(engine, asked := request(extras=ROWS, stream=True)))
        there.step(5)
        await engine.abort([asked.attempt_id])
        cut = await first
        assert cut.finish is EngineFinish.ABORT
        there.go_on()
        await update(engine, PolicyVersion(0, 1), saved(tmp_path, "w1"))
        conversation = PROMPT + cut.tokens
        again = await read(
            engine, request(conversation, 8, extras=ROWS, extras_from=len(cut.extras["routed_experts"]))
        )
        rows = np.concatenate([cut.extras["routed_experts"], again.extras["routed_experts"]])
        made_under = ["w0"] * len(cut.tokens) + ["w1"] * len(again.tokens)
        assert len(again.tokens) == 8
        assert np.array_equal(rows, EXPERTS.rows(conversation + again.tokens, made_under))


async def test_a_request_that_was_put_back_and_cut_has_no_rows() -> None:
    """SGLang gives none for it: its tokens come without, which is no error."""
    retracted = PlannedFault(RequestFault.RETRACTED, after_tokens=6)
    there = server("sglang", mean_length=LONG)
    async with served("sglang", retracted, server=there, stepped=True, config={"max_token_loss": 1, **SHAPE}) as (
        there, engine,
    ):  # fmt: skip
        work = await begun(there, read(engine, asked := request(extras=ROWS)))
        there.step(8)
        await engine.abort([asked.attempt_id])
        got = await work
        assert (got.error, got.finish, len(got.tokens), dict(got.extras)) == (None, EngineFinish.ABORT, 6, {})


@pytest.mark.parametrize("kind", BOTH)
async def test_small_numbers_where_all_experts_fit(kind: str, tmp_path: Path) -> None:
    """With at most 256 experts, by the model's files, a row takes a byte per expert, whatever the ids are."""
    config = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 256, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    options = {"root": str(tmp_path)} if kind == "vllm" else {}
    made = server(kind, Experts(3, 2, 256), **options)
    if kind == "sglang":
        made.model_path = str(tmp_path)
    async with served(kind, server=made) as (_, engine):
        got = await read(engine, request(max_tokens=3, extras=ROWS))
        rows = got.extras["routed_experts"]
        assert rows.dtype == np.uint8
        assert np.array_equal(rows, made.experts.rows(PROMPT + got.tokens, ["w0"] * len(got.tokens)))


# ---------------------------------------------------------------- what cannot be true


def npy(rows: NDArray[Any], **changes: Any) -> str:
    """A file of numpy's in base64; ``changes`` of what its header says."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {**np.lib.format.header_data_from_array_1_0(rows), **changes})
    return base64.b64encode(file.getvalue() + rows.tobytes()).decode()


Said = Callable[[Any, NDArray[np.int32]], Any]
WRONG: list[tuple[str, Said, str]] = [
    ("both", lambda run, rows: None, "no rows of routed_experts"),
    ("both", lambda run, rows: rows[:-1], "rows of routed_experts, but"),
    ("both", lambda run, rows: np.concatenate([rows, rows[:1]]), "rows of routed_experts, but"),
    ("both", lambda run, rows: "no base64!", "that are not base64"),
    ("sglang", lambda run, rows: -rows - 1, "the expert -"),
    ("sglang", lambda run, rows: rows + 65536, "the expert 6"),
    ("sglang", lambda run, rows: rows[:, :2], "bytes of routed_experts, which do not match 3 layers with 2"),
    ("vllm", lambda run, rows: npy(rows.astype(np.int32) + 65536), "the expert 6"),
    ("vllm", lambda run, rows: npy(rows[:, :2].astype(np.uint8)), "of 2 layers with 2 experts per token, but"),
    ("vllm", lambda run, rows: npy(rows.astype(np.float32)), "and type float32, but rows of ids per layer are needed"),
    ("vllm", lambda run, rows: npy(rows[:, :, 0].astype(np.uint16)), "but rows of ids per layer are needed"),
    ("vllm", lambda run, rows: base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "that are not a numpy array"),
    ("vllm", lambda run, rows: npy(rows.astype(np.uint16), shape=(10**15, 3, 2)), "that are not a numpy array"),
    ("vllm", lambda run, rows: npy(rows.astype(np.uint16), shape=(-1, 3, 2)), "that are not a numpy array"),
    ("vllm", lambda run, rows: npy(rows.astype(np.uint16), descr="|O"), "that are not a numpy array"),
]


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [(k, said, words) for kind, said, words in WRONG for k in (BOTH if kind == "both" else [kind])],
)
async def test_rows_that_cannot_be_true_are_an_error_by_name(kind: str, said: Said, words: str) -> None:
    """Missing, too few, too many, no rows at all, ids that no model has, headers that lie: nothing is unpickled."""
    async with served(kind, server=server(kind), config=SHAPE) as (there, engine):
        there.rows_said = said
        got = await read(engine, request(extras=ROWS))
        assert isinstance(got.error, WireError)
        assert words in str(got.error)
        there.rows_said = lambda run, rows: rows
        assert (await read(engine, request(extras=ROWS))).error is None


def test_an_id_beyond_the_experts_of_the_model() -> None:
    """Where their number is known, an id that none of them has is refused, and so are more than two bytes can name."""
    rows = np.array([[[0, 7]]], np.int32)
    assert narrow_ids(rows, 8).dtype == np.uint8
    for experts, words in ((7, "the expert 7, but experts are numbered from 0 to 6"), (70_000, "the expert 7")):
        with pytest.raises(InvalidRows, match=words):
            narrow_ids(rows, experts)


def test_no_rows_at_all_are_rows() -> None:
    """Nothing is what a request of one token to a prompt of one has before it, and no error."""
    assert experts_of_numbers("", Routing(3, 2)).shape == (0, 3, 2)


# ---------------------------------------------------------------- what april finds out


@pytest.mark.parametrize(
    ("file", "routing"),
    [
        ({"num_hidden_layers": 4, "num_experts_per_tok": 2, "num_experts": 8}, Routing(4, 2, 8)),
        ({"num_hidden_layers": 61, "num_experts_per_tok": 8, "n_routed_experts": 256}, Routing(61, 8, 256)),
        ({"num_hidden_layers": 32, "num_experts_per_tok": 2, "num_local_experts": 8}, Routing(32, 2, 8)),
        ({"text_config": {"num_hidden_layers": 5, "num_experts_per_tok": 3}, "num_hidden_layers": 9}, Routing(5, 3)),
        ({"num_hidden_layers": 4}, None),
        ({"num_hidden_layers": True, "num_experts_per_tok": 2}, None),
    ],
)
def test_the_shape_by_the_models_files(file: dict[str, Any], routing: Routing | None) -> None:
    """Under the names that families of models give them; a model without experts has none."""
    assert routing_of([file, {"eos_token_id": 2}]) == routing


@pytest.mark.parametrize("kind", BOTH)
def test_a_server_without_the_flag(kind: str, tmp_path: Path) -> None:
    """It gives no rows, and the flag that changes it is in the limit and in the refusal of a configuration."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "num_experts_per_tok": 2, "vocab_size": 512}')
    there = FakeVllmServer(root=str(tmp_path)) if kind == "vllm" else FakeSglangServer()
    if isinstance(there, FakeSglangServer):
        there.model_path = str(tmp_path)
    can = facts_of(there).capabilities
    (limit,) = [limit for limit in can.limits if limit.code is LimitCode.NO_EXPERTS]
    assert "--enable-return-routed-experts" in limit.flags
    config = april.Config(rollout_batch_size=1, max_response_len=8, extras="routed_experts")
    (sentence,) = why_unfit(config, {"there": can})
    assert sentence.startswith(
        "engine there does not return routed_experts with its tokens, which the setting extras asks for; start the"
    )
    assert "--enable-return-routed-experts" in sentence
    assert "extras" not in [finding.subject for finding in abilities(can)]
    there.experts = EXPERTS
    can = facts_of(there).capabilities
    (sentence,) = why_unfit(config.model_copy(update={"extras": ("routed_expert",)}), {"there": can})
    assert sentence.endswith("which the setting extras asks for; it returns routed_experts")
    (found,) = [finding for finding in abilities(can) if finding.subject == "extras"]
    assert (found.level, found.sentence) == (Level.OK, (
        "routed_experts: the server returns these rows with the tokens, for extras"
    ))
    assert not list(why_unfit(config, {"there": can}))
    assert not [limit for limit in can.limits if limit.code is LimitCode.NO_EXPERTS]


@pytest.mark.parametrize(
    ("made", "config", "words"),
    [
        (server("sglang"), {}, "set engine.expert_shape"),
        (server("vllm", scale_out=False), {}, "--enable-scale-out"),
        (server("vllm", processes=2), {}, "--api-server-count 1"),
    ],
)
def test_a_server_that_april_cannot_have_them_from(made: Any, config: dict[str, Any], words: str) -> None:
    """The flag is there, and something else is not: the sentence says what."""
    can = facts_of(made, **config).capabilities
    assert not can.extras
    assert words in can.needs["extras"]


@pytest.mark.parametrize("kind", BOTH)
def test_another_shape_than_the_settings_say_is_refused(kind: str) -> None:
    """Before anything starts: rows of another shape would be read as other tokens' experts."""
    with pytest.raises(EngineError, match=r"is engine\.expert_shape right"):
        facts_of(server(kind), expert_shape=(4, 2))
    with pytest.raises(EngineError, match=r"is engine\.expert_shape right"):
        facts_of(server(kind), expert_shape=(1, 2))


def test_a_model_without_experts(tmp_path: Path) -> None:
    """Its files say so: no flag would help."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "vocab_size": 512}', "utf-8")
    can = facts_of(FakeVllmServer(root=str(tmp_path))).capabilities
    assert "num_experts_per_tok" in can.needs["extras"]
    assert LimitCode.NO_EXPERTS not in [limit.code for limit in can.limits]


@pytest.mark.parametrize("names", [("a", "a"), ("with space",), ("",)])
def test_names_of_rows(names: tuple[str, ...]) -> None:
    """Each once, and words."""
    with pytest.raises(april.ConfigError, match="must be names of extras such as routed_experts, each only once"):
        april.Config(rollout_batch_size=1, max_response_len=8, extras=names)


# ---------------------------------------------------------------- vLLM in this process


@asynccontextmanager
async def in_process(monkeypatch: pytest.MonkeyPatch, release: int, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """An AsyncLLM of this loop that gives experts, and the engine over it."""
    install_vllm(monkeypatch)
    llm = FakeAsyncLLM(release=release, experts=EXPERTS, mean_length=LONG)
    engine = VllmInProcessEngine(llm, **options)
    try:
        yield llm, engine
    finally:
        await engine.close()
        await llm.shut()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("release", [32, 33])
async def test_vllm_in_process(release: int, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the whole conversation in either release, cut to those that are missing; none for who does not ask."""
    async with in_process(monkeypatch, release, stream=stream) as (_, engine):
        assert engine.capabilities.extras == ROWS
        got = await read(engine, request(max_tokens=20, extras=ROWS))
        whole = EXPERTS.rows(PROMPT + got.tokens, ["tiny0"] * 20)
        assert np.array_equal(got.extras["routed_experts"], whole)
        assert got.extras["routed_experts"].dtype == np.uint16
        rest = await read(engine, request(PROMPT + got.tokens[:9], 11, extras=ROWS, extras_from=11))
        assert np.array_equal(rest.extras["routed_experts"], whole[11:])
        assert not (await read(engine, request(max_tokens=3))).extras


async def test_vllm_in_process_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are missing or of another shape are errors by name, but where the request was cut."""
    async with in_process(monkeypatch, 33) as (llm, engine):
        for said, words in (
            (lambda run, rows: None, "no rows of routed_experts"),
            (lambda run, rows: rows[:-1], "rows of routed_experts, but"),
            (lambda run, rows: rows[:, :1], "of 1 layers with 2 experts per token, but the model"),
            (lambda run, rows: rows + 300, "the expert"),
        ):
            llm.rows_said = said
            got = await read(engine, request(max_tokens=4, extras=ROWS))
            assert isinstance(got.error, WireError)
            assert words in str(got.error)
        llm.rows_said = lambda run, rows: None
        llm.stepped = True
        work = asyncio.create_task(read(engine, asked := request(extras=ROWS)))
        await until(lambda: bool(llm._live))
        llm.step(4)
        await engine.abort([asked.attempt_id])
        got = await work
        assert (got.error, got.finish, len(got.tokens), got.extras) == (None, EngineFinish.ABORT, 4, {})


def test_vllm_in_process_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have to be made with is in the capabilities."""
    install_vllm(monkeypatch)
    can = VllmInProcessEngine(FakeAsyncLLM()).capabilities
    assert not can.extras
    assert "enable_return_routed_experts=True" in can.needs["extras"]
