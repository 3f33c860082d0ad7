"""Records of runs whose prompts have images and whose tokens have rows: decided again, and without their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_random_host_attachments import IMAGES, LifeWithMore, image_of
from test_random_host_protocol import lived
from virtual_rollouts import on_virtual_time

from april.record.plain import bare, filled
from april.record.replay import replay
from april.view.report import page
from april.view.run_data import read_run

pytestmark = on_virtual_time


class Recorded(LifeWithMore):
    """A life with a record."""

    path = Path()

    def begin(self, local: list[Any], **options: Any) -> None:
        super().begin(local, record=self.path, **options)


@pytest.mark.parametrize("seed", [0, 3, 6, 11])
async def test_a_run_with_images_and_rows_is_decided_again(seed: int, tmp_path: Path) -> None:
    """From events alone, which have the hash and the size of each image, and how many tokens came without rows."""
    Recorded.path = tmp_path / "run.jsonl"
    life = await lived(Recorded(seed))
    lines = Recorded.path.read_text("utf-8")
    run = replay(Recorded.path)
    assert {n: book.as_dict() for n, book in (("tokens", run.core.tokens), ("prompts", run.core.prompts))} == {
        n: book.as_dict() for n, book in life.scheduler.ledger().items() if n in ("tokens", "prompts")
    }
    drawn = [parts for _, what, parts, *_ in map(msgspec.json.decode, lines.splitlines()) if what == "PromptsDrawn"]
    first = drawn[0]["prompts"][0]["attached"][0]["attachment"]
    assert first == {"kind": "image", "digest": image_of(0).digest, "size": 100}


async def test_the_report_tells_of_tokens_without_rows(tmp_path: Path) -> None:
    """Beside what else was dropped."""
    Recorded.path = tmp_path / "run.jsonl"
    life = await lived(Recorded(0))
    bare = sum(batch.metrics["no_extras_tokens"] for batch in life.batches)
    assert bare
    assert f"tokens that came without their rows of extras</td><td>{bare:,.0f}" in page([read_run(Recorded.path)])


def test_a_state_in_a_record_has_no_image_and_no_row() -> None:
    """Hashes, sizes and numbers of rows are left of it, which a replay can begin with."""
    image = IMAGES[0]
    saved = {
        "attachments": {image.digest: {"kind": "image", "size": 100, "data": image.data, "path": "/home/me/a.png"}},
        "waiting": [{"samples": [{"extras": {"read": ["<i8", [7, 2], bytes(112)]}, "tokens": bytes(12)}]}],
    }
    left = bare(saved)
    assert left == {
        "attachments": {image.digest: ["image", 100]},
        "waiting": [{"samples": [{"extras": {"read": 7}, "tokens": {"length": 3}}]}],
    }
    again = filled(msgspec.json.decode(msgspec.json.encode(left)))
    assert again["attachments"][image.digest]["data"] is None
    assert again["waiting"][0]["samples"][0] == {"extras": {"read": ["|u1", [7, 0], b""]}, "tokens": bytes(12)}
