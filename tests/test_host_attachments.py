"""What tokens bring along between the core's process and a host: images once, rows once, and nothing that is a lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from core_machine import settings
from host_sides import SAMPLING, HostSides, function_at_work, started, submitted

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Attachment, Placed
from april.core.types import Attempt, EngineFinish
from april.errors import AttachmentError, WireError
from april.processes import messages as wire
from april.processes.brought_along import RowsCome, pieces
from april.processes.messages import ProtocolError

IMAGE = Attachment.of("image", b"a picture" * 1000)
OTHER = Attachment.of("image", b"b picture" * 1000)
HERE = (Placed(IMAGE, 1, 1, (2,)),)
NAMES = ("experts", "states")


def with_images(attached: tuple[Placed, ...] = HERE, **changes: Any) -> tuple[HostSides, list[Attempt]]:
    """A step whose requests run on the host; all prompts have these attached."""
    chosen = {"n": 1, "samples": 4, "has_reward": False, "attachments": ("image",)} | changes
    functions = bool(chosen.pop("functions", False))
    sides = HostSides(settings(**chosen), functions=functions)
    sides.attached = attached
    sides.pump.post(ev.StepRequested())
    return sides, []


def attached_messages(frame: bytes | None) -> list[Any]:
    """The attachments in a frame."""
    return [m for m in msgspec.msgpack.decode(frame or b"\x90") if m[0] == 15]


# -------------------------------------------------------------------- attachments


def test_an_image_travels_once_for_a_group_and_every_request_has_it() -> None:
    """Four samples of one group, and those that go on, are sent one copy; all requests there have the same bytes."""
    sides, _ = with_images()
    frame = sides.desk.take()
    assert frame is not None
    assert len(attached_messages(frame)) == 1
    assert len(IMAGE.data or b"") < len(frame) < 1.2 * len(IMAGE.data or b"")
    attempts = submitted(list(sides.mirror.receive(frame)))  # type: ignore[arg-type]
    assert [a.attached for a in attempts] == [HERE] * 4
    assert len({id(a.attached[0].attachment.data) for a in attempts}) == 1
    assert attempts[0].attached[0].attachment.data == IMAGE.data
    for attempt in attempts:
        sides.ends(attempt, 3, EngineFinish.ABORT)
    sides.up()
    again = sides.desk.take()
    assert len(submitted(list(sides.mirror.receive(again or b"")))) == 4  # type: ignore[arg-type]
    assert not attached_messages(again)
    assert len(again or b"") < 1000


def test_images_are_forgotten_with_their_group_and_sent_again_with_another() -> None:
    """Nothing is kept for a group that is settled, on either side; the next group has its own copy."""
    sides, _ = with_images(samples=1)
    for _ in range(3):
        (attempt,) = submitted(sides.down())
        assert attempt.attached[0].attachment.data == IMAGE.data
        sides.ends(attempt)
        sides.up()
        sides.down()
        assert sides.batches.pop()
        assert len(sides.desk._attached) == len(sides.mirror._attached) == 0
        sides.pump.post(ev.StepRequested())


def test_an_image_in_a_file_travels_as_bytes_or_where_it_cannot_be_read_as_its_path(tmp_path: Path) -> None:
    """A host needs no disk in common with the core; a file that is not there for the core may be there for the host,
    whose engine says what is wrong if it is not.
    """
    path = tmp_path / "a.png"
    path.write_bytes(IMAGE.data or b"")
    kept = (Placed(Attachment("image", IMAGE.digest, IMAGE.size, None, str(path)), 1, 1, (2,)),)
    for there in (True, False):
        if not there:
            path.unlink()
        sides, _ = with_images(kept)
        attempts = submitted(sides.down())
        came = attempts[0].attached[0].attachment
        assert (came.digest, came.size) == (IMAGE.digest, IMAGE.size)
        assert (came.data, came.path) == ((IMAGE.data, "") if there else (None, str(path)))


def test_a_function_on_a_host_brings_images_to_the_core_once() -> None:
    """A call's new image is the core's, with its bytes; the request that follows finds it on the host already."""
    sides, _ = with_images(samples=1, functions=True, has_reward=True)
    sample = started(sides.down())
    tokens = np.array([1, 2, 0, 7, 8, 9], np.int32)
    attached = (*HERE, Placed(OTHER, 4, 2, (2,)))
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, tokens, 1, True, attached))
    frame = sides.up()
    assert [m[3] for m in attached_messages(frame)] == [OTHER.digest]
    down = sides.desk.take()
    assert not attached_messages(down)
    (attempt,) = submitted(list(sides.mirror.receive(down or b"")))  # type: ignore[arg-type]
    assert attempt.attached == attached
    held = sides.sample(attempt).chains[-1].attached
    assert held == attached
    assert held[1].attachment.data == OTHER.data
    assert held[1].attachment.path == ""


def test_an_image_in_a_file_of_the_host_comes_as_bytes(tmp_path: Path) -> None:
    """The core reads no file that a host names: the host reads it; one that is gone is an error of the call."""
    sides, _ = with_images((), samples=1, functions=True, has_reward=True)
    sample = started(sides.down())
    (tmp_path / "a.png").write_bytes(OTHER.data or b"")
    there = Attachment("image", OTHER.digest, OTHER.size, None, str(tmp_path / "a.png"))
    call = ev.CallMade(sample.id, SAMPLING, np.array([1, 2, 0, 7], np.int32), 1, True, (Placed(there, 3, 1, (2,)),))
    sides.mirror.post(call)
    (message,) = attached_messages(sides.up())
    assert message[5:] == [OTHER.data, ""]
    (tmp_path / "a.png").unlink()
    sides, _ = with_images((), samples=1, functions=True, has_reward=True)
    started(sides.down())
    with pytest.raises(AttachmentError, match="cannot be read"):
        sides.mirror.post(call)


LIES = {
    "another digest than that of its bytes": (wire.Attach(0, "image", OTHER.digest, 3, b"abc", ""), (), "digest"),
    "another size": (wire.Attach(0, "image", OTHER.digest, 3, OTHER.data, ""), (), "digest"),
    "a file of the core's": (wire.Attach(0, "image", OTHER.digest, 3, None, "/etc/passwd"), (), "without its bytes"),
    "never sent": (None, (wire.Place("0" * 64, 3, 1, (2,)),), "never sent"),
    "beyond its tokens": (None, (wire.Place(IMAGE.digest, 3, 9, (2,)),), "attached to tokens 3 to 12 of 4"),
    "before the one before": (
        None, (wire.Place(IMAGE.digest, 2, 1, (2,)), wire.Place(IMAGE.digest, 2, 1, (2,))), "from 3 on",
    ),
    "an id outside of the vocabulary": (None, (wire.Place(IMAGE.digest, 3, 1, (-1,)),), "outside of the vocabulary"),
    "another kind": (
        wire.Attach(0, "video", OTHER.digest, OTHER.size, OTHER.data, ""), (wire.Place(OTHER.digest, 3, 1, (2,)),),
        "another kind than image",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_attachment_that_cannot_be_cuts_the_host_off(lie: Any) -> None:
    """The call is not made, the core has heard nothing."""
    attach, places, why = lie
    sides, _ = with_images(samples=1, functions=True, has_reward=True)
    sample = started(sides.down())
    added = bytearray(np.array([7], np.int32))
    called = wire.Called(*sample.id, sides.mirror._runs[sample.id], 1, SAMPLING, 0, added, True, 0, places)
    said = [called] if attach is None else [attach, called]
    with pytest.raises(ProtocolError, match=why):
        sides.hear(sides.desk.receive(wire.encode(said)))
    assert not sides.core.attempts
    assert OTHER.digest not in sides.desk._attached._here[0] or "kind" in why


def test_what_a_run_says_that_was_given_up_is_no_lie() -> None:
    """A function that the core has cancelled brings an image; the next one of its sample names it by its digest."""
    sides, sample = function_at_work()
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, np.array([1, 2, 0, 7], np.int32), 1, True, HERE))
    frame = sides.mirror.take()
    sides.desk._known[sample.id].run = 0
    sides.hear(sides.desk.receive(frame or b""))
    assert IMAGE.digest not in sides.desk._attached._there.get(0, ())  # nobody knows whether the host has it still
    assert sides.desk._attached.placed(0, [wire.Place(IMAGE.digest, 3, 1, (2,))])[0].attachment.data == IMAGE.data


# -------------------------------------------------------------------- rows


def with_rows(**changes: Any) -> tuple[HostSides, Attempt]:
    """A request that runs on the host and must bring rows."""
    sides, _ = with_images((), **({"samples": 1, "extras": NAMES} | changes))
    (attempt,) = submitted(sides.down())
    return sides, attempt


def rows_for(attempt: Attempt, first: int = 0) -> dict[str, Any]:
    """Rows of all tokens of an attempt and of those before that have none."""
    count = len(attempt.token_ids) + attempt.tape.count - 1 - attempt.extras_from
    each = np.arange(first, first + count)
    return {
        "experts": np.repeat(each.astype(np.uint8), 6).reshape(count, 3, 2),
        "states": np.repeat(each.astype(np.float16)[:, None], 5, axis=1)[:, ::-1],
    }


def test_tokens_that_are_to_have_rows_are_not_told_before_them() -> None:
    """A request that runs has nothing that a state could hold; what is asked of it travels with it."""
    sides, attempt = with_rows()
    there = sides.core.attempts[attempt.id]
    assert (attempt.extras, attempt.extras_from, attempt.tape.needs_rows) == (NAMES, there.extras_from, True)
    sides.brings(attempt, 4)
    sides.mirror.report()
    assert sides.mirror.take() is None


def end_with_rows(sides: HostSides, attempt: Attempt, rows: dict[str, Any], count: int = 3) -> None:
    """It ends with so many tokens and these rows."""
    sides.brings(attempt, count)
    attempt.tape.extras = rows
    sides.mirror.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))


def test_rows_arrive_as_they_were_made() -> None:
    """Whatever their type and shape; they may be written into, and the host has forgotten them."""
    sides, attempt = with_rows()
    there = sides.core.attempts[attempt.id]
    attempt.tape.count = 3
    rows = rows_for(attempt)
    attempt.tape.count = 0
    end_with_rows(sides, attempt, rows)
    assert not attempt.tape.extras
    sides.up()
    assert there.tape.count == 3
    for name, array in rows.items():
        came = there.tape.extras[name]
        assert came.dtype == array.dtype
        assert np.array_equal(came, array)
        assert came.flags.writeable


def test_an_end_without_rows_says_that_its_tokens_do_not_count() -> None:
    """An engine that gives none has wasted its tokens: they are counted, on both sides, and none is kept."""
    sides, attempt = with_rows()
    there = sides.core.attempts[attempt.id]
    sides.ends(attempt, 5)
    sides.up(2)
    assert (there.tape.count, there.tape.bare) == (0, 5)


def test_a_host_that_is_lost_between_tokens_and_rows_has_brought_no_tokens() -> None:
    """Its frames may end anywhere: tokens whose rows are missing are bare."""
    sides, attempt = with_rows()
    there = sides.core.attempts[attempt.id]
    came = wire.Came(attempt.id, 0, bytearray(8), bytearray(8), ((sides.core.clock.current, 2),))
    sides.hear(sides.desk.receive(wire.encode([came])))
    assert there.tape.sure().count == 0  # as a state is saved
    sides.hear(sides.desk.lost("its cable was pulled"))
    assert (there.tape.count, there.tape.bare) == (0, 2)


ROWS = {
    "experts": np.zeros((5, 3, 2), np.uint8),
    "states": np.zeros((5, 5), np.float16),
}
FALSE_ROWS: dict[str, dict[str, Any]] = {
    "none at all": {},
    "of one name alone": {"experts": ROWS["experts"]},
    "one too few": ROWS | {"states": ROWS["states"][1:]},
    "too many for its budget": ROWS | {"states": np.zeros((1003, 5), np.float16)},
    "of a name that nobody asked for": ROWS | {"more": ROWS["states"]},
    "dates": ROWS | {"states": np.zeros((5, 5), "M8[s]")},
    "truth values": ROWS | {"states": np.zeros((5, 5), np.bool_)},
    "without numbers": ROWS | {"states": np.zeros((5, 0), np.float16)},
    "wide": ROWS | {"states": np.zeros((5, (1 << 20) + 1), np.uint8)},
}


@pytest.mark.parametrize("rows", FALSE_ROWS.values(), ids=FALSE_ROWS)
def test_rows_that_cannot_be_cut_the_host_off(rows: dict[str, Any]) -> None:
    """Tokens without right rows are not believed; the core is told that the request is corrupt."""
    sides, attempt = with_rows()
    there = sides.core.attempts[attempt.id]
    said: list[wire.Message] = [
        wire.Came(attempt.id, 0, bytearray(12), bytearray(12), ((sides.core.clock.current, 3),)),
        *pieces(attempt.id, rows),
        wire.Ended(attempt.id, EngineFinish.ABORT, False, 3),
    ]
    with pytest.raises(ProtocolError, match=attempt.id):
        sides.hear(sides.desk.receive(wire.encode(said)))
    assert not there.tape.extras
    sides.hear(sides.desk.lost("it lied"))
    assert not there.tape.count


def test_rows_after_others_have_their_shape() -> None:
    """What a sample has of one width goes on so."""
    sides, attempt = with_rows()
    sides.core.attempts[attempt.id].call.chain.extras = {name: rows[:0] for name, rows in ROWS.items()}
    said = [
        wire.Came(attempt.id, 0, bytearray(12), bytearray(12), ((sides.core.clock.current, 3),)),
        *pieces(attempt.id, ROWS | {"states": np.zeros((5, 6), np.float16)}),
        wire.Ended(attempt.id, EngineFinish.ABORT, False, 3),
    ]
    with pytest.raises(ProtocolError, match=r"of shape \(6,\), after rows of shape \(5,\)"):
        sides.hear(sides.desk.receive(wire.encode(said)))


def test_only_an_attempt_that_is_to_have_rows_has_tokens_without() -> None:
    """Nor are some tokens bare and others not."""
    sides, attempt = with_rows(extras=())
    bare = wire.Came(attempt.id, 0, bytearray(), bytearray(), (), bare=3)
    with pytest.raises(ProtocolError, match="3 tokens without rows"):
        sides.hear(sides.desk.receive(wire.encode([bare])))
    sides, attempt = with_rows()
    both = wire.Came(attempt.id, 0, bytearray(4), bytearray(4), (((0, 0), 1),), bare=3)
    with pytest.raises(ProtocolError, match="3 tokens without rows"):
        sides.hear(sides.desk.receive(wire.encode([both])))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "<O8"}, "no numbers"), ({"dtype": ">u2"}, "no numbers"), ({"dtype": "u1"}, "no numbers"),
        ({"dtype": "|f1"}, "no numbers"), ({"shape": (-1, -2)}, "shape"), ({"at": 1}, "from row 1 on"),
        ({"at": -1}, "from row -1 on"), ({"data": bytearray(3)}, "3 bytes"), ({"name": "x"}, "nobody"),
    ],
)  # fmt: skip
def test_a_piece_that_is_none_is_refused(changes: dict[str, Any], why: str) -> None:
    """Types that hold more than numbers are never made of what comes over a link."""
    right = {"attempt_id": "a", "name": "n", "dtype": "|u1", "shape": (2,), "at": 0, "data": bytearray(4)}
    with pytest.raises(WireError, match=why):
        RowsCome(["n"], 9).add(wire.Rows(**(right | changes)))


# -------------------------------------------------------------------- sizes


def test_large_things_travel_in_several_frames_and_in_their_order() -> None:
    """100 MB of rows and images of 20 MB: no frame is much longer than its largest message, so that each is a sign of
    life; what follows comes after it.
    """
    sides, attempt = with_rows()
    rows = {"experts": np.zeros((900 + 2, 48, 2304), np.uint8), "states": np.ones((900 + 2, 4), np.float32)}
    rows["experts"][-1] = 7
    end_with_rows(sides, attempt, rows, 900)
    there, sizes = sides.core.attempts[attempt.id], []
    while (frame := sides.mirror.take()) is not None:
        sizes.append(len(frame))
        sides.hear(sides.desk.receive(frame))
    assert sum(sizes) > 98_000_000
    assert max(sizes) < wire.FRAME_BYTES + (10 << 20)
    assert all(np.array_equal(there.tape.extras[name], array) for name, array in rows.items())
    images = [Attachment.of("image", bytes([i]) * 20_000_000) for i in range(3)]
    sides, _ = with_images(tuple(Placed(image, i, 1, (2,)) for i, image in enumerate(images)))
    frames: list[bytes] = []
    while (frame := sides.desk.take()) is not None:
        frames.append(frame)
    assert [len(frame) > 20_000_000 for frame in frames[:3]] == [True] * 3
    commands = [c for frame in frames for c in sides.mirror.receive(frame)]
    (first, *_) = (c.attempt for c in commands if isinstance(c, do.Submit))
    found = [hashlib.sha256(p.attachment.data or b"").hexdigest() for p in first.attached]
    assert found == [image.digest for image in images]
