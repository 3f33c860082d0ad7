"""Tools and environments of the real package: april's rows beside those of TRL's own loop over the same tokens."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import short_runs
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer, chat_template_utils

from april.adapters.trl import AprilGRPOTrainer, rollout

ROWS, GROUPS, SAMPLES = 16, 4, 4
CALL, CLOSE = '<tool_call>\n{"name": "look", "arguments": {"n": ', "}}\n</tool_call>"
OTHER, LATE = CALL.replace("look", "nothing"), CALL.replace("look", "later")
END, BEGIN = "<|im_end|>", "<|im_start|>"
WRITTEN = [END, BEGIN, CALL, OTHER, LATE, CLOSE, "<tool_call>", "</tool_call>", "10", "12", "77", "word "]
"""Words of one token; everything else is written byte by byte."""


def tokenizer() -> Any:
    """Bytes, some words, and the chat template of Qwen2.5, which TRL knows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken(word, special=word.startswith("<|"), normalized=False) for word in WRITTEN])
    ends = {"eos_token": END, "pad_token": BEGIN}
    template = chat_template_utils.qwen2_5_chat_template
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **ends)


def model() -> Any:
    """Of its embedding and its head, a table of what follows what: calls, words and ends; some calls are of no tool."""
    torch.manual_seed(0)
    size, width = 256 + len(WRITTEN), 272
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size, hidden_size=width, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=1200, tie_word_embeddings=False,
            eos_token_id=256, pad_token_id=257,
        )
    )  # fmt: skip
    ids = {word: 256 + i for i, word in enumerate(WRITTEN)}
    begin, numbers = [CALL, OTHER, LATE, "word "], ["10", "12", "77"]
    after = {
        CALL: numbers, OTHER: numbers, LATE: numbers, **{number: [CLOSE] for number in numbers},
        CLOSE: [END, CALL, "word "], "word ": ["word ", END, CALL],
    }  # fmt: skip
    with torch.no_grad():
        made.model.embed_tokens.weight.copy_(torch.eye(size, width))
        made.lm_head.weight.normal_(std=0.01)
        for token in range(size):
            for following in after.get(WRITTEN[token - 256] if token >= 256 else "", begin):
                made.lm_head.weight[ids[following], token] += 8.0 / width**0.5
    return made


def look(n: int) -> str:
    """Looks something up.

    Args:
        n: Where.
    """
    if n == 77:
        raise ValueError("nothing is there")
    return f"seen {n}"


async def later(n: int) -> str:
    """Looks something up, later.

    Args:
        n: Where.
    """
    return f"late {n}"


class Room:
    """Greets with a number of its own, and pays for what was looked at."""

    def reset(self, number: int, **columns: Any) -> str:
        self.number, self.seen = number, [0]
        assert columns["prompt"][-1]["content"] == f"question {number}"
        return f" (room {number * 3})"

    def look(self, n: int) -> str:
        """Looks something up.

        Args:
            n: Where.
        """
        self.seen.append(n)
        return f"{len(self.seen)}: {n}"

    def get_reward(self) -> float:
        return self.number + sum(self.seen) / 100


class Watched(AprilGRPOTrainer):  # type: ignore[misc,valid-type]
    """Holds every generation batch against TRL's own loop over the tokens that april's engine has sampled."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.found: Counter[str] = Counter()
        self.rewarded: list[list[float]] = []

    def _generate(self, prompts: Any) -> Any:
        answer = super()._generate(prompts)
        prompt_ids, ids, mask, completions, logprobs, *_ = answer
        theirs = self._by_trl(prompts, prompt_ids, ids, mask, logprobs)
        assert theirs[0] == mask
        assert theirs[1] == completions
        assert theirs[2] == ids
        assert [[round(v, 6) for v in row] for row in theirs[3]] == [[round(v, 6) for v in row] for row in logprobs]
        notes = self.rollout_func._notes
        assert theirs[4:6] == (sum(note.calls for note in notes), sum(note.failures for note in notes))
        self.found["calls"] += theirs[4]
        self.found["failures"] += theirs[5]
        self.found["rows of several turns"] += sum(0 in row for row in mask)
        return answer

    def _by_trl(self, prompts: Any, prompt_ids: Any, ids: Any, mask: Any, logprobs: Any) -> Any:
        """TRL's loop, for which april's sampled tokens are what its engine generates."""
        runs: list[list[tuple[list[int], list[float]]]] = []
        for row, own, said in zip(ids, mask, logprobs, strict=True):
            turns: list[tuple[list[int], list[float]]] = []
            for at, token in enumerate(row):
                if own[at] and (at == 0 or not own[at - 1]):
                    turns.append(([], []))
                if own[at]:
                    turns[-1][0].append(token)
                    turns[-1][1].append(said[at])
            runs.append(turns)
        first, left = [turns[0] for turns in runs], [turns[1:] for turns in runs]
        whole = [[*prompt, *row] for prompt, row in zip(prompt_ids, ids, strict=True)]

        def generate(contexts: Any, *arguments: Any, **named: Any) -> Any:
            """Whose turn it is, is told by what it begins with; contexts are in the order of their rows."""
            given: list[tuple[list[int], list[float]]] = []
            rows = iter(range(len(whole)))
            for context in contexts:
                row = next(i for i in rows if whole[i][: len(context)] == list(context))
                given.append(left[row].pop(0) if left[row] else ([], []))
            return [list(tokens) for tokens, _ in given], [list(said) for _, said in given]

        completions = [
            [chat_template_utils.parse_response(self._tokenizer, tokens, prefix=prompt_ids[i], tools=self.tools)]
            for i, (tokens, _) in enumerate(first)
        ]
        factories, self._generate_single_turn = self.environment_factories, generate
        dicts, rooms = self._sync_tool_dicts, []
        try:
            if self.played_rooms is not None:
                rooms = [Room() for _ in ids]
                for room, prompt in zip(rooms, prompts, strict=True):
                    number = int(re.findall(r"question (\d+)", prompt[-1]["content"])[0])
                    room.reset(number, prompt=[{"role": "user", "content": f"question {number}"}])
                self._sync_tool_dicts = [{"look": room.look} for room in rooms]
            return GRPOTrainer._tool_call_loop(
                self, [list(p) for p in prompts], prompt_ids, [list(t) for t, _ in first], completions,
                [list(said) for _, said in first], None, {},
            )  # fmt: skip
        finally:
            self.environment_factories, self._sync_tool_dicts = factories, dicts
            del self._generate_single_turn
            self.rewarded.append([room.get_reward() for room in rooms])

    played_rooms: Any = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        training = self.model.training
        output = super()._generate_and_score_completions(inputs)
        if training:
            self._compare(self.rollout_func._last_batch, output)
        return output

    def _compare(self, batch: Any, output: Any) -> None:
        """Log-probabilities of the present weights' tokens, and the mask of everything else."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        width = output["completion_ids"].size(1)
        with torch.no_grad():
            now = self._get_per_token_logps_and_entropies(self.model, ids, mask, width)[0]
        for i, sample in enumerate(batch.samples):
            own, fresh = sample.loss_mask.astype(bool), (sample.versions == batch.version).all(1)
            assert output["tool_mask"][i, : len(own)].tolist() == own.tolist()
            difference = (now - output["old_per_token_logps"])[i, : len(own)].abs()
            assert not (own & fresh).any() or difference[torch.tensor(own & fresh)].max() < 1e-3

    def _calculate_rewards(self, *arguments: Any) -> Any:
        rewards = super()._calculate_rewards(*arguments)
        if self.played_rooms is not None:
            assert rewards[:, -1].tolist() == pytest.approx(self.rewarded[-1], abs=1e-5)
        return rewards


def data() -> Dataset:
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(ROWS)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(ROWS))})


def of_messages(prompts: Any, completions: Any, completion_ids: Any, number: Any, **columns: Any) -> list[float]:
    """The number of words in what the tools have said."""
    assert [p[-1]["content"].split(" (")[0] for p in prompts] == [f"question {n}" for n in number]
    return [float(sum(len(m["content"].split()) for m in said if m["role"] == "tool")) for said in completions]


def trainer(folder: Path, longest: int = 300, settings: dict[str, Any] | None = None, **arguments: Any) -> Watched:
    changes = {
        "max_completion_length": longest, "per_device_train_batch_size": GROUPS * SAMPLES, "learning_rate": 1e-4,
        **arguments.pop("changes", {}),
    }  # fmt: skip
    torch.set_num_threads(1)
    return Watched(
        model=model(), args=short_runs.arguments(folder, **changes), train_dataset=data(),
        processing_class=tokenizer(), rollout_func=rollout(**short_runs.SETTINGS | (settings or {})), **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(("longest", "changes"), [(300, {}), (120, {}), (300, {"max_tool_calling_iterations": 1})])
def test_tools(longest: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Rows, masks, messages, log-probabilities and counts are TRL's, with results that do not fit, and few rounds."""
    made = trainer(tmp_path, longest, tools=[look, later], reward_funcs=of_messages, changes=changes)
    made.train()

    assert made.state.global_step == ROWS // GROUPS
    assert made.found["calls"] > 20
    assert made.found["failures"] > 0
    assert made.found["rows of several turns"] > 10
    assert made.rollout_func.ledger["tokens"].balanced
    logged = [row for row in made.state.log_history if "tools/call_frequency" in row]
    assert sum(float(row["tools/call_frequency"]) for row in logged) > 0
    resumed = sum(float(row["april/resumed_samples"]) for row in made.state.log_history if "loss" in row)
    print(f"\n{dict(made.found)}, {resumed:.0f} resumed responses")
    assert resumed > 0 or longest < 300 or changes  # short ones end together


def test_environments(tmp_path: Path) -> None:
    """Each response has one of its own, whose greeting is in its prompt and whose reward is trained."""
    Watched.played_rooms = True
    try:
        made = trainer(tmp_path, environment_factory=Room, reward_funcs=[])
        made.train()
        rows = [row for row in made.state.log_history if "rewards/Room/mean" in row]
        made.evaluate(Dataset.from_dict(data()[:4] | {}))
    finally:
        Watched.played_rooms = None

    assert len(rows) == ROWS // GROUPS
    assert made.found["rows of several turns"] > 10
    assert made.rollout_func.ledger["tokens"].balanced


def test_a_restart_in_the_middle_of_conversations(tmp_path: Path) -> None:
    """Finished responses come with their messages; unfinished ones ask their tools again."""
    first = trainer(
        tmp_path, tools=[look, later], reward_funcs=of_messages,
        changes={"save_strategy": "steps", "save_steps": 1, "max_steps": 2},
    )  # fmt: skip
    first.train()
    second = trainer(tmp_path, tools=[look, later], reward_funcs=of_messages)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    assert second.state.global_step == ROWS // GROUPS
    ledger = second.rollout_func.ledger
    assert (ledger["prompts"].delivered, ledger["prompts"].held) == (ROWS, 0)
    assert not ledger["tokens"].dropped
