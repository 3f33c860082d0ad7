"""``python -m tests.real_engines.images vllm`` (or ``sglang``): images on two real servers on this CPU.

A tiny Qwen2.5-VL with random weights answers prompts that each have an image of their own, some have two. The trainer
of :mod:`tests.real_engines.image_trainer`, a process of its own, updates all weights after each batch, those of the
vision tower too; it is killed in the middle of a step and goes on from its checkpoint, and one of the servers is killed
and started anew. Every delivered token's log-probability is compared with a forward pass of transformers with the
images of its prompt under the weights of its version, and with another image.

Ends with status 1 if a token is off by more than BOUND, another image would have done, or what was to happen did not
happen. Writes ``runs/images/<kind>.json``.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar

from april.core.attachments import Attachment, Placed
from april.engines.protocol import Request
from april.testing import conformance
from april.testing.conformance import CHECKS, Outcome, Shown, Subject, Weights
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import ROOT
from tests.real_engines.image_models import (
    CONTEXT,
    PLACEHOLDERS,
    VISION_END,
    VISION_START,
    change,
    image_model,
    save_image_model,
)
from tests.real_engines.image_trainer import BATCHES, GROUPS, SAMPLES
from tests.real_engines.servers import NotKept, Server, emptied, opened, program, ready, until_ready
from tests.tiny_vision import IMAGE_ID, tiny_processor, tiny_tokenizer

BOUND = 1e-4
"""Nats, float32 on both sides."""
APART = 0.1
"""Fewest nats by which a response's likeliest-to-differ token differs under another image."""
FEWEST = 5
"""Responses to which each of the things must have happened that may happen to one."""
IN_FLIGHT = 16
IMAGES = 40
KILLED_AFTER, SERVER_KILLED_AFTER = 2, 3
"""Batches before the trainer, and one of the servers, is killed."""
PATIENCE_S = 900.0


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang.")],
    out: Annotated[Path, typer.Option(help="Where models, logs and figures go.")] = ROOT / "runs" / "images",
) -> None:
    """Some four minutes on two cores."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    with program():
        found = run(kind, emptied(out / kind))
    (out / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found, indent=1))


def run(kind: str, where: Path) -> dict[str, Any]:
    make_versions(where)
    make_prompts(where)
    servers = [server_of(kind, i, where) for i in range(2)]
    with ready(*servers):
        began = time.monotonic()
        train(kind, where, servers)
        took = time.monotonic() - began
        promises = hold_to_promises(kind, where, servers[0])
    return check(kind, where) | {"seconds of training": round(took), "promises": promises}


def server_of(kind: str, number: int, where: Path) -> Server:
    name, model = f"{kind}-{number}", where / "v0"
    if kind == "vllm":
        return vllm_server(name, model, where, open_routes=True, context=CONTEXT, in_flight=IN_FLIGHT)
    return sglang_server(name, model, where, context=CONTEXT, in_flight=IN_FLIGHT, room=32768, images=True)


def make_versions(where: Path) -> None:
    """The directories v0, v1 ... of a model whose every weight changes from one to the next."""
    model = image_model()
    for n in range(BATCHES):
        if n:
            change(model, seed=n)
        save_image_model(model, where / f"v{n}")


def make_prompts(where: Path) -> None:
    """Images of noise in two sizes, and prompts with one or two of them each."""
    rng = np.random.default_rng(0)
    (where / "images").mkdir()
    for i in range(IMAGES):
        height, width = (168, 224) if i % 2 else (112, 140)
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(where / "images" / f"{i}.png")
    words, prompts = tiny_tokenizer(), []
    for i in range(IMAGES):
        shown = [i] if i % 5 else [i, (i + 7) % IMAGES]
        seen = "and".join("<|vision_start|><|image_pad|><|vision_end|>" for _ in shown)
        text = f"<|im_start|>user\n{seen}what is in it?<|im_end|>\n<|im_start|>assistant\n"
        prompts.append({"token_ids": words(text)["input_ids"], "images": [f"images/{j}.png" for j in shown]})
    (where / "prompts.json").write_text(json.dumps(prompts), "utf-8")


# ---------------------------------------------------------------- the run


def train(kind: str, where: Path, servers: Sequence[Server]) -> None:
    """Run the trainer to its end; kill it once, and a server once."""
    command = [
        sys.executable, "-m", "tests.real_engines.image_trainer", str(where), kind, *(server.url for server in servers),
    ]  # fmt: skip

    def has(batches: int) -> Callable[[], bool]:
        return lambda: (where / f"state-{batches}").exists()

    with (where / "trainer.log").open("ab") as log:
        trainer = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_for(has(KILLED_AFTER), trainer, where)
            time.sleep(0.5)  # into the next step
            trainer.kill()
            trainer.wait()
            trainer = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            wait_for(has(SERVER_KILLED_AFTER), trainer, where)
            servers[1].kill()
            print(f"  {servers[1].name}: killed", flush=True)
            servers[1].start()
            until_ready([servers[1]])
            (where / "both").touch()
            wait_for(lambda: trainer.poll() is not None, None, where)
        finally:
            trainer.kill()
            trainer.wait()
    if trainer.returncode:
        raise NotKept(f"the trainer ended with {trainer.returncode}: {last_lines(where)}")


def wait_for(true: Callable[[], bool], trainer: subprocess.Popen[bytes] | None, where: Path) -> None:
    """Wait until it is so; raises NotKept if the trainer ends before, or it takes too long."""
    began = time.monotonic()
    while not true():
        if trainer is not None and trainer.poll() is not None:
            raise NotKept(f"the trainer has ended: {last_lines(where)}")
        if time.monotonic() - began > PATIENCE_S:
            raise NotKept(f"nothing happened in {PATIENCE_S:g} s: {last_lines(where)}")
        time.sleep(0.05)


def last_lines(where: Path) -> str:
    """The end of the trainer's log."""
    return "\n".join((where / "trainer.log").read_text("utf-8", errors="replace").splitlines()[-15:])


def hold_to_promises(kind: str, where: Path, server: Server) -> dict[str, str]:
    """The checks of the conformance suite that are about images; raises NotKept unless all are passed."""
    reference = Reference(kind, where)
    seen_as = [VISION_START, *[IMAGE_ID] * 48, VISION_END]  # without its marks SGLang takes an image for text
    ids = [1, *seen_as, 301, 302]
    one, other = (Attachment.of("image", (where / "images" / f"{i}.png").read_bytes()) for i in (1, 3))
    both = [1, *seen_as, *seen_as, 302]
    shown = [Shown(ids, [Placed(a, 2, 48, (IMAGE_ID,))]) for a in (one, other)]
    for first, second in ((one, other), (other, one)):
        shown.append(Shown(both, [Placed(first, 2, 48, (IMAGE_ID,)), Placed(second, 52, 48, (IMAGE_ID,))]))

    def weights(n: int) -> Weights:
        def seen(request: Request, response: list[int]) -> Any:
            images = [Image.open(io.BytesIO(placed.attachment.data or b"")) for placed in request.attached]
            return reference.logits(n, request.token_ids.tolist(), response, images).numpy()

        return Weights(str(where / f"v{n}"), seen=seen)

    opens = partial(opened, {"kind": kind, "urls": [server.url]})
    subject = Subject(open=opens, shown=shown, now=weights(BATCHES - 1), other=weights(1))
    checks = [one for one in CHECKS if one.name == "banned_ids" or one.name.startswith("attached")]
    verdicts = asyncio.run(conformance.run(subject, checks)).verdicts
    if amiss := [str(verdict) for verdict in verdicts if verdict.outcome is not Outcome.PASSED]:
        raise NotKept("; ".join(amiss))
    return {verdict.check: str(verdict) for verdict in verdicts}


# ---------------------------------------------------------------- what came of it


class Reference:
    """The models of all versions, and the log-probabilities that they give."""

    def __init__(self, kind: str, where: Path) -> None:
        self._where, self._models = where, {}  # type: Path, dict[int, Any]
        self._processor: Any = tiny_processor()
        # SGLang says those after the ban, vLLM those before it
        self._banned = list(PLACEHOLDERS) if kind == "sglang" else []

    def logprobs(self, weights: int, prompt: Sequence[int], tokens: Sequence[int], images: Sequence[str]) -> Any:
        """Of the tokens [T], after the prompt with these images."""
        logits = self.logits(weights, prompt, tokens, [Image.open(self._where / name) for name in images])
        logits[:, self._banned] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(list(tokens))[:, None])[:, 0].numpy()

    @torch.no_grad()
    def logits(self, weights: int, prompt: Sequence[int], tokens: Sequence[int], shown: Sequence[Any]) -> Any:
        """[T, V], at the places that predict the tokens."""
        if weights not in self._models:
            loader: Any = AutoModelForImageTextToText
            self._models[weights] = loader.from_pretrained(self._where / f"v{weights}", dtype=torch.float32).eval()
        seen = self._processor.image_processor(images=shown, return_tensors="pt")
        ids = torch.tensor([[*prompt, *tokens]])
        return self._models[weights](
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"], mm_token_type_ids=(ids == IMAGE_ID).int(),
        ).logits[0, len(prompt) - 1 : -1].float()  # fmt: skip


def check(kind: str, where: Path) -> dict[str, Any]:
    """Compare all that was delivered; raises NotKept for the first thing that is not as it must be."""
    rows = [row for n in range(1, BATCHES + 1) for row in json.loads((where / f"batch-{n}.json").read_text("utf-8"))]
    reference = Reference(kind, where)
    worst, nearest, tokens, seen = 0.0, float("inf"), 0, Counter[str]()
    for row in rows:
        said, ids = np.array(row["logprobs"]), row["tokens"]
        if set(ids) & set(PLACEHOLDERS):
            raise NotKept(f"a response has a placeholder in it: {row}")
        for weights in {segment["weights"] for segment in row["segments"]}:
            scored = reference.logprobs(weights, row["prompt"], ids, row["images"])
            other = reference.logprobs(weights, row["prompt"], ids, [another(name) for name in row["images"]])
            older = reference.logprobs((weights or 2) - 1, row["prompt"], ids, row["images"])
            parts = [s for s in row["segments"] if s["weights"] == weights]
            of = np.concatenate([np.arange(s["start"], s["start"] + s["count"]) for s in parts])
            worst = max(worst, float(np.abs(said[of] - scored[of]).max()))
            if len(of) >= 16:
                nearest = min(nearest, *(float(np.abs(said[of] - wrong[of]).max()) for wrong in (other, older)))
        tokens += len(ids)
        engines = [segment["engine"] for segment in row["segments"]]
        seen["resumed"] += row["resumes"] > 0
        seen["of several versions"] += len({segment["weights"] for segment in row["segments"]}) > 1
        seen["moved between servers"] += len(set(engines)) > 1
        seen["finished after the restart of the trainer"] += row["restarted"]
    found: dict[str, Any] = {
        "responses": len(rows), "tokens": tokens, "updates": BATCHES - 1, **seen,
        "largest difference to transformers with the right images": worst,
        "smallest, over responses, largest difference with other images, or other weights": nearest,
    }  # fmt: skip
    found["sendings"] = sendings(where)
    print(json.dumps(found), flush=True)
    for name, fewest in (("responses", GROUPS * SAMPLES * BATCHES), *((name, FEWEST) for name in seen)):
        if found[name] < fewest:
            raise NotKept(f"{name}: {found[name]}, and at least {fewest} were to be")
    if worst > BOUND:
        raise NotKept(f"a token is {worst:.2g} nats off what transformers makes of its images")
    if nearest < APART:
        raise NotKept(f"another image, or version, differs by {nearest:.2g} nats only: this check sees nothing")
    if kind == "vllm":
        for life, servers in found["sendings"].items():
            for server, times in servers.items():
                restarted = server.endswith("restarted")
                if times["most per image"] > 1 + restarted:
                    raise NotKept(f"{life}: an image was sent to {server} {times['most per image']} times")
    return found


def another(name: str) -> str:
    """Another image of the same size."""
    number = int(Path(name).stem)
    return f"images/{(number + 2) % IMAGES}.png"


def sendings(where: Path) -> dict[str, dict[str, dict[str, int]]]:
    """How often images were sent with their bytes, by life of the trainer and server."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for file in sorted(where.glob("sent-*.json")):
        for server, times in json.loads(file.read_text("utf-8")).items():
            found[file.stem][server] = {
                "images": len(times), "sendings": sum(times.values()), "most per image": max(times.values(), default=0),
            }  # fmt: skip
    return dict(found)


if __name__ == "__main__":
    typer.run(main)
