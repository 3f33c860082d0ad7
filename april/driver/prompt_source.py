"""Draws prompts from the user's iterable, epoch after epoch, and checks each prompt as it is drawn.

``fetch`` may run in a thread while the event loop runs; its prompts count as drawn once ``hand_over`` is called.
Invariants: a prompt is identified by (epoch, position), and is handed over once, also across a restart. Each epoch has
a digest of its drawn prompts, by which april notices other prompts, or another order, after a restart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import tee
from typing import Any, NamedTuple

from april.core.types import Prompt
from april.driver.prompt_reader import PromptReader, iterate
from april.driver.user_code import describe
from april.errors import CheckpointError, ConfigError

log = logging.getLogger("april")

NOTHING_DRAWN = b""


class Position(NamedTuple):
    """Position of a source: the epoch, the number of prompts drawn in this epoch, and their digest."""

    epoch: int = 0
    position: int = 0
    digest: bytes = NOTHING_DRAWN
    """Digest of the prompts drawn in this epoch, in order."""
    extended: bool = False
    """True if some of these prompts came from ``extend``."""


class Draw(NamedTuple):
    """Result of one draw; ``position`` is the source's position after it."""

    prompts: list[Prompt]
    exhausted: bool
    error: str | None
    position: Position


class RemainingPrompts(NamedTuple):
    """Prompts that follow the ``position`` of a saved state: those of ``iterator``, then those of ``more`` in turn."""

    position: Position
    iterator: Iterator[Any]
    more: list[Iterator[Any]]
    known: int
    """Number of iterators from ``extend`` that were pending when this object was made, which ``more`` replaces."""
    found: bytes
    """Digest of the skipped prompts; equal to ``position.digest`` unless prompts are ``missing``."""
    missing: int
    """Number of prompts still to be skipped, which the user must give to ``extend`` again."""


class PromptSource:
    """Draws prompts from an iterable whose items a :class:`PromptReader` can read.

    Args:
        prompts: Iterable of prompts, iterated once per epoch. A method ``set_epoch(epoch)``, as shuffling samplers
            have, is called before each epoch, and a method ``expect(count)`` before each draw of up to ``count``
            prompts. If its attribute ``resumes`` is true, the code that supplies it restores its position after a
            restart, and this class skips no prompts.
        reader: Reader that makes a Prompt of each item, or the size of the vocabulary for a default reader.
        epochs: Number of epochs; None means no end.
        refuse: Callback for a further check of each prompt; raises ConfigError if the prompt is unusable.

    Raises:
        ConfigError: ``prompts`` is not an iterable, or can be iterated only once although there are several epochs.
    """

    def __init__(
        self, prompts: Iterable[Any], reader: PromptReader | int, epochs: int | None = 1,
        refuse: Callable[[Prompt], None] | None = None,
    ) -> None:  # fmt: skip
        self._reader = PromptReader(reader) if isinstance(reader, int) else reader
        self._refuse = refuse
        self._epochs = epochs
        self._prompts = prompts
        self._error: str | None = None
        self.first: Prompt | None = None
        """First prompt that was drawn in this process."""
        self._unusable = False
        """True from the draw of an unusable prompt until its error is returned; the prompt is counted only then."""
        self.epoch = 0
        """Number of complete epochs."""
        self.position = 0
        """Number of prompts drawn in the current epoch."""
        self._digest = NOTHING_DRAWN
        self._extended = False
        self._to_skip = 0
        self._expected = NOTHING_DRAWN
        """Digest that the skipped prompts must have."""
        self._changed_error: str | None = None
        """Error message if ``extend`` gave other prompts than before a restart, which ends all draws; else None."""
        self._handed_over = Position()
        """Position after the prompts that were handed over."""
        self._extensions: list[Iterator[Any]] = []
        """Iterators from ``extend`` that no draw has reached yet."""
        self._failed = False
        """True if the iterator has raised and yielded nothing since."""
        self._source_error = ""
        """Error message if the iterator has failed and ended; empty otherwise."""
        self.is_slow = self._reader.is_slow or not isinstance(prompts, Sequence)
        """True if a draw may take long, because it may read files or query a server."""
        self._iterator = self._begin(prompts, 0)
        self._once = self._iterator is prompts
        if epochs != 1 and self._once:
            raise ConfigError(
                f"prompts can be iterated only once ({type(prompts).__name__}), but several epochs are wanted; give a "
                "list or a data set, or an object whose __iter__ starts over"
            )

    def _begin(self, prompts: Iterable[Any], epoch: int) -> Iterator[Any]:
        set_epoch = getattr(prompts, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iterate(prompts)

    def extend(self, prompts: Iterable[Any]) -> None:
        """Append prompts to those of the last epoch.

        Raises:
            ConfigError: ``prompts`` is not an iterable, or the last epoch has not begun.
        """
        if self._epochs is None or self.epoch + 1 < self._epochs:
            raise ConfigError(
                f"extend: epoch {self.epoch} of {self._epochs or 'endless'} is not the last one, and the prompts must "
                "be the same in every epoch; add prompts during the last epoch"
            )
        # only queued here, as a draw in a thread may be using the current iterator
        self._extensions.append(self._begin(prompts, self.epoch))
        self.is_slow |= not isinstance(prompts, Sequence)

    # ---------------------------------------------------------------- drawing

    def draw(self, count: int) -> tuple[list[Prompt], bool, str | None]:
        """Return up to ``count`` prompts, whether the source has ended, and the error of the next prompt or None."""
        return self.hand_over(self.fetch(count))

    def hand_over(self, draw: Draw) -> tuple[list[Prompt], bool, str | None]:
        """Count fetched prompts as drawn, and return the result of :meth:`draw`.

        If ``extend`` has added prompts since they were fetched, the source has not ended.
        """
        self._handed_over = draw.position
        if self.first is None and draw.prompts:
            self.first = draw.prompts[0]
        return draw.prompts, draw.exhausted and not self._extensions, draw.error

    def fetch(self, count: int) -> Draw:
        """Draw up to ``count`` prompts without counting them as handed over; may run in a thread, one at a time."""
        prompts, exhausted, error = self._fetch(count)
        return Draw(prompts, exhausted, error, Position(self.epoch, self.position, self._digest, self._extended))

    def _fetch(self, count: int) -> tuple[list[Prompt], bool, str | None]:
        prompts: list[Prompt] = []
        if callable(expect := getattr(self._prompts, "expect", None)):
            expect(count)
        while len(prompts) < count:
            if self._error is not None:
                # valid prompts that were drawn before the error are handed over first
                if prompts:
                    break
                error, self._error = self._error, None
                if self._unusable:
                    self.position += 1
                    self._digest = _next_digest(self._digest, None)
                self._unusable = False
                return [], False, error
            try:
                self._skip()
                if self._changed_error is not None:
                    return prompts, False, self._changed_error
                item = next(self._iterator)
                self._failed = False
            except StopIteration:
                if self._failed and not self._source_error:
                    self._source_error = (
                        f"the prompt source failed after {self.position} prompts of epoch {self.epoch}, and gives no "
                        "more; restart from a checkpoint, or add the remaining prompts with extend()"
                    )
                if self._extensions:
                    self._iterator, self._extended = self._extensions.pop(0), True
                    self._failed, self._source_error = False, ""
                    continue
                if self._source_error:
                    self._error = self._source_error
                    continue
                try:
                    if not self._next_epoch():
                        return prompts, True, None
                except (Exception, SystemExit) as error:
                    log.warning("epoch %d could not begin", self.epoch + 1, exc_info=error)
                    self._error = f"the prompt source failed to begin epoch {self.epoch + 1}: {describe(error)}"
                continue
            except (Exception, SystemExit) as error:
                log.warning("the prompt source failed at prompt %d", self.position, exc_info=error)
                self._error = f"the prompt source failed at prompt {self.position}: {describe(error)}"
                self._failed = True
                continue
            try:
                prompts.append(self._prompt(item, self.position, self.epoch))
                self.position += 1
                self._digest = _next_digest(self._digest, prompts[-1])
            except ConfigError as error:
                self._error, self._unusable = str(error), True
        return prompts, False, None

    def _prompt(self, item: Any, position: int, epoch: int = 0, *, again: bool = False) -> Prompt:
        """Make a prompt of an item; raises ConfigError if it is unusable. ``again`` is True if it was drawn before."""
        prompt = self._reader.read(item, position, epoch, again=again)
        if self._refuse is not None:
            self._refuse(prompt)
        return prompt

    def _next_epoch(self) -> bool:
        """Begin the next epoch, or set the error if prompts are missing; returns False after the last epoch."""
        last = self._epochs is not None and self.epoch + 1 >= self._epochs
        if self._to_skip or not (last or self.position):
            drawn = self.position - self._to_skip
            self._error = (
                _ended(drawn, self.epoch, self.position) if self._to_skip or self.epoch else "there are no prompts"
            )
            return True
        if last:
            return False
        self._iterator = self._begin(self._prompts, self.epoch + 1)
        self.epoch += 1
        self.position = 0
        self._digest, self._extended = NOTHING_DRAWN, False
        return True

    # ---------------------------------------------------------------- restarts

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last prompts handed over; a running draw does not count."""
        position = self._handed_over
        return {**position._asdict(), "digest": position.digest.hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another source over the same prompts; see :meth:`remaining_after` for errors."""
        self.continue_with(self.remaining_after(state))

    def remaining_after(self, state: Mapping[str, Any]) -> RemainingPrompts:
        """Skip the prompts drawn before a restart and check that they are the same; takes as long as drawing them.

        The source does not change until :meth:`continue_with`. Prompts that came from ``extend`` before the restart may
        be given to ``extend`` again later.

        Raises:
            CheckpointError: the prompts differ, are fewer or have another order; or the state is damaged, or was saved
                in an epoch that this source does not have.
        """
        saved = _position_of(state)
        epoch = saved.epoch
        if self._epochs is not None and epoch >= self._epochs:
            raise CheckpointError(
                f"the state was saved in epoch {epoch}, but the configuration has epochs={self._epochs}"
            )
        if getattr(self._prompts, "resumes", False):
            more = list(self._extensions)
            return RemainingPrompts(saved, self._iterator, more, len(more), saved.digest, 0)
        once = self._once
        if once:
            self._iterator, iterator = tee(self._iterator)
        else:
            try:
                iterator = self._begin(self._prompts, epoch)
            except (Exception, SystemExit) as error:
                raise CheckpointError(f"epoch {epoch} could not begin: {describe(error)}") from error
        pairs = [tee(rest) for rest in self._extensions]
        self._extensions[: len(pairs)] = [mine for mine, _ in pairs]
        more = [theirs for _, theirs in pairs]
        try:
            return self._skip_drawn(RemainingPrompts(saved, iterator, more, len(more), NOTHING_DRAWN, saved.position))
        except BaseException:
            if not once:
                self._iterator = self._begin(self._prompts, self.epoch)
            raise

    def _skip_drawn(self, rest: RemainingPrompts) -> RemainingPrompts:
        epoch, count, digest, extended = rest.position
        iterator, more, found, wrong = rest.iterator, list(rest.more), NOTHING_DRAWN, ""
        for position in range(count):
            try:
                while (item := next(iterator, _END)) is _END and more:
                    iterator = more.pop(0)
            except (Exception, SystemExit) as error:
                raise CheckpointError(
                    "the prompts drawn before the restart cannot be drawn again: the source failed at prompt "
                    f"{position}: {describe(error)}"
                ) from error
            if item is _END and extended:
                return rest._replace(iterator=iterator, more=more, found=found, missing=count - position)
            if item is _END:
                raise CheckpointError(_ended(position, epoch, count))
            try:
                found = _next_digest(found, self._prompt(item, position, epoch, again=True))
            except ConfigError as error:
                found, wrong = _next_digest(found, None), wrong or f" ({error})"
        if found != digest:
            raise CheckpointError(_others(epoch, count) + wrong)
        return rest._replace(iterator=iterator, more=more, found=found, missing=0)

    def continue_with(self, rest: RemainingPrompts) -> None:
        """Continue with the iterators that :meth:`remaining_after` returned."""
        saved, self._iterator = rest.position, rest.iterator
        self._extensions = [*rest.more, *self._extensions[rest.known :]]
        self.epoch, self.position, self._extended = saved.epoch, saved.position, saved.extended
        self._digest, self._to_skip, self._expected = rest.found, rest.missing, saved.digest
        self._handed_over = saved

    def _skip(self) -> None:
        """Skip missing prompts that were drawn before a restart; raises StopIteration if ``extend`` must give more."""
        while self._to_skip:
            item = next(self._iterator)
            self._to_skip -= 1
            prompt: Prompt | None = None  # stands for an unusable one
            with suppress(ConfigError):
                prompt = self._prompt(item, 0, again=True)
            self._digest = _next_digest(self._digest, prompt)
            if not self._to_skip and self._digest != self._expected:
                self._changed_error = _others(self.epoch, self.position)


_END = object()


def _next_digest(digest: bytes, prompt: Prompt | None) -> bytes:
    """Return the digest after one more prompt; ``prompt`` None stands for an unusable prompt."""
    ids = b"" if prompt is None else prompt.token_ids.astype("<i4").tobytes()
    if prompt is not None and not ids:  # a prompt without tokens is identified by its data
        with suppress(TypeError, ValueError, RecursionError):  # keys that JSON does not allow, or cyclic data
            ids = json.dumps(dict(prompt.data), default=lambda value: type(value).__name__).encode()
    attached = () if prompt is None else prompt.attached
    content = "".join(placed.attachment.digest for placed in attached)
    return hashlib.blake2b(ids + content.encode(), key=digest, digest_size=16).digest()


def _position_of(state: Mapping[str, Any]) -> Position:
    try:
        position = Position(state["epoch"], state["position"], bytes.fromhex(state["digest"]), state["extended"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state is damaged: {type(error).__name__}: {error}") from error
    for number in (position.epoch, position.position):
        if type(number) is not int or number < 0:
            raise CheckpointError(f"the state is damaged: prompt {position.position} of epoch {position.epoch}")
    return position


def _ended(found: int, epoch: int, drawn: int) -> str:
    return (
        f"the prompts ended after {found} of epoch {epoch}, where {drawn or 'some'} had been drawn before; give the "
        "same prompts in every epoch, and after a restart"
    )


def _others(epoch: int, drawn: int) -> str:
    return (
        f"the first {drawn} prompts of epoch {epoch} differ from those drawn before the restart, or are in another "
        "order; give the same prompts again"
    )


_compared: set[str] = set()
"""Digests that this process has put into the store, so that its second scheduler is not mistaken for another rank."""


def warn_of_equal_rollouts(seed: int, first: Prompt) -> threading.Thread | None:
    """Warn if another rank has drawn the same first prompt under the same seed.

    Ranks compare digests through the store of ``torch.distributed``, in a thread that is returned; None if there are no
    other ranks, or this process has compared the digest before.
    """
    torch_ranks = sys.modules.get("torch.distributed")
    if torch_ranks is None or not (torch_ranks.is_available() and torch_ranks.is_initialized()):
        return None
    if torch_ranks.get_world_size() < 2:
        return None
    digest = hashlib.sha256(f"{seed}/".encode() + _next_digest(NOTHING_DRAWN, first)).hexdigest()[:32]
    if digest in _compared:
        return None
    _compared.add(digest)

    def compare() -> None:
        try:
            store = torch_ranks.distributed_c10d._get_default_store()
            equal = store.add(f"april/first_rollouts/{digest}", 1)
        except Exception as error:  # without the store there is no warning
            log.debug("the store that the ranks share could not be read: %s", error)
            return
        if equal > 1:
            log.warning(
                "another rank of this trainer began with the same prompt and seed=%d, so ranks with their own "
                "schedulers generate the same responses. Give all ranks shares of the same batches "
                "(april.RankScheduler), or give each rank its own share of the prompts (prompts[rank::world_size]) and "
                "its own seed",
                seed,
            )

    thread = threading.Thread(target=compare, name="april-ranks", daemon=True)
    thread.start()
    return thread
