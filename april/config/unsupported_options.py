"""What people ask an engine for and april does not pass on, each with the reason and the way out.

Names as in the interfaces of common engines. Anything else that april does not know is refused too, as unknown.
"""

from __future__ import annotations

_OTHER_DISTRIBUTION = "changes the distribution, and a trainer's recomputed log-probabilities could not match"
_N = "every sample of a group is a request of its own; set n_samples_per_prompt"
_GRAMMAR = f"a grammar {_OTHER_DISTRIBUTION}, nor would its state survive an abort"
_LORA = "april trains and samples one set of weights; merge the adapter, or load it in the engine for every request"
_IMAGES = "april resumes by token ids alone, and multimodal input would be lost; prompts must be text"
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
    **dict.fromkeys(("image_data", "images", "multi_modal_data", "audio_data", "video_data"), _IMAGES),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs", "return_logprob"), _LOGPROBS),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _STOP_TEXT),
    "return_routed_experts": "april does not carry the experts of a token over an abort, so a replay would have holes",
    "seed": "april seeds each attempt by (run, sample, token offset): a resume repeats nothing; set Config.seed",
    "priority": "april decides who goes first, by age and staleness",
    "echo": "the prompt is yours already: Completion.conversation has it in front",
    "ignore_eos": "a response that goes on after EOS is none; give max_tokens and min_tokens",
    "stream": "tokens reach a rollout function when its call is complete; april streams inside where it needs to",
    "max_new_tokens": "is called max_tokens here",
    "stop_strings": "is called stop here",
    "skip_special_tokens": "belongs to response.text(special_tokens=...)",
}
