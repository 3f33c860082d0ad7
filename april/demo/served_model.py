"""The demo's model as a directory that servers can load: weights, configuration, and a tokenizer of one word per id."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from april.demo import task

KEPT = 2
"""Sets of weights that stay on the disk: those the servers have, and those they are about to load."""


def write_model(model: PreTrainedModel, where: Path) -> None:
    """Everything that a server needs to start, into ``where``; in silence, for a bar of its own is on the screen."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(where)
    _tokenizer().save_pretrained(where)


class WeightsDirectory:
    """Sets of weights in numbered directories, of which only the newest stay."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written = 0

    def write(self, model: PreTrainedModel) -> str:
        """Write the weights as they are now; the directory's name."""
        where = self._root / str(self._written)
        write_model(model, where)
        self._written += 1
        shutil.rmtree(self._root / str(self._written - 1 - KEPT), ignore_errors=True)
        return str(where.resolve())

    def remove(self) -> None:
        """All of them."""
        shutil.rmtree(self._root, ignore_errors=True)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Servers want one at the start; the demo itself knows token ids only."""
    words = {f"<{number}>": number for number in range(task.VOCAB_SIZE)}
    made = Tokenizer(models.WordLevel(words, unk_token="<2>"))  # noqa: S106 - a word, no secret
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, eos_token=f"<{task.EOS_ID}>", pad_token=f"<{task.PAD_ID}>"
    )
