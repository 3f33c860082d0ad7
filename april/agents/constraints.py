"""Reads which form a client demands of an answer (tool calls, or JSON that matches a schema), and checks answers.

The setting ``constraints`` decides what april does with a demand. Engines get it as a *grammar*: JSON text of
``{"json_schema": schema}`` or ``{"structural_tag": tag}``, the two formats that vLLM and SGLang share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from april.agents.chat import Answer, Constraint, RequestError, Tools

if TYPE_CHECKING:
    from april.agents.chat_template import CallFormat

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema for a response format of type ``json_object``."""


def is_kept(constraint: Constraint, answer: Answer) -> bool:
    """Return whether the answer has the demanded form. Patterns in a schema, and schemas that are wrong, match all."""
    if answer.finish == "length":
        return False
    if constraint.tools:
        return bool(answer.tool_calls) and all(call.name in constraint.tools for call in answer.tool_calls)
    if answer.tool_calls:
        return True
    try:
        value = json.loads(answer.text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    # a regular expression of a client could keep the event loop for hours, and a reference would be looked up elsewhere
    validator = validators.extend(Draft202012Validator, {"pattern": lambda *_: ()})  # type: ignore[no-untyped-call]
    try:
        return bool(validator(constraint.schema, registry=Registry()).is_valid(value))
    except Exception:
        return True  # the schema itself is wrong


def grammar_of(constraint: Constraint, tools: Tools, call_format: CallFormat | None) -> str:
    """Return the grammar that makes an engine generate an answer of the demanded form.

    ``call_format`` is how the model's template writes a tool call; None if it does not write the arguments as JSON.
    With None, RequestError is raised for a request with tools, because no grammar could describe their calls.
    """
    names = constraint.tools or tuple(tool["function"]["name"] for tool in tools)
    if not names:
        return json.dumps({"json_schema": constraint.schema})
    if call_format is None:
        raise RequestError(
            "tool_choice: the model's chat template does not write the arguments of a call as one JSON object, so "
            "april cannot make the model call a tool; leave it out, or set constraints: hint"
        )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    forms = [call_format.form(name, schemas[name] or ANY_OBJECT) for name in names]
    if not constraint.tools:
        forms.append({"type": "json_schema", "json_schema": constraint.schema})
    form = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    return json.dumps({"structural_tag": {"type": "structural_tag", "format": form}})


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def read_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the tools to show to the model, and the names of tools of which it must call one (empty if it need not).

    Accepts ``choice`` in every API's format. Raises RequestError for other formats, and for tools not in ``tools``.
    """
    given: dict[str, Any] = {"type": choice} if isinstance(choice, str) else dict(choice or {"type": "auto"})
    kind, known = given.get("type"), [tool["function"]["name"] for tool in tools]
    if isinstance(nested := given.get(str(kind)), dict):
        given = nested  # chat completions nest the other fields in a field that is named like the type
    match kind:
        case "auto":
            return tools, ()
        case "none":
            return [], ()
        case "required" | "any":
            named = known
        case "function" | "tool":
            named = [given.get("name")]
        case "allowed_tools":
            listed = given.get("tools")
            allowed = [_name_of(one) for one in listed] if isinstance(listed, list) else []
            if given.get("mode") != "required":
                return tools, ()
            named = allowed
        case _:
            raise RequestError(f"tool_choice: {kind!r:.100} is not supported; tools are functions of the client")
    unknown = [name for name in named if name not in known]
    if unknown or not named:
        raise RequestError(f"tool_choice demands a tool that is not in tools: {unknown or 'tools is empty'!r:.100}")
    return tools, tuple(named)


def _name_of(tool: Any) -> Any:
    """Return the name of a tool definition in any API's format; None if it has no name."""
    given = tool if isinstance(tool, Mapping) else {}
    function = given.get("function")
    return given.get("name") or (function.get("name") if isinstance(function, Mapping) else None)


def read_format(given: Any, field: str) -> Any:
    """Return the JSON schema that a ``response_format`` demands; None for plain text. Raises RequestError."""
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"{field} must be an object, got {given!r:.100}")
    match (given or {}).get("type", "text"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            inner = given.get("json_schema", given) if given else {}
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if not isinstance(schema, Mapping):
                raise RequestError(f"{field} has no schema; json_schema needs one that is an object")
            return schema
        case kind:
            raise RequestError(f"{field}: {kind!r:.100} is not supported, only text, json_object and json_schema")
