"""A server that repeats its key finds no way into an exception, a log or doctor's report."""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import json
import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from raw_servers import http, raw_server
from responses import openai_reader, sglang_reader, vllm_reader
from rich.console import Console

import april
from april.doctor.examine import TimeLimits, examine_urls
from april.doctor.run import show
from april.engines.http.http_client import HttpClient
from april.engines.http.response_reader import ResponseReader
from april.engines.http.weight_labels import WeightLabels
from april.engines.sglang.wire import rid_of
from april.errors import EngineError

KEY = "sk-CANARY-77aa"
IDS = "31337, 41414, 51515"
HEADER = f"Bearer {KEY}".encode()


def leaks(text: str) -> bool:
    return "canary" in text.casefold() or IDS in text


ANSWERS: dict[str, bytes] = {
    "in the text": http(500, {"error": {"message": f"refused {KEY}"}}),
    "escaped in the text": http(500, b'{"error": "' + b"".join(b"\\u%04x" % c for c in HEADER) + b'"}'),
    "behind the cut": http(500, b"." * 290 + HEADER),
    "as a status": b"HTTP/1.1 " + HEADER + b"\r\n\r\n",
    "as a reason": b"HTTP/1.1 500 " + HEADER + b"\r\nContent-Length: 0\r\n\r\n",
    "in place of a header": b"HTTP/1.1 200 OK\r\nbroken " + HEADER + b"\r\n\r\n",
    "as a length": b"HTTP/1.1 200 OK\r\ncontent-length: " + HEADER + b"\r\n\r\n",
    "as an encoding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: " + HEADER + b"\r\n\r\n5\r\n",
    "as the size of a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + HEADER + b"\r\n",
    "in half a head": b"HTTP/1.1 200 OK\r\nX: " + HEADER + b"\r\n",
    "in half a body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99\r\n" + HEADER,
    "as the place of a redirect": http(307, b"", f"Location: http://h/{KEY}"),
    "as the content": http(200, HEADER),
    "token ids in place of a status": f'{{"token_ids": [{IDS}]}}\r\n\r\n'.encode(),
}


@pytest.mark.parametrize("way", ["call", "json", "stream"])
@pytest.mark.parametrize("where", ANSWERS)
def test_http(where: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the exception, nor in those that it came from, nor in what any library logs."""
    caplog.set_level(logging.DEBUG)

    async def ask(client: HttpClient) -> None:
        if way == "call":
            client.require_ok(await client.call("GET", "/x"), "/x")
        elif way == "json":
            await client.json("GET", "/x")
        else:
            body = await client.post("/x", b"{}")
            try:
                while await body.read():
                    pass
            finally:
                body.close()

    async def program(url: str) -> str:
        client = HttpClient(url, name="one", api_key=KEY)
        assert not leaks(repr(client))
        try:
            await ask(client)
        except EngineError as error:
            logging.getLogger("test").exception("failed")
            return "".join(traceback.format_exception(error))
        finally:
            await client.close()
            gc.collect()
        return ""

    with raw_server(lambda path: ANSWERS[where]) as server:
        told = asyncio.run(program(server.url))
        assert f"\r\nAuthorization: Bearer {KEY}\r\n" in server.heads[0]
    assert told or where in ("as the content", "as an encoding")
    assert not leaks(told)
    assert not leaks(caplog.text)


NEWS = {"error": {"message": f"refused {KEY}", "code": 500}}
SPAN = {"version": KEY, "start": 0, "end": 1}
ONE_TOKEN = {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}
SGLANG = partial(sglang_reader, incremental=False)
SAID: dict[str, tuple[Callable[[], object], object]] = {
    "vllm, error": (vllm_reader, NEWS),
    "vllm, message": (vllm_reader, {"message": KEY}),
    "vllm, reason": (vllm_reader, {"choices": [ONE_TOKEN | {"finish_reason": KEY}]}),
    "vllm, label": (
        lambda: vllm_reader(WeightLabels()),
        {"choices": [ONE_TOKEN | {"finish_reason": "stop", "weight_versions": [SPAN]}]},
    ),
    "vllm, wrong type": (openai_reader, {"choices": [{"token_ids": KEY}]}),
    "sglang, error": (SGLANG, NEWS),
    "sglang, id": (SGLANG, {"meta_info": {"id": KEY}}),
    "sglang, reason": (SGLANG, {"meta_info": {"id": rid_of("a"), "finish_reason": {"type": KEY}}}),
    "sglang, message": (SGLANG, {"meta_info": {
        "id": rid_of("a"), "finish_reason": {"type": "abort", "status_code": 500, "message": KEY},
    }}),
    "sglang, label": (
        lambda: SGLANG(labels=WeightLabels()),
        {"output_ids": [5], "meta_info": {"id": rid_of("a"), "finish_reason": {"type": "stop"}, "completion_tokens": 1,
         "output_token_logprobs": [[-1.0, 5]], "weight_version": KEY}},
    ),
    "openai, error": (openai_reader, NEWS),
    "openai, reason": (openai_reader, {"choices": [{"finish_reason": KEY}]}),
    "openai, token": (openai_reader, {"choices": [{"token_ids": [KEY], "logprobs": {"token_logprobs": [-1.0]}}]}),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_answers_with_status_200(what: str) -> None:
    """Errors and names inside of answers and events."""
    april.text.server_text.hide(KEY)  # as a client does
    reader, payload = SAID[what][0](), json.dumps(SAID[what][1]).encode()
    assert isinstance(reader, ResponseReader)
    reader.read([payload])
    error = reader.failure
    assert error is not None
    assert not leaks("".join(traceback.format_exception(error)))


CARD = {"id": f"tiny {KEY}", "owned_by": "vllm", "max_model_len": 4096, "root": KEY}
DOCTORED: dict[str, dict[str, bytes]] = {
    "version": {"/version": http(200, {"version": KEY * 1000}), "/v1/models": http(200, {"data": [CARD]})},
    "models": {"/v1/models": http(200, {"data": [CARD, CARD | {"id": KEY, "root": "b"}]}),
               "/version": http(200, {"version": "1"})},
    "workers": {"/workers": http(200, {"workers": [{"url": f"http://{KEY}:1"}]})},
    "pause": {"/version": http(200, {"version": "1"}), "/v1/models": http(200, {"data": [CARD]}),
              "/is_paused": http(200, {"is_paused": True, "why": KEY})},
    "sglang": {"/model_info": http(200, {"model_path": KEY}), "/server_info": http(500, HEADER)},
}  # fmt: skip


@pytest.mark.parametrize("what", [*DOCTORED, *ANSWERS])
def test_doctor(what: str) -> None:
    """Nor in its report, nor in its JSON."""
    routes = DOCTORED.get(what)
    patience = TimeLimits(60.0, 60.0)
    with raw_server(lambda path: ANSWERS[what] if routes is None else routes.get(path, http(404))) as server:
        report = asyncio.run(examine_urls([server.url], KEY, patience))
    out = io.StringIO()
    show(report, Console(file=out, width=1000))
    assert report.servers[0].findings
    assert not leaks(out.getvalue())
    assert not leaks(json.dumps(report.as_dict()))


# ---------------------------------------------------------------- that it stays so

HOUSE = Path(april.__file__).parent
LOCAL = {"transformers", "simulated"}
"""They speak with no server."""
PLACES = [p for p in [*HOUSE.glob("engines/**/*.py"), *HOUSE.glob("doctor/*.py"), HOUSE / "adapters/slime/servers.py"]
          if p.parent.name not in LOCAL]  # fmt: skip
OWN = {name for name in dir(april.errors) if name.endswith(("Error", "Busy", "Refused", "Unreachable"))}
OWN |= {"NotJson", "InvalidRows"}
SHOWN = {"clean", "quoted", "error_text", "type", "len"}
RAW = {"body", "headers", "reason", "message", "finish_reason"}


@pytest.mark.parametrize("path", PLACES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_texts_of_servers_go_one_way(path: Path) -> None:
    """No JSON is read past ``read_json``, and raw text and foreign exceptions get into sentences by ``clean`` alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrong = [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree) if _reads(node)]
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name]
    foreign = {name for handler in handlers if not _own(handler) for name in _uses(handler)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):
            wrong += [f"line {node.lineno}: {ast.unparse(n)}" for n in _bare(node.value) if n in foreign or _raw(n)]
    assert not wrong, "pass what servers say through clean()"


def _reads(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return ast.unparse(node.func) in ("msgspec.json.decode", "json.loads") and "read_text" not in ast.unparse(node)


def _own(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(ast.unparse(kind) in OWN for kind in kinds if kind is not None)


def _uses(handler: ast.ExceptHandler) -> list[ast.AST]:
    return [n for n in ast.walk(handler) if isinstance(n, ast.Name) and n.id == handler.name]


def _bare(node: ast.AST) -> list[ast.AST]:
    """The parts of an expression that no function makes fit to be shown."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWN:
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _bare(child))]


def _raw(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in RAW
