"""The endpoints of a process's samples: their server, and the way from it to the driver and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from april.core.sampling import SamplingParams
from april.core.tape import Int32
from april.driver.llm import Completion, Door, GenerateFunction

if TYPE_CHECKING:
    from april.agents.endpoint import Endpoint
    from april.agents.template import Template


@dataclass(slots=True)
class Gateway:
    """Serves an endpoint for each sample that asks for one; the server starts with the first.

    Args:
        tokenizer: the model's; None means that clients can give token ids only.
        renderer: a ``renderers.RendererConfig``; None means the one for the tokenizer.
        max_model_len: what ``/v1/models`` says.
        commit_s, alive_s: see :class:`Endpoint`; None means its own.
    """

    tokenizer: Any = None
    renderer: Any = None
    max_model_len: int | None = None
    commit_s: float | None = None
    alive_s: float | None = None
    _endpoint: Endpoint | None = None
    _template: Template | None = None

    def open(self, generate: GenerateFunction, sampling: SamplingParams, loop: asyncio.AbstractEventLoop) -> Door:
        """Serve one more sample; its calls are made on ``loop``."""
        # loaded by who asks for it: a web server, and a package that most do not need
        from april.agents.endpoint import ALIVE_S, COMMIT_S, Endpoint
        from april.agents.session import Session
        from april.agents.template import Template

        if self._endpoint is None:
            if self.tokenizer is not None:
                self._template = Template(self.tokenizer, self.renderer)
            endpoint = Endpoint(
                commit_s=COMMIT_S if self.commit_s is None else self.commit_s,
                alive_s=ALIVE_S if self.alive_s is None else self.alive_s,
                max_model_len=self.max_model_len,
            )
            endpoint.start()
            self._endpoint = endpoint

        async def ask(ids: Int32, changes: Mapping[str, Any]) -> Completion:
            plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
            call = generate(replace(sampling, **plain), ids)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

        return self._endpoint.open(Session(ask, self._template))

    def shut(self, door: Door) -> Iterable[int]:
        """Answer nothing of this sample any more; returns the numbers of calls whose answers no client has heard."""
        if self._endpoint is None:
            return ()
        return self._endpoint.shut(door, "its rollout function has ended")

    def close(self) -> None:
        """End the server."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()
