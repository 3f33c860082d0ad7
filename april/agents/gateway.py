"""Connects agents to the policy: opens HTTP endpoints for samples and answers ``llm.chat``, using the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from april.agents.chat import COMMIT_S, DISTRIBUTION, KEEPALIVE_S, RequestError
from april.config.agents import AgentsConfig
from april.core.attachments import Placed
from april.core.tape import Int32
from april.driver.llm import ClientEndpoint, Completion, EndpointSample
from april.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from april.agents.chat_template import ChatTemplate
    from april.agents.endpoint import Endpoint
    from april.agents.session import FunctionChat, GenerateFunction, Session
    from april.images.image_placer import ImagePlacer

log = logging.getLogger("april")
RENDERERS = "renderers"
"""Package that converts messages to tokens."""


@dataclass(slots=True)
class Gateway:
    """Serves an endpoint for each sample that asks for one; the server starts with the first endpoint.

    Args:
        tokenizer: tokenizer of the model; None means that clients can send only token ids.
        renderer: a ``renderers.RendererConfig``; None means the one for the tokenizer.
        commit_s, alive_s: see :class:`~april.agents.endpoint.Endpoint`.
        images: places the images of messages; None means that images are refused.

    Raises ConfigError for a renderer without a tokenizer.
    """

    tokenizer: Any = None
    renderer: Any = None
    commit_s: float = COMMIT_S
    alive_s: float = KEEPALIVE_S
    images: ImagePlacer | None = None
    config: AgentsConfig = field(default_factory=AgentsConfig)
    sampling_of_clients: str = "plan"
    constraints: str = "hint"
    _endpoint: Endpoint | None = None
    _template: ChatTemplate | None = None
    _warned: bool = False
    """True once the user was warned that a client asked for another sampling distribution."""

    def __post_init__(self) -> None:
        if self.renderer is not None and self.tokenizer is None:
            raise ConfigError("renderer= is for llm.base_url, which also needs tokenizer=")

    def load(self) -> None:
        """Import the modules that ``llm.base_url`` and ``llm.chat`` need; a later import would block the event loop."""
        names = [f"april.agents.{name}" for name in ("endpoint", "session", "message_images", "chat_template")]
        if self.tokenizer is not None and find_spec(RENDERERS) is not None:
            names.append(RENDERERS)  # this package imports all types of openai, which takes a second or two
        for name in names:
            import_module(name)

    def open(
        self, sample: EndpointSample, serve: Callable[[Session], ClientEndpoint] | None = None
    ) -> ClientEndpoint:
        """Open a sample's endpoint at the server that ``serve`` belongs to; None means this process's own server."""
        generate = self._generator(sample, from_clients=True)

        async def generate_on_driver_loop(
            ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
        ) -> Completion:
            future = asyncio.run_coroutine_threadsafe(generate(ids, changes, attached), sample.loop)
            return await asyncio.wrap_future(future)

        session = self._session(generate_on_driver_loop, sample, from_clients=True)
        session.note_checked = lambda kept: sample.loop.call_soon_threadsafe(sample.note_checked, kept)
        return (serve or self._own_endpoint().serve)(session)

    def chat(self, sample: EndpointSample) -> FunctionChat:
        """Return the object that answers ``llm.chat`` of a sample: a session on the running loop, without a server."""
        from april.agents.session import FunctionChat

        generate = self._generator(sample, from_clients=False)
        return FunctionChat(self._session(generate, sample, from_clients=False))

    def _generator(
        self, sample: EndpointSample, *, from_clients: bool
    ) -> Callable[..., Coroutine[Any, Any, Completion]]:
        async def generate(
            ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
        ) -> Completion:
            plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
            other = self._drop_distribution(plain, sample) if from_clients else False
            return await sample.generate(replace(sample.sampling, **plain), ids, attached=attached, overridden=other)

        return generate

    def _drop_distribution(self, changes: dict[str, Any], sample: EndpointSample) -> bool:
        """Remove sampling parameters from a client's ``changes`` if the client may not change the distribution.

        Returns True if a removed parameter would have changed the distribution. Raises RequestError if the client may
        change the distribution, but asks for a parameter that april does not have.
        """
        given = {name: changes.pop(name) for name in DISTRIBUTION if name in changes}
        same = {name: (*neutral, getattr(sample.sampling, name, None)) for name, neutral in DISTRIBUTION.items()}
        same["seed"] = ()  # april seeds each sample, so that a restart samples the same tokens
        other = {name: value for name, value in given.items() if value not in same[name]}
        if self.sampling_of_clients == "client" and not sample.evaluated:
            changes |= {name: other.pop(name) for name in ("temperature", "top_p") if name in other}
            unknown = sorted(other.keys() - {"seed"})
            if unknown:
                raise RequestError(
                    f"{', '.join(unknown)}: with sampling_of_clients: client, april samples as clients ask, but has "
                    "only temperature and top_p; leave these out, or set sampling_of_clients: plan to ignore them"
                )
            return bool(other)
        if other and not self._warned:
            self._warned = True
            log.warning(
                "a client at llm.base_url asks for %s, but april uses the sampling of the configuration (in "
                "evaluations, that of evaluate), temperature=%s and top_p=%s here, for all samples. Remove such "
                "parameters from the client. batch.metrics['overridden_requests'] counts these requests; this warning "
                "appears only once",
                ", ".join(f"{name}={value!r:.40}" for name, value in other.items()),
                sample.sampling.temperature, sample.sampling.top_p,
            )  # fmt: skip
        return bool(other)

    def _session(self, generate: GenerateFunction, sample: EndpointSample, *, from_clients: bool) -> Session:
        """Create a session; ``from_clients`` means that requests come from HTTP clients, which may not name files."""
        from april.agents.chat_template import ChatTemplate  # needs the package renderers, which most users do without
        from april.agents.message_images import MessageImages
        from april.agents.session import Session

        if self.tokenizer is not None and self._template is None:
            self._template = ChatTemplate(self.tokenizer, self.renderer, self.images)
        message_images = None
        if self.images is not None:
            reader = self.images.reader.for_clients() if from_clients else self.images.reader
            message_images = MessageImages(self.images, reader, sample.prompt)
        return Session(
            generate, self._template, sample.max_context, sample.answered, message_images, self.constraints,
            sample.sampling.stop,
        )  # fmt: skip

    def _own_endpoint(self) -> Endpoint:
        from april.agents.endpoint import Endpoint  # loads a web server, so it is imported only for an endpoint

        if self._endpoint is None:
            at = self.config
            endpoint = Endpoint(at.host, at.port, self.commit_s, self.alive_s, at.reached_at, at.clients)
            try:
                endpoint.start()
            except OSError as error:
                raise UsageError(f"agents.host, agents.port: cannot listen on {at.host}:{at.port}: {error}") from error
            self._endpoint = endpoint
        return self._endpoint

    def close_endpoint(self, endpoint: Any) -> Iterable[int]:
        """Stop answering this sample's requests; returns the numbers of calls whose answers a client has received."""
        return endpoint.endpoint.close_session(endpoint, "its rollout function has ended")  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the server."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()
