"""Attachments on their way to a server: the bytes once, and after that, where the server keeps them, the name alone.

Invariant: an attachment is named without its bytes only to a server that has taken them, and a server that has lost
them is sent them again, by the request that it has refused for it. Digests are remembered, and no bytes.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TypeVar

from april.attachments import attachment_bytes
from april.beside import in_thread
from april.core.attachments import Attachment, Placed
from april.errors import AttachmentError, RequestRefused

T = TypeVar("T")

REMEMBERED = 1 << 16
"""Digests of which it is known that a server has them; beyond that, those used last stay, and others are sent again."""
AT_ONCE = 1 << 17
"""Bytes that are encoded on the event loop: in less than a millisecond."""
TRIES = 4
"""Sendings of one request; a server that still misses something then is to blame."""
_MAGIC = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)  # fmt: skip


def data_url(kind: str, data: bytes) -> str:
    """Return the bytes as a URL, with the type that their beginning shows."""
    subtype = next((name for magic, name in _MAGIC if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        subtype = "webp"
    media = f"{kind}/{subtype}" if subtype else "application/octet-stream"
    return f"data:{media};base64,{base64.b64encode(data).decode('ascii')}"


Urls = Mapping[str, str]
"""Data URL by digest, of those whose bytes go along."""


class SentAttachments:
    """Knows what one server was sent.

    Args:
        misses: tells the refusal of a server that was given a name and does not have the bytes; None: the server keeps
            nothing by name, so the bytes go along with every request.
    """

    def __init__(self, misses: Callable[[RequestRefused], bool] | None = None) -> None:
        self._misses = misses
        self._known: OrderedDict[str, int] = OrderedDict()
        """Digest -> number of the sending by which the server has got it."""
        self._coming: dict[str, asyncio.Future[None]] = {}
        """Digests whose bytes are on their way."""
        self._numbers = count(1)
        self.sendings: OrderedDict[str, int] = OrderedDict()
        """Digest -> how often its bytes were sent; of the digests used last."""
        self.requests = 0
        """Requests with attachments that the server has taken."""
        self.bytes_sent = 0
        """Bytes of content, before they are encoded."""
        self.times_sent = 0
        """Attachments that were sent with their bytes."""

    def __repr__(self) -> str:
        return f"<SentAttachments {len(self._known)} known, {self.times_sent} sent, {self.bytes_sent} bytes>"

    @property
    def by_name(self) -> bool:
        """The server keeps what it was sent, and finds it again by its digest."""
        return self._misses is not None

    def forget(self) -> None:
        """The server has nothing any more: it was started anew, or has emptied its caches."""
        self._known.clear()

    @property
    def counters(self) -> dict[str, float]:
        """For :attr:`april.engines.protocol.Health.counters`; empty before anything was sent."""
        if not self.times_sent:
            return {}
        return {"attachments_sent": float(self.times_sent), "attachment_bytes_sent": float(self.bytes_sent)}

    async def send(self, attempt_id: str, attached: Sequence[Placed], post: Callable[[Urls], Awaitable[T]]) -> T:
        """Call ``post`` with what the server needs, and again with the rest if it misses something.

        Of requests that bring the same attachment at a time one sends it, and the others wait until ``post`` has
        returned there: by then the server must have taken it.

        Raises:
            RequestRefused: the content cannot be had, or the server refuses the request.
        """
        distinct = {placed.attachment.digest: placed.attachment for placed in attached}
        for again in reversed(range(TRIES)):
            relied = await self._settled(distinct, alone=not again)
            lacking = [attachment for digest, attachment in distinct.items() if digest not in relied]
            own = [a.digest for a in lacking if a.digest not in self._coming]
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._coming |= dict.fromkeys(own, done)
            try:
                urls = {a.digest: await _url(attempt_id, a) for a in lacking}
                result = await post(urls)
            except RequestRefused as error:
                if self._misses is None or not relied or not again or not self._misses(error):
                    raise
                self._count(lacking)
                for digest, number in relied.items():
                    if self._known.get(digest) == number:  # or it was sent again meanwhile
                        del self._known[digest]
            else:
                self.requests += 1
                self._count(lacking)
                self._know(distinct, relied)
                return result
            finally:
                for digest in own:
                    if self._coming.get(digest) is done:
                        del self._coming[digest]
                done.set_result(None)
        raise AssertionError("the last sending relies on nothing")

    async def _settled(self, distinct: Iterable[str], *, alone: bool) -> dict[str, int]:
        """What the server has, once nothing of this is on its way; ``alone``: rely on nothing."""
        if self._misses is None or alone:
            return {}
        while coming := [self._coming[digest] for digest in distinct if digest in self._coming]:
            await asyncio.wait(coming)
        return {digest: self._known[digest] for digest in distinct if digest in self._known}

    def _count(self, sent: Sequence[Attachment]) -> None:
        for attachment in sent:
            self.times_sent += 1
            self.bytes_sent += attachment.size
            self.sendings[attachment.digest] = self.sendings.pop(attachment.digest, 0) + 1
        while len(self.sendings) > REMEMBERED:
            self.sendings.popitem(last=False)

    def _know(self, distinct: Iterable[str], relied: Mapping[str, int]) -> None:
        if self._misses is None:
            return
        number = next(self._numbers)
        for digest in distinct:
            self._known[digest] = self._known.pop(digest, number) if digest in relied else number
            self._known.move_to_end(digest)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


async def _url(attempt_id: str, attachment: Attachment) -> str:
    def read() -> str:
        return data_url(attachment.kind, attachment_bytes(attachment))

    try:
        if attachment.data is not None and attachment.size <= AT_ONCE:
            return read()
        return await in_thread(read)
    except AttachmentError as error:
        raise AttachmentError(f"attempt {attempt_id} cannot go on: {error}") from None
