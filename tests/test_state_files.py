"""Files of states: nothing that was changed passes them, and no token is copied on the way."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_machine import A, CoreMachine, asked

from april.core import snapshot
from april.core.rollout_core import RolloutCore
from april.core.state_checksum import State, seal, verify_checksum
from april.driver.wire_checks import copied
from april.engines.protocol import Chunk
from april.errors import CheckpointError
from april.serialization.state_file import read_state, write_state

KIND = "rollouts"
TOKENS = 20_000
ENGINES = (A,)


def running(count: int = TOKENS) -> CoreMachine:
    """Eight requests in flight, each with so many tokens in long chunks, as the driver puts them onto tapes."""
    m = asked(10**6, n=1, samples=4, over=2, max_response_len=10**6)
    for attempt in m.in_flight.values():
        for _ in range(2):
            ids, logprobs = np.arange(count // 2, dtype=np.int32) % 100 + 5, np.full(count // 2, -0.5, np.float32)
            chunk = copied(Chunk(ids, logprobs, m.core.clock.current), ())
            attempt.tape.append(chunk.tokens, chunk.logprobs, chunk.version)
    return m


def saved(path: Path, m: CoreMachine) -> State:
    """A file with a state, which is returned as well."""
    state = seal(KIND, {"core": snapshot.take(m.core, None)})
    write_state(path, "trainer", {"state": state, "late": [b"x" * 3000, 5]})
    return state


def test_a_state_takes_no_copy_of_its_tokens(tmp_path: Path) -> None:
    """Collecting, sealing, writing, reading, checking and restoring take a small part of the tokens' memory each."""
    m = running()
    held = 8 * TOKENS * len(m.in_flight)
    tracemalloc.start()
    saved(tmp_path / "state", m)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    state = read_state(tmp_path / "state", "trainer")["state"]
    verify_checksum(KIND, state)
    core, trial = (RolloutCore(m.core.settings, ENGINES) for _ in range(2))
    snapshot.move(snapshot.restore(trial, state["core"]), core)
    read = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert (held, core.tokens.held) == (8 * core.tokens.held, TOKENS * len(m.in_flight))
    assert written < 0.2 * held
    assert read < 1.3 * held


def test_what_arrives_later_is_not_in_the_state() -> None:
    """A state is that of the moment at which it was collected, whatever has happened when it is made of that."""
    m = running(1000)
    state = snapshot.take(m.core, None)
    frozen = snapshot.Freezer(m.core).finish(None)
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 30)
    m.finish(0)
    m.finish_aborts()
    m.update()
    assert frozen() == state


def test_no_bit_of_long_values_can_be_changed(tmp_path: Path) -> None:
    """A flip is refused by the file's checksum, or by that of the state if its tokens are concerned."""
    path = tmp_path / "state"
    saved(path, running(2000))
    data, rng, found = path.read_bytes(), random.Random(1), set()
    for _ in range(60):
        bits = bytearray(data)
        bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
        path.write_bytes(bits)
        with pytest.raises(CheckpointError) as caught:
            verify_checksum(KIND, read_state(path, "trainer")["state"])
        found.add(str(caught.value).partition(":")[0])
    assert {f"april's state in {path} is damaged", "the state is damaged"} <= found
    for length, words in ((0, "is cut short"), (3, "is cut short"), (len(data) // 2, "cannot be read|is damaged")):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=words):
            read_state(path, "trainer")


def test_long_values_in_the_data_of_prompts_are_checked(tmp_path: Path) -> None:
    """The checksum of a state leaves out data that has none; the file's covers it."""
    path, secret = tmp_path / "state", b"k" * 5000
    state: dict[str, Any] = seal(KIND, {"groups": [{"data": {"image": secret}, "unchecked": ["image"]}]})
    write_state(path, "trainer", {"state": state})
    data = path.read_bytes()
    assert read_state(path, "trainer") == {"state": state}
    path.write_bytes(data.replace(secret, b"j" + secret[1:]))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state(path, "trainer")
