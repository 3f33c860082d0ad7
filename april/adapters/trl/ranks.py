"""Makes the scheduler, gathers values and gives weights to servers, for TRL trainers on one or several ranks.

Invariant: the trainer's tensors are never written to. PEFT adapters are merged into a copy, since unmerging in bfloat16
does not restore the same numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from april.config.engines import OpenAIEngineConfig
from april.config.settings import Config
from april.core.types import WeightsRoute
from april.engines.http.adapter_files import why_unservable
from april.engines.protocol import Capabilities
from april.errors import ConfigError, RolloutError
from april.scheduler import RolloutScheduler
from april.weights.adapter import adapter_of, is_adapted, merged_copy


def scheduler_of(trainer: Any, config: Config, address: str | None, **arguments: Any) -> Any:
    """Make a RolloutScheduler or, with several ranks, a RankScheduler on each rank. Must be called on every rank.

    ``address`` is the address on which rank 0 listens; with None, all ranks must be on one machine.
    """
    if trainer.accelerator.num_processes == 1:
        return RolloutScheduler(config, **arguments)
    # imported here, since a single process needs no sockets
    from april import Ranks, RankScheduler

    ranks = Ranks.of_torch() if address is None else Ranks.of_torch(address=address)
    return RankScheduler(config, ranks=ranks, **arguments)


def of_all_ranks(trainer: Any, value: Any) -> list[Any]:
    """Gather a value from each rank, in rank order; call on every rank. RolloutError if msgpack cannot encode one."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return [value]
    import torch

    try:
        data = bytearray(msgspec.msgpack.encode(value))
    except TypeError as error:
        raise RolloutError(
            f"tools on several ranks: columns and messages are sent between the ranks, but {error}"
        ) from error
    here = torch.frombuffer(data, dtype=torch.uint8).to(accelerator.device)[None]
    everywhere = accelerator.gather(accelerator.pad_across_processes(here, dim=1)).tolist()
    lengths = accelerator.gather(torch.tensor([len(data)], device=accelerator.device)).tolist()
    return [msgspec.msgpack.decode(bytes(row[:n])) for row, n in zip(everywhere, lengths, strict=True)]


def rows_of_all_ranks(trainer: Any, rows: list[Any]) -> list[Any]:
    """Gather the rows of all ranks as one list, in rank order. Call it on every rank."""
    return [row for of_rank in of_all_ranks(trainer, rows) for row in of_rank]


UNREADABLE = ("FSDP1", "ZeRO-3")
"""Kinds of sharding under which the model's parameters cannot be read as whole tensors."""


def sharding_of(trainer: Any) -> str:
    """Return ``FSDP1``, ``FSDP2`` or ``ZeRO-3`` if no rank has the whole model, else an empty string."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "ZeRO-3" if trainer.accelerator.state.deepspeed_plugin.zero_stage == 3 else ""
    if getattr(trainer, "is_fsdp_enabled", False):
        return f"FSDP{getattr(trainer.accelerator.state.fsdp_plugin, 'fsdp_version', 1)}"
    return ""


def takes_adapters(trainer: Any, scheduler: Any) -> bool:
    """Return True if the servers get the trained adapter itself, not merged into the model.

    Call it on every rank; all get the same result. Raises ConfigError if the servers do not accept the adapter and it
    cannot be merged either.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_adapted(model):
        return False
    why = ""
    if trainer.accelerator.is_main_process:
        sites = [engine.capabilities for engine in scheduler.engines]
        needs = [can.remedy("adapters") for can in sites if can.adapters is None]
        why = f"the servers accept none; {needs[0]}" if needs else _why_unservable(model, sites)
    why = str(of_all_ranks(trainer, why)[0])
    if why and (unmerged := why_unmerged(trainer)):
        raise ConfigError(f"{unmerged}, and it cannot be sent as an adapter: {why}")
    return not why


def _why_unservable(model: Any, sites: Sequence[Capabilities]) -> str:
    try:
        adapter = adapter_of(model)
    except ConfigError as error:
        return str(error)
    scales = all(can.adapters is not None and can.adapters.scales for can in sites)
    return why_unservable(adapter.settings, scales=scales) or ""


def why_not_sent(trainer: Any, config: Config) -> str:
    """Return the reason why this process cannot send weights to servers, or an empty string if it can."""
    if config.weights is WeightsRoute.DISK:
        return "weights: disk"
    if isinstance(config.engine, OpenAIEngineConfig):
        return "servers of this kind accept no other weights"
    if is_adapted(trainer.accelerator.unwrap_model(trainer.model)):
        return "a PEFT model is sent as an adapter, or merged"
    sharding = sharding_of(trainer)
    return f"{sharding} leaves no parameters that could be sent" if sharding in UNREADABLE else ""


def sends_weights(trainer: Any, scheduler: Any, config: Config, *, has_weights_dir: bool) -> bool:
    """Return True if this process sends weights to the servers. Call it on every rank; all get the same result.

    Raises ConfigError if this process cannot send weights and the settings allow no other way.
    """
    why = why_not_sent(trainer, config)
    if not why and trainer.accelerator.is_main_process:
        why = why_not_taken(scheduler)
    return may_send(str(of_all_ranks(trainer, why)[0]), config, has_weights_dir=has_weights_dir)


def why_not_taken(scheduler: Any) -> str:
    """Return the reason why the servers accept no weights from this process, or an empty string if they do."""
    names = [e.name for e in scheduler.engines if not (e.capabilities.collective or e.capabilities.takes_tensors)]
    return f"engine {names[0]} accepts none from there, and april doctor shows what it would need" if names else ""


def may_send(why_not: str, config: Config, *, has_weights_dir: bool) -> bool:
    """Return True if ``why_not`` is empty. Otherwise raises ConfigError unless a directory can be used instead."""
    if why_not and not has_weights_dir:
        raise ConfigError(f"weights go through a directory ({why_not}): give rollout(weights_dir=...)")
    if why_not and config.weights is WeightsRoute.COLLECTIVE:
        raise ConfigError(f"weights: collective: {why_not}")
    return not why_not


def why_unmerged(trainer: Any) -> str:
    """Return the reason why a PEFT model cannot be merged for servers, or an empty string if it can."""
    if sharding := sharding_of(trainer):
        return (
            f"PEFT model under {sharding}: adapters are merged on a rank with the whole model, but no rank has it; use "
            "DDP, or generate with the embedded engine"
        )
    if trains_tied_layers(trainer.model):
        return (
            "PEFT model whose adapters train the embedding or the output layer, which are tied (tie_word_embeddings): "
            "servers hold one tensor for both; leave these layers out of the adapter, or untie them first"
        )
    return ""


def write_weights(trainer: Any, folder: Path, *, as_adapter: bool = False) -> None:
    """Write the merged model, or only the adapter. Call it on every rank: shards are gathered, and rank 0 writes."""
    accelerator = trainer.accelerator
    if as_adapter:
        here = bool(accelerator.is_main_process)
        if here:
            shutil.rmtree(folder, ignore_errors=True)  # removes files of an interrupted run
        adapter_of(accelerator.unwrap_model(trainer.model)).write(folder, writes=here)
        return
    parts = {}
    if sharding_of(trainer):
        parts["state_dict"] = accelerator.get_state_dict(trainer.model_wrapped)
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(trainer.model)
        if getattr(model, "peft_config", None) is not None:
            model = merged_copy(model)
        model.save_pretrained(folder, **parts)


def trains_tied_layers(model: Any) -> bool:
    """Return True if adapters change the embedding or output layer of a PEFT model that ties the two."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return False
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(hasattr(layer, "base_layer") or hasattr(layer, "modules_to_save") for layer in layers)
