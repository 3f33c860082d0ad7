"""TensorBoard: scalars and texts in an event file, by TensorBoard's own writer; torch is not needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from april.export.exporter import PREFIX, named
from april.export.texts import SampleText
from april.extras import require


class TensorBoard:
    """Writes event files.

    Args:
        directory: for them, such as ``runs/tensorboard``.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        require("april.export.TensorBoard", "tensorboard", extra=None)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(os.fspath(directory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars."""
        self._add([{"tag": name, "simple_value": value} for name, value in named(metrics).items()], step)

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """One text each, indented, so that nothing in it is Markdown."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        values = []
        for number, text in enumerate(texts):
            said = (
                f"reward {text.reward:g}, {text.tokens} tokens, age {text.age}, cut {text.cuts} times, ended by "
                f"{text.finish}\n\nprompt:\n\n{_indented(text.prompt)}\n\nresponse:\n\n{_indented(text.response)}"
            )
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
            tensor = TensorProto(dtype=DT_STRING, string_val=[said.encode()], tensor_shape=shape)
            values.append({"tag": f"{PREFIX}sample_{number}", "tensor": tensor, "metadata": kind})
        self._add(values, step)

    def close(self) -> None:
        """The file is complete."""
        self._writer.close()

    def _add(self, values: list[dict[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value) for value in values])
        now = datetime.now(UTC).timestamp()  # the axis of dates; nothing is decided by it
        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
