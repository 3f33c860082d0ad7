"""What a client demands of the form of an answer, and what becomes of every field of a request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_fixtures import request

import april
from april.agents.chat import Answer, Constraint, RequestError, ToolCall
from april.agents.chat_template import ChatTemplate
from april.agents.client_fields import BY_ROUTE, EVERY, FIELDS, Rule
from april.agents.constraints import grammar_of, is_kept
from april.agents.endpoint import ROUTES
from april.engines.openai import wire as openai
from april.engines.sglang import wire as sglang
from april.engines.vllm import wire as vllm
from april.testing import FakeEngine
from tests.gateway_suite.script import EOS, MARKS, TOKENIZER, TOOL, VOCAB

renderers = pytest.importorskip("renderers")
GO = [{"role": "user", "content": "go"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"type": "function", "function": TOOL}
OTHER = {"type": "function", "function": {"name": "sub"}}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": GO, "tools": [FUNCTION, OTHER]},
    "/completions": {"prompt": "go"},
    "/responses": {"input": GO, "tools": [{"type": "function", **TOOL}, {"type": "function", "name": "sub"}]},
    "/messages": {
        "messages": GO, "max_tokens": 50,
        "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}, {"name": "sub", "input_schema": {}}],
    },
}  # fmt: skip
NAMED: dict[str, Any] = {"schema": SCHEMA, "name": "n", "strict": True}
SHAPE = {"type": "json_schema", "json_schema": NAMED}


def read(route: str, **fields: Any) -> Any:
    """What april makes of a request with these fields."""
    return ROUTES[route].read(json.loads(json.dumps(BODIES[route] | fields)))


# ---------------------------------------------------------------- every field


@pytest.mark.parametrize(("route", "name"), [(route, name) for route in EVERY for name in BY_ROUTE[route]])
def test_every_field_does_what_the_table_says(route: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is ignored is named once in the debug log, and changes nothing; what is refused names the field."""
    row, plain = BY_ROUTE[route][name], read(route)
    if row.rule is Rule.IGNORED:
        with caplog.at_level(logging.DEBUG, "april"):
            assert [read(route, **{name: value}) for value in ({"any": 1}, "thing")] == [plain, plain]
        assert sum(f"clients give {name}," in r.getMessage() for r in caplog.records) <= 1
    elif row.rule is Rule.REFUSED:
        with pytest.raises(RequestError, match=f"^{name}=.*{row.why}"):
            read(route, **{name: "something else"})
        if name in row.neutral:
            assert read(route, **{name: row.neutral[name]}) == plain
    elif row.rule is Rule.PLAN:
        assert read(route, **{name: 0.5}).sampling == plain.sampling | {name: 0.5}
    else:  # its reader takes it, and wants a value of its own type
        with pytest.raises(RequestError, match=name):
            read(route, **{name: 0.5})


def table_of_fields() -> list[str]:
    """Return the lines of the table in docs/agents.md."""
    lines = ["| field | of | what becomes of it |", "|---|---|---|"]
    for row in FIELDS:
        names, routes = ", ".join(f"`{name}`" for name in row.names), ", ".join(row.routes)
        of = "all" if row.routes == EVERY else routes
        rule = f"{row.rule}: {row.why}"
        if row.neutral:
            rule += f"; accepted: {', '.join(f'`{json.dumps(value)}`' for value in row.neutral.values())}"
        lines.append(f"| {names} | {of} | {rule} |")
    return lines


def test_the_page_has_the_table_of_fields() -> None:
    page = (Path(__file__).parent.parent / "docs" / "agents.md").read_text("utf-8")
    assert "\n".join(table_of_fields()) in page


# ---------------------------------------------------------------- what is demanded


@pytest.mark.parametrize(
    ("route", "fields", "demanded"),
    [
        ("/chat/completions", {"tool_choice": "auto"}, None),
        ("/chat/completions", {"tool_choice": "required"}, Constraint(("add", "sub"))),
        ("/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, Constraint(("sub",))),
        ("/chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}}}, Constraint(("add",))),
        ("/chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}}}, None),
        ("/chat/completions", {"response_format": {"type": "text"}}, None),
        ("/chat/completions", {"response_format": {"type": "json_object"}}, Constraint((), {"type": "object"})),
        ("/chat/completions", {"response_format": SHAPE}, Constraint((), SCHEMA)),
        ("/completions", {"response_format": SHAPE}, Constraint((), SCHEMA)),
        ("/responses", {"tool_choice": "required"}, Constraint(("add", "sub"))),
        ("/responses", {"tool_choice": {"type": "function", "name": "add"}}, Constraint(("add",))),
        ("/responses", {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "sub"}]}}, Constraint(("sub",))),
        ("/responses", {"text": {"format": {"type": "json_schema", **NAMED}}}, Constraint((), SCHEMA)),
        ("/messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, None),
        ("/messages", {"tool_choice": {"type": "any"}}, Constraint(("add", "sub"))),
        ("/messages", {"tool_choice": {"type": "tool", "name": "sub"}}, Constraint(("sub",))),
        ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
         Constraint((), SCHEMA)),
    ],
)  # fmt: skip
def test_a_demand_means_the_same_in_all_dialects(route: str, fields: Any, demanded: Any) -> None:
    """Tools that must be called, and JSON that the text must be."""
    assert read(route, **fields).constraint == demanded


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert read("/messages", tool_choice={"type": "none"}).tools == []


# ---------------------------------------------------------------- what keeps it


def answer(text: str = "", *calls: str, finish: Any = "stop") -> Answer:
    """One with this text and calls of these tools."""
    tools, none = tuple(ToolCall("1", name, "{}") for name in calls), None
    return Answer(
        id="", prompt_ids=none, tokens=none, logprobs=none, text=text, reasoning="", tool_calls=tools, finish=finish  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "given", "kept"),
    [
        (Constraint(("add",)), answer("", "add"), True),
        (Constraint(("add",)), answer("", "sub"), False),
        (Constraint(("add",)), answer("no"), False),
        (Constraint((), SCHEMA), answer('{"a": 1}'), True),
        (Constraint((), SCHEMA), answer('{"a": 1}', finish="length"), False),
        (Constraint((), SCHEMA), answer("Sure: {}"), False),
        (Constraint((), {"type": "number"}), answer("NaN"), False),
        (Constraint((), SCHEMA), answer("", "add"), True),  # a client that gives tools takes a call, too
        (Constraint((), {"$ref": "#"}), answer("1"), True),  # what april cannot judge is not counted against the model
        (Constraint((), {"minLength": "x"}), answer('"a"'), True),
        (Constraint((), {"$ref": "https://example.com/schema"}), answer("1"), True),
        (Constraint((), {"pattern": "^(a+)+$"}), answer(json.dumps("a" * 64 + "b")), True),
        (Constraint((), SCHEMA), answer('{"a": 1, "b": 2}'), False),
        (Constraint((), {"oneOf": [{"type": "number"}, {"type": "integer"}]}), answer("1"), False),
    ],
)  # fmt: skip
def test_what_keeps_a_demand(constraint: Constraint, given: Answer, kept: bool) -> None:
    """Calls by name, text by schema; an answer that was cut has no form."""
    assert is_kept(constraint, given) is kept


def test_a_grammar_is_what_the_template_writes() -> None:
    """A call stands in the template's own marks, each of them one token, as the model writes and reads calls."""
    template = ChatTemplate(TOKENIZER, renderers.Qwen3RendererConfig(enable_thinking=False))
    tools = [FUNCTION, OTHER]
    call = {"type": "sequence", "elements": [
        {"type": "token", "token": MARKS.index("<tool_call>")},
        {"type": "const_string", "value": '\n{"name": "add", "arguments": '},
        {"type": "json_schema", "json_schema": TOOL["parameters"]},
        {"type": "const_string", "value": "}\n"},
        {"type": "token", "token": MARKS.index("</tool_call>")},
    ]}  # fmt: skip
    form = template.call_format(tools)
    assert json.loads(grammar_of(Constraint(("add",)), tools, form))["structural_tag"]["format"] == call
    several = json.loads(grammar_of(Constraint((), SCHEMA), tools, form))["structural_tag"]["format"]
    text = {"type": "json_schema", "json_schema": SCHEMA}
    assert several["elements"] == [call, form.form("sub", {"type": "object"}), text]
    assert json.loads(grammar_of(Constraint((), SCHEMA), [], None)) == {"json_schema": SCHEMA}
    with pytest.raises(RequestError, match="constraints: hint"):
        grammar_of(Constraint(("add",)), tools, None)


@pytest.mark.parametrize(
    ("form", "in_vllm", "in_sglang"),
    [
        ({"json_schema": SCHEMA}, {"json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"structural_tag": {"format": {}}}, {"structural_tag": {"format": {}}}, {"structural_tag": {"format": {}}}),
    ],
)
def test_engines_get_a_grammar_in_their_own_words(form: Any, in_vllm: Any, in_sglang: Any) -> None:
    """vLLM in ``structured_outputs``, on both of its routes, SGLang among its sampling parameters."""
    asked, plain = request(grammar=json.dumps(form)), request()

    def parsed(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: json.loads(value) if isinstance(value, str) else value for name, value in fields.items()}

    how: dict[str, Any] = {"stream": False, "priority": False, "salt": ""}
    for body_of in (
        lambda one: vllm.request_body("m", one, **how),
        lambda one: openai.completion_body("m", one),  # for a plain vLLM
    ):
        bodies = [json.loads(body_of(one)) for one in (asked, plain)]
        with_one, without = (body.get("sampling_params", body) for body in bodies)
        assert parsed(with_one["structured_outputs"]) == in_vllm
        assert "structured_outputs" not in without
    how = {"stream": False, "stream_interval": None, "seed": None, "salt": ""}
    with_one, without = (json.loads(sglang.request_body(one, **how))["sampling_params"] for one in (asked, plain))
    assert parsed({name: with_one[name] for name in with_one.keys() - without.keys()}) == in_sglang


# ---------------------------------------------------------------- the setting


def run(engine: FakeEngine, setting: str, **more: Any) -> tuple[april.Batch, list[int]]:
    """One batch of two samples, of which each asks for JSON and then for a call; and the status of each answer."""
    found: list[int] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        for fields in ({"response_format": SHAPE}, {"tool_choice": "required"}):
            async with (
                aiohttp.ClientSession(headers={"x-api-key": llm.api_key}) as client,
                client.post(llm.base_url + "/chat/completions", json=BODIES["/chat/completions"] | fields) as response,
            ):
                found.append(response.status)
                text = await response.text()
                assert response.status == 200 or "constraints: refuse" in text
        await llm.generate([20], any_conversation=True)

    values = {"rollout_batch_size": 2, "n_samples_per_prompt": 1, "max_response_len": 90, "over_sampling_batch_size": 2}
    with april.RolloutScheduler(
        april.Config(**values, constraints=setting, **more), prompts=[{"token_ids": [20 + i]} for i in range(2)],
        rollout=rollout, reward=lambda p, r: 1.0, engines=[engine], tokenizer=TOKENIZER,
        renderer=renderers.Qwen3RendererConfig(enable_thinking=False), progress=False,
    ) as scheduler:  # fmt: skip
        return scheduler.next_batch(), found


def writes(asked: Any) -> list[int]:
    """The tokens of an engine that honours grammars, and that otherwise writes prose."""
    grammar = asked.sampling.grammar
    text = "well, no" if not grammar else '{"a": 1}' if "json_schema" in json.loads(grammar) else ""
    if grammar and not text:
        parts = json.loads(grammar)["structural_tag"]["format"]["elements"][0]["elements"]
        text = "".join(MARKS[p["token"]] if "token" in p else p.get("value", '{"a": 1}') for p in parts)
    return [*TOKENIZER.encode(text), EOS]


def engine() -> FakeEngine:
    """One whose tokens a tokenizer reads."""
    return FakeEngine("e", vocab_size=VOCAB, eos_token_id=EOS, seconds_per_token=1e-4, responses=writes)


@pytest.mark.parametrize(("setting", "broken", "status"), [("hint", 4, 200), ("enforce", 0, 200), ("refuse", 0, 400)])
def test_constraints(setting: str, broken: int, status: int) -> None:
    """A hint reaches no engine, and is counted where it was of no use; what is enforced says so at every token."""
    e = engine()
    batch, found = run(e, setting, allow_mismatch=setting == "enforce")
    asked = [json.loads(a.request.sampling.grammar or "null") for a in e.attempts.values()]
    assert found == [status] * 4
    assert sum(a is not None for a in asked) == (4 if setting == "enforce" else 0)
    assert (batch.metrics["constrained_answers"], batch.metrics["broken_constraints"]) == (
        (0 if setting == "refuse" else 4), broken
    )  # fmt: skip
    for row, mask in zip(batch.samples, batch.padded()["constrained_mask"], strict=True):
        demanded = setting == "enforce" and len(row.prompt.token_ids) > 1  # the last call of a sample demands nothing
        assert mask[: len(row.tokens)].tolist() == [demanded] * len(row.tokens)


@pytest.mark.parametrize(
    ("engines", "more", "says"),
    [
        (FakeEngine("e", vocab_size=VOCAB), {"allow_mismatch": True}, "engine e cannot restrict its tokens"),
        (engine(), {}, "constraints=enforce lets a grammar"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_before_anything_starts(engines: Any, more: Any, says: str) -> None:
    """An engine without grammars, and a trainer that recomputes other log-probabilities."""
    with pytest.raises(april.ConfigError, match=says):
        run(engines, "enforce", **more)
