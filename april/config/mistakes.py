"""Mistakes in the configuration: sentences with places for settings, which each reader fills with own names.

A file and keyword arguments have names (``sampling.top_p=0.5``), a command line has flags (``--sampling-top-p 0.5``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from string import Formatter

from april.config.values import shown
from april.errors import ConfigError

_OTHER_DISTRIBUTION = "changes the distribution, and a trainer's recomputed log-probabilities could not match"
_N = "every sample of a group is a request of its own; set n_samples_per_prompt"
_GRAMMAR = f"a grammar {_OTHER_DISTRIBUTION}, nor would its state survive an abort"
_LORA = "april trains and samples one set of weights; merge the adapter, or load it in the engine for every request"
_IMAGES = 'images come with a prompt, {"messages": ..., "images": [...]}, or with llm.generate(token_ids, images=[...])'
_OTHER_MEDIA = "april carries images, and neither sound nor video"
_STOP_TEXT = "is fixed: the token that completes a stop string is kept, with its log-probability"
_LOGPROBS = "the log-probability of every sampled token always comes with it, and no others"

UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), _N),
    **dict.fromkeys(("top_k", "min_p", "typical_p"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf", "guided_decoding", "structured_outputs"), _GRAMMAR),
    **dict.fromkeys(("response_format", "structural_tag"), _GRAMMAR),
    **dict.fromkeys(("lora", "lora_path", "lora_request", "lora_name"), _LORA),
    **dict.fromkeys(("image", "image_data", "multi_modal_data", "pixel_values"), _IMAGES),
    **dict.fromkeys(("audio", "audios", "audio_data", "video", "videos", "video_data"), _OTHER_MEDIA),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs", "return_logprob"), _LOGPROBS),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _STOP_TEXT),
    "return_routed_experts": "set Config.extras to routed_experts",
    "seed": "april seeds each attempt by (run, sample, token offset): a resume repeats nothing; set Config.seed",
    "priority": "april decides who goes first, by age and staleness",
    "echo": "the prompt is yours already: Completion.conversation has it in front",
    "ignore_eos": "a response that goes on after EOS is none; give max_tokens and min_tokens",
    "stream": "tokens reach a rollout function when its call is complete; april streams inside where it needs to",
    "max_new_tokens": "is called max_tokens here",
    "stop_strings": "is called stop here",
    "skip_special_tokens": "belongs to response.text(special_tokens=...)",
}
"""Options that april does not pass on to engines, under the names of common engines: the reason and the way out."""


@dataclass(frozen=True, slots=True)
class Named:
    """A setting in a sentence."""

    path: str
    """Path in the configuration: ``sampling.top_p``."""
    value: str | None = None
    """Value in the sentence; None means its name alone."""
    advised: bool = False
    """True if the value is one to give it, and not the one that it has."""

    def __str__(self) -> str:
        if self.value is None:
            return self.path
        return f"{self.path.rpartition('.')[2]}: {self.value}" if self.advised else f"{self.path}={self.value}"


class Mistake(ValueError):
    """A sentence on a mistake; its text has the names of a file."""

    def __init__(self, *parts: str | Named) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def sentence(self, name: Callable[[Named], str]) -> str:
        """Return the sentence with other names."""
        return "".join(part if isinstance(part, str) else name(part) for part in self.parts)


class WrongSettings(ConfigError):
    """All mistakes of one configuration."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.sentence(str))

    def sentence(self, name: Callable[[Named], str]) -> str:
        """Return all sentences with other names."""
        return "; ".join(mistake.sentence(name) for mistake in self.mistakes)


def contradiction(settings: object, template: str) -> Mistake:
    """Return a mistake in ``settings``.

    Args:
        template: sentence with ``{max_staleness=}`` for a setting and its value, ``{max_staleness}`` for its name,
            ``{partial_rollout: true}`` for a value to give it.
    """
    parts: list[str | Named] = []
    for text, field, advice, _ in Formatter().parse(template):
        parts.append(text)
        if field is not None:
            path = field.removesuffix("=")
            value = shown(attrgetter(path)(settings)) if path != field else (advice or "").strip() or None
            parts.append(Named(path, value, advised=path == field))
    return Mistake(*parts)
