"""The benchmark of precisions on a tiny model: float32 is exact, bfloat16 as far from april as from itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model

from benchmarks import precision


class Letters:
    """A tokenizer: a token per letter."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % (VOCAB_SIZE - 2) for letter in messages[0]["content"]]}


@pytest.mark.parametrize("name", precision.PRECISIONS)
def test_every_row_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses that were cut are among them; the rows of float32 agree with each other."""
    monkeypatch.setattr(precision.AutoTokenizer, "from_pretrained", lambda path: Letters())
    monkeypatch.setattr(
        precision.AutoModelForCausalLM, "from_pretrained", lambda path, dtype, **_: tiny_model().to(dtype)
    )
    result = precision.measure("somewhere", name, samples=8, tokens=40)
    rows = result["rows"]

    assert (result["responses"], len(rows)) == (8, 3 if name == "float32" else 5)
    assert result["cut and continued"] > 0
    assert len({row["tokens"] for row in rows.values()}) == 1
    if name == "float32":
        assert max(row["max"] for row in rows.values()) < 1e-4
    else:
        padding, rounding = rows["transformers alone and padded"]["mean"], rows["transformers alone, float32"]["mean"]
        assert rounding > 0
        # 0 on processors on which a row's sums do not depend on the rows beside it
        assert rows["april, transformers alone"]["mean"] < 2 * (padding + rounding)
    assert not torch.is_autocast_enabled("cpu")
