"""TRL's PEFT policies: sent to servers as adapters where all take them, else merged, else refused with the flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapted_model import Adapted

from april.adapters.trl.ranks import takes_adapters, write_weights
from april.engines.protocol import AdapterSite, Capabilities, LogprobKind
from april.errors import ConfigError

NEED = "start the server with --enable-lora"


def trainer_of(model: Any, fsdp: int = 0) -> Any:
    """As far as the adapter looks at one."""
    accelerator = SimpleNamespace(
        is_main_process=True, num_processes=1, unwrap_model=lambda m: m,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=fsdp)),
    )  # fmt: skip
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=False))
    return SimpleNamespace(model=model, accelerator=accelerator, is_fsdp_enabled=bool(fsdp))


def before(*sites: AdapterSite | None) -> Any:
    """A scheduler before servers that take adapters so."""
    can = [
        Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=9, max_context=9, adapters=site,
            needs={} if site else {"adapters": NEED},
        )
        for site in sites
    ]  # fmt: skip
    return SimpleNamespace(engines=[SimpleNamespace(capabilities=c) for c in can])


def test_where_all_servers_take_adapters() -> None:
    """One that does not takes merged weights, and so do all; what a server does not compute is merged."""
    assert takes_adapters(trainer_of(Adapted()), before(AdapterSite(), AdapterSite()))
    assert not takes_adapters(trainer_of(Adapted()), before(AdapterSite(), None))
    assert not takes_adapters(trainer_of(Adapted(use_dora=True)), before(AdapterSite()))
    assert takes_adapters(trainer_of(Adapted(use_rslora=True)), before(AdapterSite()))
    assert not takes_adapters(trainer_of(Adapted(use_rslora=True)), before(AdapterSite(scales=False)))
    assert not takes_adapters(trainer_of(SimpleNamespace()), before(AdapterSite()))


def test_what_can_be_neither_sent_nor_merged() -> None:
    """Under FSDP2 nothing is merged: a server without adapters is refused, with its flags."""
    assert takes_adapters(trainer_of(Adapted(), fsdp=2), before(AdapterSite()))
    with pytest.raises(ConfigError, match=f"PEFT model under FSDP2: .* cannot be sent as an adapter: .*; {NEED}"):
        takes_adapters(trainer_of(Adapted(), fsdp=2), before(None))


def test_a_directory_of_a_run_that_was_broken_off(tmp_path: Path) -> None:
    """The step is trained again after a restart, and its directory is written anew."""
    trainer, folder = trainer_of(Adapted()), tmp_path / "weights" / "step_3"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"old")
    write_weights(trainer, folder, as_adapter=True)
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
