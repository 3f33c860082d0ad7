"""Attachments: a conversation is continued with what is attached to it and nothing else, held once, over restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_machine import EOS, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Attachment, Placed, before, collapsed
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.types import FinishReason, Prompt
from april.errors import CheckpointError

CAT, DOG = Attachment.of("image", b"a cat"), Attachment.of("image", b"a dog")
FILE = Attachment("image", "f" * 64, 9, path="cats/1.png")
PAD = 7
"""Stands for an image; the model reads three of them."""
TAKES = EngineLimits("e0", 64, None, (EOS,), attachments=("image",))


def with_image(image: Attachment = CAT, at: int = 1) -> Prompt:
    """A prompt of five tokens, three of which an image is read as."""
    return Prompt(np.array([5, PAD, PAD, PAD, 6], np.int32), attached=(Placed(image, at, 3, (PAD,)),))


class Shown(CoreMachine):
    """A core whose prompts have images, one after the other."""

    images = (CAT, DOG)

    def _execute(self, command: do.Command) -> None:
        if isinstance(command, do.DrawPrompts):
            self.commands.append(command)
            first = self.core.context.groups_drawn
            drawn = [with_image(self.images[(first + i) % len(self.images)]) for i in range(command.count)]
            self._pump.post(ev.PromptsDrawn(drawn, False))
        elif isinstance(command, do.CallCompleted) and not self.auto_call:
            self.commands.append(command)  # the test says what its function does next
        else:
            super()._execute(command)


def shown(n: int = 2, samples: int = 2, **options: Any) -> Shown:
    """Two groups in flight, with a cat and a dog."""
    changes = {"attachments": ("image",), "max_response_len": 40}
    m = Shown(settings(n=n, samples=samples, **changes), 20, engines=(TAKES,), **options)
    m.ask()
    return m


def test_every_attempt_has_the_image_of_its_own_group_and_one_copy_of_it() -> None:
    """Cut and resumed, all samples of a group have the same attachment, not a copy of it."""
    m = shown()
    for attempt in list(m.in_flight.values()):
        m.end(attempt.id, 5)
    for attempt in m.in_flight.values():
        (placed,) = attempt.request.attached
        assert placed.attachment is (CAT, DOG)[attempt.sample.id.group]
        assert len(attempt.request.token_ids) == 5 + 5
    m.finish(0, 1)
    for row in m.batches[-1].samples:
        assert row.attached == row.prompt.attached == (Placed((CAT, DOG)[row.id.group], 1, 3, (PAD,)),)


def test_an_engine_that_expands_prompts_is_sent_what_stands_for_an_image() -> None:
    """The tokens of each attachment are replaced, in order; what was generated behind them stays."""
    ids = np.array([5, 7, 7, 7, 6, 7, 7, 40, 41], np.int32)
    two = (Placed(CAT, 1, 3, (PAD,)), Placed(DOG, 5, 2, (8, 9)))
    assert collapsed(ids, two).tolist() == [5, 7, 6, 8, 9, 40, 41]
    assert collapsed(ids, ()) is ids
    assert before(two, 5) == two[:1]


def test_two_images_of_one_size_are_two_conversations() -> None:
    """Equal tokens with another image begin a chain of their own: neither continues the other."""
    m = shown(n=1, samples=1, auto_call=False)
    prompt, sampling = with_image(), SamplingParams(max_tokens=5)
    for number, image in ((1, CAT), (2, DOG)):
        attached = with_image(image).attached
        m.post(ev.CallMade(m.to_call[0], sampling, prompt.token_ids, number, True, attached))
    first, second = m.sample(0).chains
    assert first.attached[0].attachment is CAT
    assert second.attached[0].attachment is DOG
    m.end(m.in_flight[next(iter(m.in_flight))].id)
    told = first.conversation(len(first.tape))
    m.post(ev.CallMade(m.to_call[0], sampling, told, 3, True, with_image(DOG).attached))
    assert len(m.sample(0).chains) == 3, "a cat's conversation went on with a dog"
    m.post(ev.CallMade(m.to_call[0], sampling, told, 4, True, with_image(CAT).attached))
    assert len(m.sample(0).chains) == 3


def test_an_image_that_a_tool_returns_stands_in_the_response() -> None:
    """The environment's tokens may have an attachment; the next attempt has both, and the row tells them apart."""
    m = shown(n=1, samples=1, auto_call=False)
    sampling = SamplingParams(max_tokens=3)
    m.post(ev.CallMade(m.to_call[0], sampling))
    m.end(m.only.id)
    chain = m.sample(0).chains[0]
    have = 5 + len(chain.tape)
    ids = np.concatenate((chain.conversation(len(chain.tape)), np.array([PAD, PAD, PAD, 6], np.int32)))
    both = (*chain.attached, Placed(DOG, have, 3, (PAD,)))
    m.core.handle(ev.CallMade(m.to_call[0], sampling, ids, 2, attached=both))
    assert chain.attached == both
    assert chain.cut(3) == 0
    assert chain.attached == both[:1]


def test_no_attachment_is_cut_in_the_middle() -> None:
    """Where a response has no room for all of an image that a tool returns, it ends before the image."""
    m = shown(n=1, samples=1, auto_call=False)
    m.post(ev.CallMade(m.to_call[0], SamplingParams(max_tokens=3)))
    m.end(m.only.id)
    chain = m.sample(0).chains[0]
    added = np.array([6] * 36 + [PAD] * 3, np.int32)  # room for one more
    ids = np.concatenate((chain.conversation(len(chain.tape)), added))
    placed = Placed(DOG, len(ids) - 3, 3, (PAD,))
    m.core.handle(ev.CallMade(m.to_call[0], SamplingParams(max_tokens=3), ids, 2, attached=(*chain.attached, placed)))
    assert len(chain.tape) == 3 + 36
    assert chain.attached == with_image().attached
    assert not m.in_flight, "a response went on without the image that its function has shown"
    assert chain.calls[-1].finish == FinishReason.LENGTH


def test_a_state_has_the_bytes_of_an_image_that_is_held_as_a_file_too() -> None:
    """An agent has sent the bytes that a prompt has as a file, which may be gone when the state is loaded."""
    m = shown()
    m.images = (CAT, Attachment("image", CAT.digest, CAT.size, path="cats/1.png"))
    m.finish(0, 1)
    m.next_step()
    assert {g.prompt.attached[0].attachment.data for g in m.core.buffer} == {b"a cat", None}
    assert [a["data"] for a in m.saved()["attachments"]] == [b"a cat"]


def test_a_state_has_each_image_once_and_gives_it_back() -> None:
    """By its bytes, or by the path of its file; resumed samples of one group share it again."""
    m = shown()
    m.images = (CAT, FILE)
    for attempt in list(m.in_flight.values()):
        m.end(attempt.id, 5)
    state = m.saved()
    assert {a["digest"]: (a["data"], a["path"]) for a in state["attachments"]} == {
        CAT.digest: (b"a cat", ""), DOG.digest: (b"a dog", ""),
    }  # fmt: skip
    again = m.restarted(state)
    groups = again.core.buffer.groups
    assert [groups[i].prompt.attached for i in (0, 1)] == [with_image(CAT).attached, with_image(DOG).attached]
    for group in groups.values():
        held = {id(p.attachment) for s in group.samples for c in s.chains for p in c.attached}
        assert held == {id(group.prompt.attached[0].attachment)}
    assert all(len(s.chains[0].tape) == 5 for g in groups.values() for s in g.samples)


def test_a_reference_stays_a_reference() -> None:
    """A state has the path and the hash of a file, and none of its bytes."""
    m = Shown(settings(n=1, samples=1, attachments=("image",)), 20, engines=(TAKES,))
    m.images = (FILE,)
    m.ask()
    state = m.saved()
    assert state["attachments"] == [
        {"kind": "image", "digest": "f" * 64, "size": 9, "data": None, "path": "cats/1.png"}
    ]
    again = m.restarted(state)
    (placed,) = again.core.buffer.groups[0].prompt.attached
    assert placed.attachment.path == "cats/1.png"
    assert placed.attachment.data is None


def test_a_later_conversation_keeps_its_own_images_over_a_restart() -> None:
    """Also one whose images are those of the prompt."""
    m = shown(n=1, samples=1, auto_call=False)
    ids = np.array([9, PAD, PAD, PAD], np.int32)
    for number, (start, placed) in enumerate(((5, CAT), (9, CAT), (9, DOG)), 1):
        tokens = with_image().token_ids if start == 5 else ids
        attached = (Placed(placed, 1, 3, (PAD,)),)
        m.post(ev.CallMade(m.to_call[0], SamplingParams(max_tokens=5), tokens, number, True, attached))
    again = m.restarted()
    chains = again.sample(0).chains
    assert [c.attached[0].attachment for c in chains] == [CAT, CAT, DOG]


def test_a_state_with_images_needs_a_run_that_takes_them() -> None:
    """Without a processor, the state is refused before anything of it is used."""
    with pytest.raises(CheckpointError, match="has no processor="):
        shown().restarted(attachments=())
