"""What april finds out about a server before it is used, without disturbing it, and what it says of what is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_servers.openai import MODEL, FakeOpenAIServer, FakeTrtllmServer
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from raw_servers import http, raw_server
from server_fixtures import KINDS, begun, connected, facts_of, listening, probed, read, request, served
from socket_clock import run_with_sockets

from april.core.engine_table import EngineTable
from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.driver.command_executor import limits_of
from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.server_probe import eos_of, model_files
from april.engines.protocol import AbortMeans
from april.errors import ConfigError, EngineError, EngineUnreachable

V1 = PolicyVersion(0, 1)

# ---------------------------------------------------------------- what each kind offers


@pytest.mark.parametrize(
    ("options", "means", "spans", "disk", "words"),
    [
        ({"transfers": "nccl"}, AbortMeans.BY_ID, True, True, None),
        ({}, AbortMeans.BY_ID, True, True, "--weight-transfer-config"),
        ({"developer": False}, AbortMeans.CLOSE, False, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, AbortMeans.CLOSE, False, False, "--enable-scale-out"),
        ({"without": ("/server_info",)}, AbortMeans.CLOSE, False, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"without": ("/weight_info",)}, AbortMeans.CLOSE, False, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"processes": 2}, AbortMeans.CLOSE, False, False, "--api-server-count 1"),
        # a server that lacks one developer route would be told of new weights and keep its old ones
        ({"without": ("/abort_requests",)}, AbortMeans.CLOSE, False, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs": "raw"}, AbortMeans.BY_ID, True, True, "--logprobs-mode processed_logprobs"),
    ],
)
def test_vllm(options: dict[str, Any], means: AbortMeans, spans: bool, disk: bool, words: str | None) -> None:
    """Means, spans and routes as they are; whatever is missing is a sentence with the flag that helps."""
    facts = facts_of(FakeVllmServer(**options), vocab_size=None)
    can = facts.capabilities
    assert (can.abort_means, can.version_spans, can.updates_from_disk) == (means, spans, disk)
    assert (facts.software, facts.model) == (f"0.{options.get('release', 32)}.0", "fake")
    assert (can.max_context, can.vocab_size) == (4096, 512)
    assert (words is None) == (not can.limits), can.notes
    assert words is None or any(words in note for note in can.notes)


def offered(config: dict[str, Any] | None = None, **options: Any) -> Any:
    """Of an SGLang server with these options; nothing of it may change by being asked."""
    server = FakeSglangServer(**options)
    found = facts_of(server, **(config or {}))
    assert (server.label, server.pause_mode, server.aborts, server.updates) == ("default", None, [], [])
    assert sum(len(r.ids) for r in server.runs) <= 6
    assert not server.violations
    return found


def test_sglang() -> None:
    """A recent server offers everything, but that the fake has no model files, and seeds do nothing."""
    said = offered()
    can = said.capabilities
    assert (said.software, said.model) == ("0.5.23", "fake/model")
    assert (can.vocab_size, can.max_context, can.max_in_flight, can.streams) == (512, 4090, 64, True)
    assert (can.version_spans, said.incremental) == (True, True)
    assert can.logprob_kind is LogprobKind.TEMPERATURE
    assert [sentence.split(":")[0] for sentence in can.notes] == [
        "Seeds have no effect",
        "The ids that end a response are unknown, because the model's files are not on this machine or do not name "
        "them",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"incremental": False}, "--incremental-streaming-output"),
        ({"logprobs": "raw"}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
    ids=str,
)
def test_sglang_says_what_is_missing_with_the_remedy(options: dict[str, Any], words: str) -> None:
    """One feature less each."""
    assert any(words in sentence for sentence in offered(**options).capabilities.notes)


def test_the_configuration_of_sglang_is_believed() -> None:
    """Without incremental streams one answer at the end is cheaper, unless the user wants to lose less."""
    can = offered({"vocab_size": 500, "max_len": 100, "eos_token_ids": (7,), "logprobs": "processed"}).capabilities
    assert (can.vocab_size, can.max_context, can.eos_token_ids) == (500, 100, (7,))
    assert can.logprob_kind is LogprobKind.PROCESSED
    assert not offered(incremental=False).capabilities.streams
    assert offered({"max_token_loss": 50}, incremental=False).capabilities.streams
    assert offered({"max_in_flight": 5}, incremental=False).capabilities.max_in_flight == 5


def test_openai() -> None:
    """What its list of models and a few requests show."""
    facts = facts_of(FakeOpenAIServer())
    assert facts.model == MODEL
    can = facts.capabilities
    assert (can.max_context, can.vocab_size, can.eos_token_ids) == (4096, 512, (2,))
    assert (can.abort_means, can.streams, can.honours_seeds) == (AbortMeans.CLOSE, True, True)
    assert (can.version_spans, can.updates_from_disk) == (False, False)
    assert any("has made but not sent" in note for note in can.notes)


@pytest.mark.parametrize(
    ("kind", "logprobs"),
    [("vllm", "raw"), ("vllm", "processed"), ("openai", "raw"), ("openai", "processed"), ("openai", "temperature")],
)
def test_the_kind_of_log_probabilities(kind: str, logprobs: str) -> None:
    """Out of the server's settings, or seen from requests of one token each; the configuration's word goes first."""
    options = {"kind": LogprobKind(logprobs)} if kind == "openai" else {"logprobs": logprobs}
    server = KINDS[kind][0](**options)
    can = facts_of(server).capabilities
    assert can.logprob_kind is LogprobKind(logprobs)
    if kind == "vllm":
        assert not server.runs
    else:
        assert any("raw logits" in note for note in can.notes) == (logprobs == "raw")
    assert facts_of(server, logprobs="temperature").capabilities.logprob_kind is LogprobKind.TEMPERATURE


@pytest.mark.parametrize(
    ("options", "config", "seen", "words"),
    [
        ({"honours_seeds": False}, {}, {"honours_seeds": False}, "does not repeat a response for the same seed"),
        ({}, {"eos_token_ids": None}, {"eos_token_ids": ()}, "The ids that end a response are unknown"),
        ({"context": 2048}, {"max_len": 4096}, {"max_context": 2048}, ""),
        ({"context": 2048}, {"max_len": 1000}, {"max_context": 1000}, ""),
    ],
    ids=["seeds", "EOS is not known", "its context", "less than its context"],
)
def test_openai_says_what_is_missing(
    options: dict[str, Any], config: dict[str, Any], seen: dict[str, Any], words: str
) -> None:
    """Not refused: exact repetition is lost, or EOS is looked for in every response."""
    facts = facts_of(FakeOpenAIServer(**options), **config)
    assert {name: getattr(facts.capabilities, name) for name in seen} == seen
    assert any(words in note for note in facts.capabilities.notes)


# ---------------------------------------------------------------- what is refused


class Cumulative(FakeOpenAIServer):
    """Its events repeat the tokens before them, and it may not count them."""

    counted = True

    def _shaped(self, run: Any, said: dict[str, Any]) -> dict[str, Any]:
        (choice,) = super()._shaped(run, said)["choices"]
        choice["token_ids"] = run.ids[: run.flushed]
        choice["logprobs"]["token_logprobs"] = [-1.0] * run.flushed
        return said

    def _usage(self, run: Any) -> list[str]:
        return super()._usage(run) if self.counted else []


class Uncounted(Cumulative):
    """Nobody would notice if april closed such a stream."""

    counted = False


REPEATS = "does not return the id of each token once"


@pytest.mark.parametrize(
    ("server", "config", "message"),
    [
        (FakeOpenAIServer(gives_ids=False), {}, REPEATS),
        (FakeOpenAIServer(strips=True), {}, "leaves the stop token out"),
        (FakeOpenAIServer(), {"vocab_size": None}, r"set engine.vocab_size .vocab_size of the model's config.json"),
        (FakeTrtllmServer(), {"max_len": None}, "set engine.max_len .trtllm-serve: its --max_seq_len"),
        (FakeOpenAIServer(), {"model": "other"}, "has no model 'other'; it serves: fake"),
        (FakeVllmServer(), {"model": "other"}, "it serves: fake"),
        (FakeSglangServer(spans=False), {}, "which weights made which token; upgrade it to SGLang 0.5.20 or later"),
        (FakeSglangServer(labels=False), {}, "has no /update_weight_version; upgrade it to SGLang 0.5.20 or later"),
        (Cumulative(mean_length=10**6), {}, REPEATS),
        (Uncounted(mean_length=10**6), {}, REPEATS),
    ],
)
def test_what_cannot_be_used_is_refused(server: Any, config: dict[str, Any], message: str) -> None:
    """One sentence that says what is wrong and what to do."""
    with pytest.raises(ConfigError, match=message):
        facts_of(server, **config)


def test_an_unknown_kind_of_log_probabilities_of_any_type() -> None:
    """It is as unknown as another name."""
    server = FakeVllmServer()
    server.shown = {"model_config": {"logprobs_mode": {"a": 1}}}
    assert facts_of(server).capabilities.logprob_kind is LogprobKind.UNKNOWN


@pytest.mark.parametrize(("kind", "mode", "words"), [("vllm", "keep", "/resume"), ("sglang", "retract", "/continue")])
async def test_a_paused_server_is_described_and_not_connected_to(kind: str, mode: str, words: str) -> None:
    """It would answer no request: an error that says how to resume it."""
    server = KINDS[kind][0]()
    async with listening(server):
        server.pause_mode = mode
        said = await probed(server)
        assert said.paused
        assert kind == "vllm" or f"POST {words}" in said.capabilities.notes[0]
        with pytest.raises(EngineError, match=f"is paused; .* .POST {words}"):
            await connected(kind, server)


async def test_what_is_no_sglang_server_is_said() -> None:
    """A closed port, a page that is not there, and a server that never answers: an error each, in time."""
    server = FakeSglangServer()
    async with listening(server):
        pass
    with pytest.raises(EngineUnreachable):
        await connected("sglang", server)
    for answer, patience, error, words in (
        (http(404), 30.0, ConfigError, "not an SGLang server"), (None, 0.3, EngineError, "has not reported"),
    ):  # fmt: skip
        with raw_server(lambda path, answer=answer: answer) as raw, pytest.raises(error, match=words):
            await connected("sglang", raw, probe_timeout_s=patience)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_is_slow_at_first_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer may take long, as a cold server's first one does; only all of them together have a limit."""
    exchange, heard = HttpClient._exchange, set()

    async def to_thread(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)  # virtual time does not wait for threads

    async def cold(client: HttpClient, method: str, route: str, *rest: Any) -> Reply:
        reply = await exchange(client, method, route, *rest)
        if route not in heard:
            heard.add(route)
            await asyncio.sleep(25.0)
        return reply

    async def program() -> None:
        server = KINDS[kind][0]()
        async with listening(server):
            engine = await connected(kind, server, probe_timeout_s=3600.0)
            await engine.close()

    monkeypatch.setattr(HttpClient, "_exchange", cold)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    run_with_sockets(program())
    assert heard


async def test_key() -> None:
    """Without the key a sentence with the status; the key is in no message and no repr."""
    server = FakeVllmServer(api_key="secret-key")
    async with listening(server):
        with pytest.raises((ConfigError, EngineError), match="401") as caught:
            await probed(server, "wrong-secret")
        assert "wrong-secret" not in str(caught.value)
        assert (await probed(server, "secret-key")).capabilities.version_spans
        engine = await connected("vllm", server, api_key="secret-key")
        assert "secret-key" not in repr(engine) + repr(engine.facts) + repr(vars(engine)["_client"])
        assert (await read(engine, request())).error is None
        await engine.close()


# ---------------------------------------------------------------- nothing is disturbed


async def test_a_server_in_use_is_not_disturbed() -> None:
    """No abort, no pause, no cache reset, no label: requests of others go on through a probe."""
    async with served("vllm", mean_length=10**6) as (server, engine):
        before = server.label
        reading = await begun(server, read(engine, request(max_tokens=500)))
        server.stale_cache = False
        await probed(server)
        assert (server.aborts, server.pauses, server.label) == ([], [], before)
        assert (await reading).error is None


# ---------------------------------------------------------------- what follows from a server's settings and files


@pytest.mark.parametrize(
    ("tied", "device", "developer", "words"),
    [
        (True, "cpu", True, "The server runs on a CPU"),
        (True, "cuda", True, None),
        (False, "cpu", True, None),
        (None, "cpu", True, None),
        (True, "cpu", False, None),
    ],
)
async def test_tied_embeddings_on_a_cpu(
    tied: bool | None, device: str, developer: bool, words: str | None, tmp_path: Path
) -> None:
    """vLLM reloads such a model wrongly there: said before it happens, where weights are updated from disk at all; the
    server is not asked to load a directory then."""
    (tmp_path / "config.json").write_text(json.dumps({} if tied is None else {"tie_word_embeddings": tied}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    options = {"root": str(tmp_path), "device": device, "developer": developer}
    async with served("vllm", **options) as (server, engine):
        for notes in ((await probed(server)).capabilities.notes, engine.capabilities.notes):
            said = [note for note in notes if "tied embeddings" in note]
            assert len(said) == (words is not None)
            assert words is None or said[0].startswith(words)
        if words:
            assert not engine.capabilities.updates_from_disk
            await engine.pause()
            with pytest.raises(EngineError, match="tied embeddings"):
                await engine.update_weights(V1, str(tmp_path))
            assert server.weights == "w0"


@pytest.mark.parametrize("developer", [True, False])
async def test_weights_that_no_label_shows_are_unverified(developer: bool) -> None:
    """Said by the engine, and so by every batch."""
    async with served("vllm", developer=developer) as (_, engine):
        assert engine.capabilities.verifies_weights is developer
        metrics = EngineTable([limits_of(engine)], PolicyVersion(0, 0)).metrics({}, PolicyVersion(0, 0))
        assert metrics.get(f"engine/{engine.name}/unverified_weights", 0.0) == float(not developer)


@pytest.mark.parametrize(
    ("memory", "page", "room"), [(65536, 64, 4090), (4096, 1, 4090), (4096, 64, 4096 - 128), (1000, 16, 968)]
)
def test_the_context_is_what_its_memory_has_room_for(memory: int, page: int, room: int) -> None:
    """A response that needs more than whole pages leave is cut short by SGLang without a word."""
    server = FakeSglangServer()
    server.memory, server.page_size = memory, page
    assert facts_of(server).capabilities.max_context == room


def test_all_ids_at_which_sglang_stops(tmp_path: Path) -> None:
    """The model's, its tokenizer's EOS, and the ends of turns that SGLang finds among the tokenizer's added tokens.

    Without files of the model nothing is known: its generation configuration may have more.
    """
    model, tokenizer = tmp_path / "step-5", tmp_path / "start"
    model.mkdir(), tokenizer.mkdir()
    added = {str(i): {"content": text} for i, text in ((7, "<|end|>"), (8, "<|other|>"), (9, "<|eom_id|>"))}
    files = {"eos_token": "<|end|>", "added_tokens_decoder": added}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(files), "utf-8")
    server = FakeSglangServer()
    server.model_path, server.tokenizer_path = str(model), str(tokenizer)

    assert facts_of(server).capabilities.eos_token_ids == ()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 2}), "utf-8")
    assert facts_of(server).capabilities.eos_token_ids == (2, 7, 9)
    assert facts_of(server, eos_token_ids=(3,)).capabilities.eos_token_ids == (3,)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json", "nowhere"])
def test_all_ids_that_end_a_response(where: str, tmp_path: Path) -> None:
    """The model's, those of its generation configuration, and the tokenizer's: servers stop at each of them."""
    token = {"content": "<|im_end|>", "special": True}
    files: dict[str, Any] = {
        "config.json": {"eos_token_id": 2, "text_config": {"eos_token_id": 5}},
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>" if where != "tokenizer.json" else token},
        "tokenizer.json": {"added_tokens": [{"id": 8, "content": "<|other|>"}]},
    }
    if where == "tokenizer_config.json":
        files[where]["added_tokens_decoder"] = {"8": {"content": "<|other|>"}, "9": token}
    if where == "tokenizer.json":
        files[where]["added_tokens"].append(token | {"id": 9})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    assert eos_of(model_files(tmp_path)) == ((2, 3, 5) if where == "nowhere" else (2, 3, 5, 9))
    assert eos_of(model_files(tmp_path / "elsewhere")) is None
    (tmp_path / "tokenizer_config.json").write_text("[]", "utf-8")
    assert eos_of(model_files(tmp_path)) == (2, 3, 5)
