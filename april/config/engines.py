"""Settings of each kind of engine, and checks of the servers' addresses and keys."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from april.config.mistakes import Mistake, SettingName, contradiction
from april.config.values import (
    LARGEST_INT,
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    one_or_more,
    shown_address,
)
from april.errors import ConfigError
from april.text.server_text import hide, quoted

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - refused in the address of a server
"""Addresses that a server can listen on, but under which no client can reach it."""


def checked_url(url: str) -> str:
    """Return the URL of an engine in lower case and without a trailing slash.

    Raises:
        ConfigError: the URL does not look like http(s)://host:port, or its host is an address only for listening (see
            :data:`ANY_ADDRESS`).
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # unbalanced brackets of an IPv6 address
        got = quoted(shown_address(url), 100)
        raise ConfigError(f"an engine's URL must look like http://host:port, got {got}") from None
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a wrong port
        valid = False
    if not valid or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(f"an engine's URL must look like http://host:port, got {quoted(shown_address(url), 100)}")
    if parts.hostname in ANY_ADDRESS:
        port = "" if parts.port is None else f":{parts.port}"
        raise ConfigError(
            f"{parts.hostname} in {quoted(url, 100)} is an address to listen on, to which no client can connect; write "
            f"{parts.scheme}://127.0.0.1{port} if the server is on this machine, or else the name of its machine"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}"


def name_at(url: str) -> str:
    """Return the name of the engine at a URL from :func:`checked_url`: its host:port."""
    return urlsplit(url).netloc


def checked_key(key: str) -> str:
    """Return the key of a server, and register the key to be hidden in all of april's messages.

    Raises:
        ConfigError: an HTTP header cannot hold the key. The message does not contain it.
    """
    if not isinstance(key, str):
        raise ConfigError(f"the key of the server must be a string, got {type(key).__name__}")
    hide(key)
    if key.strip() != key:
        raise ConfigError("the key of the server begins or ends with white space or a line break; remove that")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the key of the server has characters that no HTTP header can hold (line breaks, control characters, "
            "spaces or non-ASCII characters); was other text copied along with it?"
        )
    return key


def checked_variable(name: str) -> str:
    """Return the name of an environment variable that holds a key.

    Raises:
        ConfigError: no variable has such a name. The message does not contain it, because it may be the key itself.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(
            "the name of an environment variable has only letters, digits and _; give the name of the variable that "
            "holds the key, not the key itself"
        )
    return name


def key_of_variable(name: str, setting: str) -> str:
    """Return the key in an environment variable; ``setting`` is where the user has named the variable.

    Raises:
        ConfigError: the variable is not set, cannot exist, or holds no valid key.
    """
    key = os.environ.get(checked_variable(name))
    if not key:
        raise ConfigError(f"{setting}: the environment variable {name} is not set")
    return checked_key(key)


class TransformersEngineConfig(Model):
    """Settings of the embedded engine, which runs any Hugging Face causal LM in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Directory or hub name of the model. None means the model object that is given to the scheduler."""
    slots: PositiveInt = 64
    """Sequences decoded at the same time."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response, in tokens. None means the limit in the model's config, at most 32,768, or less
    if testing longer ones would take half a minute."""
    stream_interval: PositiveInt | None = None
    """Tokens per chunk. None means one chunk at the end of a request, or one per two tokens if the request has stop
    strings."""


class SimulatedEngineConfig(Model):
    """Settings of simulated engines: they follow a decode-cost model on virtual or real time, for tests and plans."""

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
    """Longest prompt plus response, in tokens."""
    vocab_size: Annotated[PositiveInt, Field(ge=2)] = 32000
    """Size of the vocabulary."""
    median_len: Annotated[PositiveFloat, Field(ge=1, le=LARGEST_INT)] = 2500.0
    """Median response length, in tokens."""
    sigma_between: Annotated[NonNegativeFloat, Field(le=10)] = 0.6
    """Standard deviation of the logarithm of the response length between prompts."""
    sigma_within: Annotated[NonNegativeFloat, Field(le=10)] = 0.5
    """Standard deviation of the logarithm of the response length among the responses to one prompt."""


THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Hosts that mean this machine; a server at one of them can read this machine's files."""
Url = Annotated[str, AfterValidator(checked_url)]
Urls = Annotated[tuple[Url, ...], BeforeValidator(one_or_more), Field(min_length=1)]


class AddressedEngineConfig(Model):
    """Settings that are common to all engines reached by an address."""

    urls: Urls
    """The addresses of the servers, such as http://127.0.0.1:8000, one per server."""
    api_key: SecretStr | None = None
    """Key that is sent to the servers as a bearer token. In files, prefer api_key_env. There is no flag for the key,
    because everybody on the machine can see flags."""
    api_key_env: Annotated[str, AfterValidator(checked_variable)] | None = None
    """Environment variable that holds the key, if the servers require one."""
    max_in_flight: PositiveInt | None = None
    """Maximum number of concurrent requests to each server; the setting max_in_flight outside engine limits their
    total. None means as many as fit into the server's memory."""
    connect_timeout_s: Seconds = 10.0
    """Longest wait for a connection."""
    probe_timeout_s: Seconds = 60.0
    """Longest wait for a server to report its features when the run starts."""
    first_weights: Literal["start", "present"] = "start"
    """Weights that count as the first version: those with which the servers were started (start), or those that they
    hold when the run begins, even if another run loaded them (present). With start, a server that holds weights of
    another run is not used before the first weight update."""

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
            raise Mistake(SettingName("engine.urls"), f" contains {double[0]} twice; list each server once")
        if self.api_key is not None and self.api_key_env is not None:
            raise contradiction(self, "engine.api_key and {engine.api_key_env} are both set; leave out api_key")
        return self


class AprilEngineConfig(AddressedEngineConfig):
    """Settings of engines that other processes serve with `april.serve`."""

    kind: Literal["april"] = "april"
    interval_s: NonNegativeFloat = 1.0
    """Longest time for which a server collects tokens before it sends them, unless the request is streamed. If a server
    dies, the collected tokens are lost. 0 means that tokens are sent without delay."""


RoutingKey = Literal["sample", "group", "off"]
"""Requests that get the same routing key, so that routers send them to one server: a sample's, a group's, or none."""


class ServerEngineConfig(AddressedEngineConfig):
    """Settings that are common to engines behind third-party servers."""

    max_token_loss: NonNegativeInt | None = None
    """Maximum number of tokens of one response that may be lost when its server dies. None means april's default for
    this kind of server."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. None means the size that the server reports."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response, in tokens. None means the limit that the server reports."""
    eos_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Ids that end every response. None means the ids that the server reports."""
    logprobs: Literal["temperature", "processed", "raw"] | None = None
    """Logits that the returned log-probabilities come from: divided by the temperature (temperature), after all
    sampling parameters (processed), or unchanged (raw). None means that april finds out with requests of one token."""
    model: str | None = None
    """Name under which the servers list the trained model or adapter (LoRA). None means the only model that they
    list."""
    expert_shape: tuple[PositiveInt, PositiveInt] | None = None
    """Number of layers and number of experts per token in routed_experts, an optional output of vLLM and SGLang
    (see extras). None means the numbers in the model's files."""
    # YAML reads off as false
    routing_key: Annotated[RoutingKey, BeforeValidator(lambda given: "off" if given is False else given)] = "sample"
    """Requests that a router in front of the servers is asked to send to the same server: all of a sample, all of a
    group, or none (off). Without a router it changes nothing."""


class VllmEngineConfig(ServerEngineConfig):
    """Settings of vLLM servers (`vllm serve`)."""

    kind: Literal["vllm"] = "vllm"
    salted_kv_connectors: tuple[str, ...] = ()
    """Names of KV connectors unknown to april that never share a cache entry between requests with different cache
    salts. If the encoder is not trained, also the names of encoder-cache connectors."""


class SglangEngineConfig(ServerEngineConfig):
    """Settings of SGLang servers (`python -m sglang.launch_server`)."""

    kind: Literal["sglang"] = "sglang"
    router: Url | None = None
    """Address of an sglang-router. Requests go through the router; urls are the addresses of its workers, which get the
    control calls."""


class OpenAIEngineConfig(ServerEngineConfig):
    """Settings of servers whose OpenAI completions route accepts and returns token ids, such as TensorRT-LLM's."""

    kind: Literal["openai"] = "openai"


EngineConfig = Annotated[
    TransformersEngineConfig | SimulatedEngineConfig | VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig
    | AprilEngineConfig,
    Field(discriminator="kind"),
]
ENGINE_CONFIGS: tuple[type[Model], ...] = get_args(get_args(EngineConfig)[0])
"""Settings classes of all kinds of engines."""
