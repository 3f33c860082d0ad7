"""The settings of each kind of engine."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from april.config.mistakes import Mistake, Named, contradiction
from april.config.server_key import checked_key
from april.config.server_url import checked_url
from april.config.values import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    one_or_more,
)


class TransformersEngineConfig(Model):
    """The embedded engine: any Hugging Face causal LM in this process."""

    kind: Literal["transformers"] = "transformers"
    model: str | None = None
    """Directory or hub name; None when the model object is given to the scheduler."""
    slots: PositiveInt = 64
    """Sequences decoded at the same time."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response; None: what the model's config says."""
    stream_interval: PositiveInt | None = None
    """Tokens per chunk; None: one chunk at the end of a request, or every two tokens where it has stop strings."""


class SimulatedEngineConfig(Model):
    """Engines on virtual or real time with a decode-cost model, for tests and planning."""

    kind: Literal["simulated"] = "simulated"
    count: PositiveInt = 1
    """Engines."""
    model: Literal["r1-distill-1.5b", "qwen3-4b", "qwen3-8b"] = "qwen3-4b"
    """Whose decode cost is simulated."""
    gpu: Literal["h100", "mi300x"] = "h100"
    """On which GPU."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    slots: PositiveInt = 256
    """Sequences decoded at the same time, per engine."""
    max_len: PositiveInt = 32768
    """Longest prompt plus response."""
    vocab_size: PositiveInt = 32000
    """Token ids are below it."""
    median_len: PositiveFloat = 2500.0
    """Median response length, in tokens."""
    sigma_between: NonNegativeFloat = 0.6
    """Spread of log length between prompts."""
    sigma_within: NonNegativeFloat = 0.5
    """Spread of log length within a prompt."""


Url = Annotated[str, AfterValidator(checked_url)]
Urls = Annotated[tuple[Url, ...], BeforeValidator(one_or_more), Field(min_length=1)]


class ServerEngineConfig(Model):
    """What all engines behind HTTP servers have in common."""

    urls: Urls
    """The addresses of the servers, such as http://127.0.0.1:8000; one engine per server."""
    api_key: SecretStr | None = None
    """Sent to the servers as a bearer token; in files better named by api_key_env, and no flag, as those are seen by
    everybody on the machine."""
    api_key_env: str | None = None
    """Environment variable that holds the key, where the servers want one."""
    max_in_flight: PositiveInt | None = None
    """Most requests at one server at the same time, within the max_in_flight of all servers together; None: april
    finds out from what the server says of its memory."""
    max_token_loss: NonNegativeInt | None = None
    """Most tokens of one response that may be lost when its server dies: tokens are then streamed at least that often.
    None: what costs least on this kind of server."""
    vocab_size: PositiveInt | None = None
    """Token ids are below it; None: the server is asked."""
    max_len: PositiveInt | None = None
    """Longest prompt plus response; None: the server is asked."""
    eos_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Ids that end every response; None: the server is asked."""
    logprobs: Literal["temperature", "processed", "raw"] | None = None
    """Of which distribution the log-probabilities are; None: april finds out by requests of one token."""
    connect_timeout_s: Seconds = 10.0
    """Longest wait for a connection."""
    probe_timeout_s: Seconds = 60.0
    """Longest wait at the start for a server to say what it can do."""

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
    model: str | None = None
    """Name under which the servers list the model, or the adapter (LoRA), that is trained; None: the only one."""


class SglangEngineConfig(ServerEngineConfig):
    """SGLang servers (`python -m sglang.launch_server`)."""

    kind: Literal["sglang"] = "sglang"
    model: str | None = None
    """Name under which the servers list the model, or the adapter (LoRA), that is trained; None: the only one."""
    router: Url | None = None
    """Address of an sglang-router: requests go through it; urls are its workers, which take the control calls."""


class OpenAIEngineConfig(ServerEngineConfig):
    """Servers with the OpenAI completions route that take and give token ids, such as TensorRT-LLM's."""

    kind: Literal["openai"] = "openai"
    model: str | None = None
    """Name under which the servers list the model, or the adapter (LoRA), that is trained; None: the only one."""


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
"""All of them, for those who look for a setting by name."""
