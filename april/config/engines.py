"""The settings of each kind of engine, and the checks of servers' addresses and keys."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from april.config.mistakes import Mistake, Named, contradiction
from april.config.values import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    one_or_more,
)
from april.errors import ConfigError
from april.server_text import clean, hide, quoted

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - refused here
"""A server that listens on these is reached under its machine's name."""


def checked_url(url: str) -> str:
    """Return the URL of an engine without a trailing slash.

    Raises:
        ConfigError: it is not of the form http(s)://host:port, or its host is no place where a server can be reached;
            the sentence says what to write instead.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # half of the brackets of an IPv6 address
        raise ConfigError(f"an engine's URL must look like http://host:port, got {quoted(_shown(url), 100)}") from None
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        right = False
    if not right or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        instead = clean(_instead(url, parts, right))
        raise ConfigError(f"an engine's URL must look like http://host:port, got {quoted(_shown(url), 100)}{instead}")
    if parts.hostname in _EVERYWHERE:
        port = "" if parts.port is None else f":{parts.port}"
        raise ConfigError(
            f"{parts.hostname} in {quoted(url, 100)} is where a server listens, not where it is reached; write "
            f"{parts.scheme}://127.0.0.1{port} if it is on this machine, or else the name of its machine"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _shown(url: str) -> str:
    """Leave out what may be a secret: a user, a password, a query or a fragment."""
    rest = repr(url)[1:-1].rpartition("@")[2]  # white space at the end is what is wrong with some
    end = min((at for at in map(rest.find, "?#") if at >= 0), default=len(rest))
    return f"{rest[:end]}{rest[end : end + 1]}..." if end < len(rest) else rest


def _instead(url: str, parts: SplitResult, right: bool) -> str:
    """Advise what to write in place of a wrong address; nothing where a part of it may be a secret."""
    if parts.query or parts.fragment or "@" in url:
        return ""
    if "://" not in url:
        host, _, path = url.partition("/")
        beyond = f", without /{path}" if path else ""
        return f"; write http://{host}{beyond}" if ":" in host else f"; write http://{host or 'host'}:PORT{beyond}"
    if right:  # the path
        return f"; write {parts.scheme}://{parts.netloc}, without {parts.path}: april adds the routes"
    return ""


def checked_key(key: str) -> str:
    """Return the key of a server, which no text shows from now on.

    Raises:
        ConfigError: a header cannot hold it; the key is not in the message.
    """
    hide(key)
    if key.strip() != key:
        raise ConfigError("the key of the server begins or ends with white space or a line break; take that away")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the key of the server has characters that no HTTP header can hold (line breaks, control characters, "
            "spaces, or what is not ASCII); was something else copied along with it?"
        )
    return key


class TransformersEngineConfig(Model):
    """The embedded engine: any Hugging Face causal LM in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Directory or hub name. None means the model object that is given to the scheduler."""
    slots: PositiveInt = 64
    """Sequences decoded at the same time."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response. None means what the model's config says."""
    stream_interval: PositiveInt | None = None
    """Tokens per chunk. None means one chunk at the end of a request, or every two tokens where it has stop strings."""


class SimulatedEngineConfig(Model):
    """Engines on virtual or real time with a decode-cost model, for tests and planning."""

    kind: Literal["simulated"] = "simulated"
    count: PositiveInt = 1
    """Number of engines."""
    model: Literal["r1-distill-1.5b", "qwen3-4b", "qwen3-8b"] = "qwen3-4b"
    """Model whose decode cost is simulated."""
    gpu: Literal["h100", "mi300x"] = "h100"
    """GPU whose decode cost is simulated."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    slots: PositiveInt = 256
    """Sequences decoded at the same time, per engine."""
    max_len: PositiveInt = 32768
    """Longest prompt plus response."""
    vocab_size: PositiveInt = 32000
    """Size of the vocabulary."""
    median_len: PositiveFloat = 2500.0
    """Median response length, in tokens."""
    sigma_between: NonNegativeFloat = 0.6
    """Spread of log length between prompts."""
    sigma_within: NonNegativeFloat = 0.5
    """Spread of log length within a prompt."""


THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Hosts in addresses of servers that see this machine's files."""
Url = Annotated[str, AfterValidator(checked_url)]
Urls = Annotated[tuple[Url, ...], BeforeValidator(one_or_more), Field(min_length=1)]


class ServerEngineConfig(Model):
    """Settings that all engines behind HTTP servers have in common."""

    urls: Urls
    """The addresses of the servers, such as http://127.0.0.1:8000; one engine per server."""
    api_key: SecretStr | None = None
    """Sent to the servers as a bearer token; in files better named by api_key_env, and no flag, as those are seen by
    everybody on the machine."""
    api_key_env: str | None = None
    """Environment variable that holds the key, where the servers want one."""
    max_in_flight: PositiveInt | None = None
    """Most requests at one server at the same time, within the max_in_flight of all together. None means what the
    server's memory allows."""
    max_token_loss: NonNegativeInt | None = None
    """Most tokens of one response that may be lost when its server dies. None means what costs least there."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. None means what the server says."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response. None means what the server says."""
    eos_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Ids that end every response. None means what the server says."""
    logprobs: Literal["temperature", "processed", "raw"] | None = None
    """Distribution of the log-probabilities. None means that april finds out by requests of one token."""
    connect_timeout_s: Seconds = 10.0
    """Longest wait for a connection."""
    probe_timeout_s: Seconds = 60.0
    """Longest wait at the start for a server to say what it can do."""
    model: str | None = None
    """Name under which the servers list the model, or the adapter (LoRA), that is trained. None means the only one."""
    expert_shape: tuple[PositiveInt, PositiveInt] | None = None
    """Layers and experts per token, of routed_experts. None means what the model's files say."""

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None:
            checked_key(key.get_secret_value())
        return key

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        double = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if double:
            raise Mistake(Named("engine.urls"), f" names {double[0]} twice; each server is one engine")
        if self.api_key is not None and self.api_key_env is not None:
            raise contradiction(self, "engine.api_key and {engine.api_key_env} are both given; leave out api_key")
        return self


class VllmEngineConfig(ServerEngineConfig):
    """vLLM servers (`vllm serve`)."""

    kind: Literal["vllm"] = "vllm"


class SglangEngineConfig(ServerEngineConfig):
    """SGLang servers (`python -m sglang.launch_server`)."""

    kind: Literal["sglang"] = "sglang"
    router: Url | None = None
    """Address of an sglang-router: requests go through it; urls are its workers, which take the control calls."""


class OpenAIEngineConfig(ServerEngineConfig):
    """Servers with the OpenAI completions route that take and give token ids, such as TensorRT-LLM's."""

    kind: Literal["openai"] = "openai"


EngineConfig = Annotated[
    TransformersEngineConfig | SimulatedEngineConfig | VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig,
    Field(discriminator="kind"),
]
ENGINE_CONFIGS = (
    TransformersEngineConfig,
    SimulatedEngineConfig,
    VllmEngineConfig,
    SglangEngineConfig,
    OpenAIEngineConfig,
)
"""All kinds of engines."""
