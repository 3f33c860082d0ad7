"""Every block of settings on a page is a configuration."""

from __future__ import annotations

from typing import Any

import page_trainers as trainers
import pytest
import yaml
from page_blocks import YAML, Block, blocks

import april

SMALLEST = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "max_response_len": 400}
"""What april.Config must be given, where a block has a part of the settings only."""


@pytest.mark.parametrize("block", blocks(*YAML), ids=str)
def test_every_yaml_block_is_a_configuration(block: Block) -> None:
    """april.Config takes it; what stands below ``april:`` is for slime, whose adapter reads it."""
    values: dict[str, Any] = yaml.safe_load(block.text)
    if set(values) == {"april"}:
        assert block.page == "slime.md"
        trainers.slime([], values["april"])
        return
    config = april.Config(**(SMALLEST | values))
    said = config.model_dump(exclude_unset=True)
    assert set(values) <= set(said)
