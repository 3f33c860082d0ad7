"""Servers with the OpenAI completions route and no more.

Greedy tokens are those of every fake server; others follow from the seed too, where it is honoured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from april.core.sampling import LogprobKind

from .vllm import FakeVllmRun, FakeVllmServer

MODEL = "fake"


@dataclass(slots=True, eq=False)
class CompletionRun(FakeVllmRun):
    """One request; ``ahead`` tokens of it are made and not sent, at any time."""

    ahead: int = 0

    def flush(self) -> None:
        """All that was made leaves at the end only."""
        FakeVllmRun.flush(self)
        if self.finish is None:
            self.flushed = max(self.sent, len(self.ids) - self.ahead)


class FakeOpenAIServer(FakeVllmServer):
    """Args:
    gives_ids: it returns the ids of tokens.
    says_context: its list of models has the length of its context.
    kind: of which distribution the log-probabilities are.
    tokens_ahead: how many tokens it has made and not sent, at any time.
    strips: ids that it keeps back when they end a response.
    honours_seeds: another seed gives other tokens; if not, none is looked at.
    owner: ``owned_by`` of its models.
    common: of :class:`FakeVllmServer`.
    """

    RUN: ClassVar[type[FakeVllmRun]] = CompletionRun

    def __init__(
        self, *, gives_ids: bool = True, says_context: bool = True, kind: LogprobKind = LogprobKind.RAW,
        tokens_ahead: int = 0, strips: frozenset[int] = frozenset(), honours_seeds: bool = True,
        owner: str | None = None, without: tuple[str, ...] = ("/version",), **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(developer=False, scale_out=False, logprobs=kind.value, without=without, **common)
        self.gives_ids, self.says_context, self.tokens_ahead = gives_ids, says_context, tokens_ahead
        self.strips, self.owner = strips, owner
        self.honours_seeds = honours_seeds

    @property
    def unread_tokens(self) -> int:
        """Made for requests whose client closed the stream, and never sent."""
        return sum(len(run.ids) - run.sent for run in self.runs if run.finish is None)

    def _run_of(self, body: dict[str, Any], token_route: bool, header: str | None) -> FakeVllmRun:
        run = super()._run_of(body, token_route, header)
        assert isinstance(run, CompletionRun)
        run.ahead = self.tokens_ahead
        drawn = body["temperature"] and body["top_k"] != 1 and body.get("seed") is not None
        run.salt = f"/{body['seed']}" if drawn and self.honours_seeds else ""
        return run

    def _make_token(self, run: FakeVllmRun) -> None:
        forced = [int(i) for i, bias in (run.params.get("logit_bias") or {}).items() if bias > 50]
        super()._make_token(run)
        if forced:
            run.ids[-1] = forced[0]
            run.finish = run.stopped() if forced[0] == self.eos else run.finish

    def _kept_back(self, run: FakeVllmRun) -> bool:
        """Whether the token that ended the request is not in its answer."""
        return run.ids[-1] in self.strips

    def _shaped(self, run: FakeVllmRun, said: dict[str, Any]) -> dict[str, Any]:
        (choice,) = said["choices"]
        body, ids, scored = run.params, choice.pop("token_ids"), choice.pop("logprobs")
        if choice["finish_reason"] == "stop" and ids and self._kept_back(run):
            ids, scored = ids[:-1], {name: values[:-1] for name, values in scored.items()}
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs") is not None:
            choice["logprobs"] = scored
        return said

    async def _models(self, request: web.Request) -> web.Response:
        card: dict[str, Any] = {"id": self.model, "object": "model", "owned_by": self.owner}
        if self.says_context:
            card["max_model_len"] = self.context
        adapters = [card | {"id": a, "parent": self.model} for a in self.adapters]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    def _refusal(self, body: dict[str, Any], token_route: bool) -> web.Response | None:
        model = body["model"].rpartition(":")[2]  # SGLang has adapters under "base:adapter"
        return super()._refusal(body | {"model": model}, token_route)
