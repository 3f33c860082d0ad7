"""Checks an adapter (LoRA) directory before a server is asked to load it, and says what does not fit.

Invariant: only the settings and the headers of files are read, never a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.engines.http.weight_directories import ADAPTER_FILE
from april.engines.http.wire import read_json
from april.engines.protocol import AdapterSite
from april.text.server_text import clean

TENSORS = "adapter_model.safetensors"
MOST_HEADER_BYTES = 64 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""PEFT initialisations that leave the base model unchanged. Others, such as PiSSA, change it."""
_CHANGES = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora",
    "modules_to_save", "trainable_token_indices",
)  # fmt: skip
"""Adapter settings that change the computation, and that no known server supports."""
_SCALES = ("use_rslora", "rank_pattern", "alpha_pattern")
"""Adapter settings that change the scale, and that some servers support."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's settings and tensor shapes, read from its files without the tensors."""

    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes, indexed by tensor name."""

    @property
    def rank(self) -> int:
        """Return the largest rank of any layer."""
        pattern = self.settings.get("rank_pattern")
        ranks = [self.settings.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
        return max((r for r in ranks if isinstance(r, int)), default=0)


def why_unservable(settings: Mapping[str, Any], *, scales: bool) -> str | None:
    """Return why a server's results would differ from PEFT's with these adapter settings; None if they would agree.

    ``scales`` means that the server supports the settings in ``_SCALES``.
    """
    kind = settings.get("peft_type")
    if str(getattr(kind, "value", kind)) != "LORA":
        return f"it is of the kind {clean(getattr(kind, 'value', kind))}, but servers only accept LoRA"
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_INITS:
        return (
            f"it began with init_lora_weights={clean(start)}, which changes the base weights, and servers do not have "
            "the changed ones"
        )
    if settings.get("bias", "none") != "none":
        return "it trains biases of the base model, which servers do not accept"
    for name in _CHANGES if scales else _CHANGES + _SCALES:
        if settings.get(name):
            return f"it has {name}, which the server does not support"
    return None


def why_refused(path: str, site: AdapterSite | None) -> str | None:
    """Return why a server must not be asked to load the adapter in ``path``; None if it may be asked.

    ``site`` says which adapters the server accepts; None means that it accepts none.
    """
    if site is None:
        return f"{path} contains {ADAPTER_FILE}, so it is an adapter (LoRA), but no engine here accepts adapters"
    try:
        adapter = _read(Path(path))
    except _Unreadable as error:
        return f"{path} is not a complete adapter: {clean(error)}; save it with PEFT's save_pretrained, as safetensors"
    if (why := why_unservable(adapter.settings, scales=site.scales)) is not None:
        return f"the adapter in {path} cannot be served: {why}; give merged weights"
    if site.max_rank is not None and adapter.rank > site.max_rank:
        return (
            f"the adapter in {path} has rank {adapter.rank}, but the server accepts ranks up to {site.max_rank}; start "
            f"it with --max-lora-rank {adapter.rank}"
        )
    if (why := _why_of_another_base(adapter.shapes, site.base)) is not None:
        return f"the adapter in {path} belongs to another base model than the server's: {why}"
    return None


class _Unreadable(Exception):
    """Raised for an unreadable adapter directory; its message becomes the end of a longer error message."""


def _read(where: Path) -> Adapter:
    try:
        settings = read_json((where / ADAPTER_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise _Unreadable(f"{ADAPTER_FILE} cannot be read ({type(error).__name__})") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("r", 0), int):
        raise _Unreadable(f"{ADAPTER_FILE} does not contain the settings of an adapter")
    try:
        return Adapter(settings, {name: shape for name, (_, shape) in header_of(where / TENSORS).items()})
    except (OSError, ValueError) as error:
        raise _Unreadable(f"{TENSORS} cannot be read ({type(error).__name__})") from None


def header_of(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} from the header of a safetensors file.

    Raises OSError if the file cannot be read, and ValueError if it is not a complete safetensors file.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= MOST_HEADER_BYTES:
            raise ValueError("the header of safetensors is missing")
        header = read_json(opened.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header of safetensors is not a mapping")
        rest = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        if opened.seek(0, 2) < 8 + length + rest:
            raise ValueError("the file is truncated")
    return {n: (str(t["dtype"]), tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}


def base_shapes(root: object) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's matrices by layer name; empty if its directory ``root`` is not on this machine."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(Path(str(root)).glob("*.safetensors")):
            for name, (kind, shape) in header_of(file).items():
                if kind in _FLOATS and len(shape) == 2:  # quantized weights are packed integers of other shapes
                    found[name.removesuffix(".weight")] = shape
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found


_PART = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>A|B)(?:\.[^.]+)?\.weight$")


def _why_of_another_base(shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return which tensor does not fit the base model, as servers silently accept too small ones; None if all fit."""
    for name, shape in shapes.items():
        found = _PART.match(name)
        if found is None or found["layer"] not in base or len(shape) != 2:
            continue
        rows, columns = base[found["layer"]]
        mine, theirs = (shape[1], columns) if found["part"] == "A" else (shape[0], rows)
        if mine != theirs:
            return f"{clean(name)} has {mine} values, but the model's layer has {theirs}"
    return None
