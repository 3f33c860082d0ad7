"""The agents of a process's samples: the server of their endpoints, ``llm.chat``, and the way to the driver."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from april.agents.chat import ALIVE_S, COMMIT_S
from april.core.attachments import Placed
from april.core.tape import Int32
from april.driver.llm import Completion, Door, Sheltered
from april.errors import ConfigError

if TYPE_CHECKING:
    from april.agents.endpoint import Endpoint, Place
    from april.agents.session import Chat, Generate, Session
    from april.agents.template import Template
    from april.images.placing import Images


OPTIONS = ("renderer", "commit_s", "alive_s")
"""Arguments of the scheduler and of hosts that are this one's."""


@dataclass(slots=True)
class Gateway:
    """Serves an endpoint for each sample that asks for one; the server starts with the first.

    Args:
        tokenizer: the model's; None means that clients can give token ids only.
        renderer: a ``renderers.RendererConfig``; None means the one for the tokenizer.
        commit_s: see COMMIT_S.
        alive_s: see ALIVE_S.
        images: reads the images of messages; None means that they are refused.

    Raises ConfigError for a renderer without a tokenizer, or times out of range.
    """

    tokenizer: Any = None
    renderer: Any = None
    commit_s: float = COMMIT_S
    alive_s: float = ALIVE_S
    images: Images | None = None
    _endpoint: Endpoint | None = None
    _template: Template | None = None

    def __post_init__(self) -> None:
        if self.renderer is not None and self.tokenizer is None:
            raise ConfigError("renderer= writes messages for llm.base_url, which needs tokenizer=, too")
        for name, least in (("commit_s", "from 0 on"), ("alive_s", "above 0")):
            seconds = getattr(self, name)
            number = isinstance(seconds, Real) and not isinstance(seconds, bool) and math.isfinite(seconds)
            if not number or seconds < 0 or (seconds == 0 and name == "alive_s"):
                raise ConfigError(f"{name} must be a number of seconds {least}, got {seconds!r}")

    def open(self, behind: Sheltered, place: Place | None = None) -> Door:
        """Serve one more sample; ``place``: on another server than that of this process."""
        from april.agents.endpoint import Place  # a web server, loaded by who asks for one

        ask = self._asks(behind)

        async def ask_there(
            ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
        ) -> Completion:
            asking = asyncio.run_coroutine_threadsafe(ask(ids, changes, attached), behind.loop)
            return await asyncio.wrap_future(asking)

        session = self._session(ask_there, behind, strangers=True)
        return (Place(self._served()) if place is None else place).open(session)

    def chat(self, behind: Sheltered) -> Chat:
        """What ``llm.chat`` of one more sample asks, on the running loop: a session without a server."""
        from april.agents.session import Chat

        return Chat(self._session(self._asks(behind), behind, strangers=False))

    @staticmethod
    def _asks(behind: Sheltered) -> Callable[..., Coroutine[Any, Any, Completion]]:
        async def ask(ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None) -> Completion:
            plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
            return await behind.generate(replace(behind.sampling, **plain), ids, attached=attached)

        return ask

    def _session(self, generate: Generate, behind: Sheltered, *, strangers: bool) -> Session:
        """``strangers``: what asks is a client, which may name no files."""
        from april.agents.session import Session
        from april.agents.sight import Sight
        from april.agents.template import Template  # needs a package that most do not

        if self.tokenizer is not None and self._template is None:
            self._template = Template(self.tokenizer, self.renderer, self.images)
        sight = None
        if self.images is not None:
            reader = self.images.reader.strangers() if strangers else self.images.reader
            sight = Sight(self.images, reader, behind.prompt)
        return Session(generate, self._template, behind.max_context, behind.answered, sight)

    def _served(self) -> Endpoint:
        """This process's own server, which is started if it was not."""
        from april.agents.endpoint import Endpoint

        if self._endpoint is None:
            endpoint = Endpoint(commit_s=self.commit_s, alive_s=self.alive_s)
            endpoint.start()
            self._endpoint = endpoint
        return self._endpoint

    def shut(self, door: Any) -> Iterable[int]:
        """Answer nothing of this sample any more; returns the numbers of calls whose answers a client has heard."""
        return door.endpoint.shut(door, "its rollout function has ended")  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the server."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()
