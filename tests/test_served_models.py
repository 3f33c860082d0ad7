"""Which of a server's models is trained: the only one, or that which the settings name, at the start and ever after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import server_fixtures
from fake_async_llm import FakeAsyncLLM, install_vllm
from fake_servers.openai import MODEL, FakeOpenAIServer
from fake_servers.sglang import FakeSglangServer
from server_fixtures import behind_a_router, listening, read, request, update

import april
from april.core.versions import FIRST_VERSION
from april.doctor.examine import TimeLimits, examine_config, examine_urls
from april.doctor.findings import Level, Verdict
from april.engines.http.server_probe import choose_model
from april.engines.kinds.factory import open_servers
from april.errors import ConfigError, EngineError

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "vllm": ("vllm", {}, "fake"),
    "vllm, plain": ("vllm", {"developer": False, "scale_out": False}, "fake"),
    "sglang": ("sglang", {}, "fake/model"),
    "openai": ("openai", {}, MODEL),
    "vllm as openai": ("vllm", {}, "fake"),
}
"""Server, its options, and the name of its model."""
all_kinds = pytest.mark.parametrize("kind", KINDS)
NEXT = FIRST_VERSION._replace(n=1)


def server_of(kind: str) -> Any:
    return server_fixtures.KINDS[KINDS[kind][0]][0](**KINDS[kind][1])


def settings(kind: str, *urls: str, **more: Any) -> Any:
    engine = "openai" if kind == "vllm as openai" else KINDS[kind][0]
    return server_fixtures.settings(engine, *urls, **({"logprobs": "processed", "eos_token_ids": (2,)} | more))


@asynccontextmanager
async def served(kind: str, *adapters: str, model: str | None = None) -> AsyncIterator[tuple[Any, Any]]:
    server = server_of(kind)
    server.adapters += adapters
    async with listening(server) as url:
        (engine,) = await open_servers(settings(kind, url, model=model))
        server.runs.clear()
        try:
            yield server, engine
        finally:
            await engine.close()


def named(server: Any) -> list[Any]:
    if isinstance(server, FakeSglangServer):
        return [r.params.get("lora_path", "fake/model") for r in server.runs]
    return [r.params.get("model", "the token route") for r in server.runs]


# ---------------------------------------------------------------- at the start


@all_kinds
@pytest.mark.parametrize("adapters", [("policy",), ("policy", "older")], ids=len)
async def test_a_base_beside_its_adapters_is_not_taken_unasked(kind: str, adapters: tuple[str, ...]) -> None:
    """Nobody has said which of them is trained: refused, with what there is and what to write."""
    with pytest.raises(ConfigError) as caught:
        async with served(kind, *adapters):
            pass
    told = str(caught.value)
    assert told.startswith("engine.model: http://127.0.0.1:")
    assert f"serves {KINDS[kind][2]} and the adapters (LoRA) {', '.join(adapters)}" in told
    assert f"set it to policy to train that adapter, or to {KINDS[kind][2]} to train the model itself" in told


@all_kinds
async def test_an_adapter_that_is_named_is_asked(kind: str) -> None:
    """Every request names it, under the name by which the server finds it."""
    async with served(kind, "policy", "older", model="policy") as (server, engine):
        assert (await read(engine, request())).error is None
        assert engine.facts.model == "policy"
        if kind != "vllm":
            assert named(server) == ["policy"]


async def test_the_token_route_of_vllm_names_it_too() -> None:
    """The fake server tells which model was asked by refusing others."""
    async with served("vllm", "policy", model="policy") as (server, engine):
        server.model = "another"
        assert (await read(engine, request())).error is None
        server.adapters = ["another adapter"]
        assert "does not exist" in str((await read(engine, request())).error)


@all_kinds
async def test_a_base_that_is_named_is_trained(kind: str) -> None:
    """It is the user's will; `april doctor` says that the adapters are not asked."""
    base = KINDS[kind][2]
    async with served(kind, "policy", model=base) as (server, engine):
        assert (await read(engine, request())).error is None
        assert "policy" not in named(server)
        assert [n for n in engine.capabilities.notes if "policy" in n] == [
            f"Requests use the model {base} itself, as engine.model says, and none of its adapters (policy)."
        ]
        await update(engine, NEXT)
        assert (await engine.health()).ok


@all_kinds
async def test_a_name_that_no_server_lists(kind: str) -> None:
    """Of several servers one lacks the adapter: refused, with its address and what it has."""
    first, second = server_of(kind), server_of(kind)
    first.adapters.append("policy")
    async with listening(first) as one, listening(second) as two:
        with pytest.raises(ConfigError) as caught:
            await open_servers(settings(kind, one, two, model="policy"))
        assert str(caught.value) == (f"engine.model: {two} has no model 'policy'; it serves: {KINDS[kind][2]}")
        with pytest.raises(ConfigError, match=f"engine.model: {one} serves .* the adapters"):
            await open_servers(settings(kind, two, one))


@pytest.mark.parametrize(
    ("cards", "name", "found"),
    [
        ([{"id": "a", "root": "/m"}, {"id": "b", "root": "/m"}], None, ("a", None)),
        ([{"id": "a"}, {"id": "b"}], "b", ("b", None)),
        ([{"id": "a", "parent": "a"}], None, ("a", None)),
        ([{"id": "m"}, {"id": "p", "parent": "m"}], "m:p", ("p", "m")),
        ([{"id": "p", "parent": "m"}], "p", ("p", "m")),
        ([{"id": "a"}, {"id": "b"}], None, "serves several models (a, b); set it to the one that is trained"),
        ([{"id": "a"}, {"id": "b", "root": "/m"}], None, "several models"),
        ([{"id": "p", "parent": "m"}], None, "serves no model and the adapters (LoRA) p"),
        ([], None, "serves no model"),
        ([{"id": 5}, {"id": {"a": 1}}], None, "serves no model"),
        ([{"id": "a", "root": ["/m"]}, {"id": "b", "root": {}}], None, "several models"),
        ([], "a", "has no model 'a', and lists none"),
        ([{"id": "m"}, {"id": "p", "parent": "m"}], "other:p", "has no model 'other:p'; it serves: m, p"),
        ([{"id": "\x1b[31m" + "m" * 900}, {"id": "p", "parent": "m"}], None, "..."),
    ],
    ids=str,
)  # fmt: skip
def test_the_choice(cards: list[dict[str, Any]], name: str | None, found: Any) -> None:
    """Several names of one model are one; what a server says reaches a message on one short line."""
    if isinstance(found, tuple):
        served = choose_model("http://h:1", {"data": cards}, name)
        assert (served.name, served.base) == found
        return
    with pytest.raises(ConfigError) as caught:
        choose_model("http://h:1", {"data": cards}, name)
    assert found in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()


async def test_sglang_behind_the_openai_route_calls_it_base_and_adapter() -> None:
    """By the adapter's name alone SGLang's completions answer with the base."""
    server = FakeOpenAIServer()
    server.adapters, server.owner = ["policy"], "sglang"
    async with listening(server) as url:
        (engine,) = await open_servers(settings("openai", url, model="policy"))
        server.runs.clear()
        assert (await read(engine, request())).error is None
        assert named(server) == [f"{MODEL}:policy"]
        await engine.close()


async def test_workers_of_a_router_that_differ_in_their_adapters() -> None:
    """A request may come to any of them."""
    workers = [FakeSglangServer(), FakeSglangServer()]
    for worker in workers:
        worker.adapters.append("policy")
    async with behind_a_router(*workers, model="policy") as (_, engine):
        assert (await read(engine, request())).error is None
        assert [r.params["lora_path"] for w in workers for r in w.runs if "april-probe" not in r.name] == ["policy"]
        workers[1].adapters.clear()
        health = await engine.health()
        assert (health.ok, health.detail) == (
            False,
            f"engine.model: {workers[1].url} has no model 'policy'; it serves: fake/model",
        )


# ---------------------------------------------------------------- afterwards


@all_kinds
async def test_an_adapter_that_is_loaded_later_is_not_passed_by(kind: str) -> None:
    """A trainer hands its adapter to servers that april asks for their model: the update fails by name, and the engine
    gets nothing while the adapter is there."""
    async with served(kind) as (server, engine):
        assert (await engine.health()).ok
        await engine.pause()
        server.adapters.append("policy")
        with pytest.raises(EngineError, match=r"serves .* and the adapters \(LoRA\) policy"):
            await engine.update_weights(NEXT)
        health = await engine.health()
        assert not health.ok
        assert "set it to policy to train that adapter" in health.detail
        server.adapters.clear()
        await engine.update_weights(NEXT)
        assert (await engine.health()).ok


@all_kinds
async def test_a_server_that_has_lost_its_adapter(kind: str) -> None:
    """Started anew without it: its requests are the engine's failure, not their own fault, and a probe says why."""
    async with served(kind, "policy", model="policy") as (server, engine):
        server.adapters.clear()
        assert type((await read(engine, request())).error) is EngineError
        health = await engine.health()
        assert not health.ok
        assert f"has no model 'policy'; it serves: {KINDS[kind][2]}" in health.detail
        await engine.pause()
        with pytest.raises(EngineError, match="has no model 'policy'"):
            await engine.update_weights(NEXT)
        server.adapters.append("policy")
        await engine.update_weights(NEXT)
        await engine.resume()
        assert (await engine.health()).ok
        assert (await read(engine, request())).error is None


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_whole_weights_are_not_loaded_under_an_adapter(kind: str, tmp_path: Path) -> None:
    """They would change the model for which it was made; the server is not asked."""
    (tmp_path / "model.safetensors").write_bytes(b"")

    async with served(kind, "policy", model="policy") as (server, engine):
        assert not engine.capabilities.updates_from_disk
        await engine.pause()
        weights = server.weights
        with pytest.raises(EngineError, match="Requests use the adapter policy, trained on the model fake"):
            await engine.update_weights(NEXT, str(tmp_path))
        assert server.weights == weights
        await engine.update_weights(NEXT)
        await engine.resume()
        got = await read(engine, request())
        assert set(got.versions) == {NEXT}


async def test_a_list_that_cannot_be_had_says_nothing() -> None:
    """A proxy that hides it after the start, or shows a page: no engine is left alone for that."""
    async with served("vllm") as (server, engine):
        server.without = ("/v1/models",)
        assert (await engine.health()).ok


# ---------------------------------------------------------------- in process


async def test_an_async_llm_with_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made with enable_lora, it answers requests without an adapter by its model: somebody must say which is meant."""
    install_vllm(monkeypatch)

    llm = FakeAsyncLLM()
    llm.vllm_config.lora_config = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"lora_request=LoRARequest\(...\) .* or lora_request=False"):
        april.VllmInProcessEngine(llm)
    policy = SimpleNamespace(lora_name="policy")
    for given, sent in ((policy, [policy]), (False, [])):
        engine = april.VllmInProcessEngine(llm, lora_request=given)
        assert (await read(engine, request())).error is None
        assert [o["lora_request"] for o in llm.options[-1:] if "lora_request" in o] == sent
    engine = april.VllmInProcessEngine(llm, lora_request=policy)
    await engine.pause()
    with pytest.raises(EngineError, match="full weights from a directory would replace the model under it"):
        await engine.update_weights(NEXT, "weights")
    assert llm.weights == "tiny0"
    await engine.update_weights(NEXT)
    await engine.close()
    await llm.shut()


# ---------------------------------------------------------------- the doctor


def config(kind: str, url: str, **more: Any) -> april.Config:
    values = settings(kind, url, **more).model_dump(exclude_none=True)
    return april.Config(rollout_batch_size=2, max_response_len=50, engine=values)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
async def test_the_doctor_says_it(kind: str) -> None:
    """Not usable while nobody says which; with an adapter named, what cannot be loaded; else what is not asked."""
    server = server_of(kind)
    server.adapters.append("policy")
    base = KINDS[kind][2]
    async with listening(server) as url:
        for report in (
            await examine_urls([url], None, TimeLimits()), await examine_config(config(kind, url), TimeLimits())
        ):
            assert report.verdict is Verdict.UNUSABLE
        assert "set it to policy to train that adapter" in report.servers[0].findings[-1].sentence
        report = await examine_config(config(kind, url, model="policy"), TimeLimits())
        (weights,) = [f for f in report.all if f.subject == "new weights"]
        assert report.servers[0].model == "policy"
        assert weights.level is Level.LIMITED
        assert weights.advice.startswith("load a new adapter") or kind == "openai"
        report = await examine_config(config(kind, url, model=base), TimeLimits())
        assert report.verdict is not Verdict.UNUSABLE
        assert any("none of its adapters (policy)" in limit.sentence for limit in report.servers[0].limits)
