"""Describes mistakes in the configuration, in sentences that name settings as the user has written them.

In files and keyword arguments a setting is named ``sampling.top_p=0.5``, on a command line ``--sampling-top-p 0.5``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from string import Formatter

from april.config.values import shown_value
from april.errors import ConfigError

_OTHER_DISTRIBUTION = "changes the distribution, so a trainer's recomputed log-probabilities could not match"
_N = "april sends each sample of a group as a request of its own; set n_samples_per_prompt"
_GRAMMAR = f"a grammar {_OTHER_DISTRIBUTION}, and its state would be lost at an abort"
_LORA = "april trains and samples one set of weights; merge the adapter, or load it in the engine for every request"
_IMAGES = 'images come with a prompt, {"messages": ..., "images": [...]}, or with llm.generate(token_ids, images=[...])'
_OTHER_MEDIA = "april supports images, but neither sound nor video"
_STOP_TEXT = "cannot be changed: the token that completes a stop string is always kept, with its log-probability"
_LOGPROBS = "april always returns the log-probability of each sampled token, and no others"

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
    "seed": "april seeds each attempt by (run, sample, token offset), so that none repeats another; set Config.seed",
    "priority": "april decides which requests go first, by age and staleness",
    "echo": "the prompt is never returned; Completion.conversation holds the prompt and the response",
    "ignore_eos": "a response cannot go on after EOS; give max_tokens and min_tokens",
    "stream": "a rollout function gets tokens when its call is complete; april streams internally where needed",
    "max_new_tokens": "is called max_tokens in april",
    "stop_strings": "is called stop in april",
    "skip_special_tokens": "belongs to response.text(special_tokens=...)",
}
"""Options of common engines that april does not pass on, with the reason and what to do instead."""

NAMES_ELSEWHERE: dict[str, str] = {
    other: setting
    for setting, others in {
        "rollout_batch_size": "batch_size train_batch_size gen_batch_size prompts_per_step num_prompts",
        "rollout_batch_size, which counts prompts, not responses": "generation_batch_size global_batch_size",
        "n_samples_per_prompt": "num_generations group_size n_samples num_samples samples_per_prompt rollout_n "
        "rollout.n",
        "over_sampling_batch_size": "over_sampling oversampling vllm_generate_batch_size",
        "max_response_len": "max_tokens max_new_tokens max_completion_length max_completion_tokens response_length "
        "max_response_length rollout_max_response_len generate_max_len max_length",
        "max_staleness": "staleness max_head_offpolicyness staleness_threshold max_off_policy_threshold",
        "max_in_flight": "max_concurrency max_num_seqs max_running_requests",
        "max_in_flight, which counts responses, not prompts": "max_concurrent_rollouts",
        "epochs": "num_epochs num_epoch num_train_epochs total_epochs total_train_epochs num_episodes",
        "generation: continuous": "async_training async_enable asynchronous",
        "group_quorum": "quorum",
        "partial_rollout": "partial",
        "filter=april.rewards_differ of the scheduler": "dynamic_sampling_filter_path filter_groups",
        "function_timeout_s": "timeout reward_timeout",
        "sampling.temperature": "rollout_temperature",
        "sampling.top_p": "rollout_top_p",
        "sampling.stop": "stop_strings rollout_stop",
        "sampling.stop_token_ids": "rollout_stop_token_ids",
        "engine.urls": "url base_url api_base server_url",
        "evaluate(n_samples=...) of the scheduler": "n_samples_per_eval_prompt num_generations_eval",
    }.items()
    for other in others.split()
}
"""april's settings, by the names that TRL, verl, slime, OpenRLHF, AReaL and others use."""


@dataclass(frozen=True, slots=True)
class SettingName:
    """A setting as it is named in a sentence."""

    path: str
    """Path in the configuration, such as ``sampling.top_p``."""
    value: str | None = None
    """Value to show; None to show only the name."""
    advised: bool = False
    """True if ``value`` is a recommendation, False if it is the current value."""

    def __str__(self) -> str:
        if self.value is None:
            return self.path
        return f"{self.path.rpartition('.')[2]}: {self.value}" if self.advised else f"{self.path}={self.value}"


class Mistake(ValueError):
    """A sentence about a mistake. As text, it names settings as in a file."""

    def __init__(self, *parts: str | SettingName) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def sentence(self, name: Callable[[SettingName], str]) -> str:
        """Return the sentence with each setting named by ``name``."""
        return "".join(part if isinstance(part, str) else name(part) for part in self.parts)


class WrongSettings(ConfigError):
    """All mistakes of one configuration, as one error."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.sentence(str))

    def sentence(self, name: Callable[[SettingName], str]) -> str:
        """Return all sentences with each setting named by ``name``."""
        return "; ".join(mistake.sentence(name) for mistake in self.mistakes)


def contradiction(settings: object, template: str) -> Mistake:
    """Return a mistake made from a template and the values in ``settings``.

    Args:
        settings: object that has the settings as attributes.
        template: sentence with ``{max_staleness=}`` for a setting and its value, ``{max_staleness}`` for its name,
            ``{partial_rollout: true}`` for a recommended value.
    """
    parts: list[str | SettingName] = []
    for text, field, advice, _ in Formatter().parse(template):
        parts.append(text)
        if field is not None:
            path = field.removesuffix("=")
            value = shown_value(attrgetter(path)(settings)) if path != field else (advice or "").strip() or None
            parts.append(SettingName(path, value, advised=path == field))
    return Mistake(*parts)
