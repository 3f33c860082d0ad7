"""A process that offers an engine: ``python served_process.py fake|embedded|true KEY [PORT]``; prints its address."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def make(kind: str) -> Any:
    """The engine; made on the loop that uses it."""
    if kind == "fake":
        from conformance_subjects import fake

        return fake(seconds_per_token=0.004)
    if kind == "embedded":
        from tiny_models import tiny_model
        from tiny_tokenizers import tokenizer

        from april.engines.transformers.engine import TransformersEngine

        model = tiny_model(seed=0, vocab_size=tokenizer("text").get_vocab_size())
        return TransformersEngine(model, slots=64, max_len=400, stream_interval=4, check=False)
    from served_lives import TrueEngine

    return TrueEngine(step_s=0.02)


class ServedProcess:
    """The other side: one such process, at the same port whenever it is started."""

    def __init__(self, kind: str, key: str = "key", port: int = 0) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "served_process.py"), kind, key, str(port)], stdout=subprocess.PIPE,
            stderr=self.errors, text=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )  # fmt: skip

    def wait(self) -> str:
        """Its address, once it listens."""
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        self.errors.seek(0)
        assert url, self.errors.read()[-4000:]
        return url

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


if __name__ == "__main__":
    import april

    kind, key, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    april.serve_forever(lambda: make(kind), port=port, key=key, told=lambda url: print(url, flush=True))
