"""The paper's data sets as parquet files in verl's form, for train.sh: ``python examples/verl/data.py /root/data``.

Needs ``datasets``. Questions that are plain text get an instruction to box the answer, which reward.py looks for; those
of DAPO-Math-17k and AIME 2024 have one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = {
    "dapo-math-17k": ("zhuzilin/dapo-math-17k", "prompt", "label"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "deepmath-103k": ("zwhe99/DeepMath-103K", "question", "final_answer"),
    "aime-2024": ("zhuzilin/aime-2024", "prompt", "label"),
}
"""Name on the hub, and the columns of question (text, or a list of messages) and answer."""
ASKS = r"Please reason step by step, and put your final answer within \boxed{}."


def row_of(name: str, index: int, example: Mapping[str, Any]) -> dict[str, Any]:
    """A question in verl's form."""
    _, question, answer = DATA[name]
    asked = example[question]
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": f"{asked}\n{ASKS}"}] if isinstance(asked, str) else asked,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(example[answer])},
        "extra_info": {"index": index},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="DATA_DIR of train.sh")
    parser.add_argument("--only", choices=DATA, action="append", help="may be given several times")
    options = parser.parse_args(arguments)
    from datasets import load_dataset

    for name in options.only or DATA:
        loaded = load_dataset(DATA[name][0], split="train")
        made = loaded.map(
            lambda example, index, name=name: row_of(name, index, example),
            with_indices=True, remove_columns=loaded.column_names,
        )  # fmt: skip
        made.to_parquet(options.directory / f"{name}.parquet")


if __name__ == "__main__":
    main()
