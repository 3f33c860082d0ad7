"""Sends attachments to a server: their bytes once, then only their digests if the server keeps them.

Invariant: an attachment is sent by digest alone only to a server that has received its bytes. If the server refuses a
request because it has lost the bytes, the request is sent again with them. april remembers digests here, but no bytes.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TypeVar

from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import Attachment, Placed
from april.engines.attachments import attachment_bytes
from april.errors import AttachmentError, RequestRefused

T = TypeVar("T")

MAX_REMEMBERED = 1 << 16
"""Maximum number of digests remembered per server; beyond that, april forgets the least recently used ones."""
MAX_INLINE_BYTES = 1 << 17
"""Attachments up to this many bytes are encoded on the event loop, in less than a millisecond."""
MAX_SENDS = 4
"""Maximum number of times one request is sent; the last time, it carries the bytes of all its attachments."""
_MAGIC = (
    (b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)  # fmt: skip


def data_url(kind: str, data: bytes) -> str:
    """Return the bytes as a data URL, with the media type shown by their first bytes."""
    subtype = next((name for magic, name in _MAGIC if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        subtype = "webp"
    media = f"{kind}/{subtype}" if subtype else "application/octet-stream"
    return f"data:{media};base64,{base64.b64encode(data).decode('ascii')}"


Urls = Mapping[str, str]
"""Data URLs of the attachments whose bytes are sent along, indexed by digest."""


class SentAttachments:
    """Tracks which attachments one server has received.

    Args:
        misses: Function that returns whether a refusal means that the server lacks the bytes of a digest. None if the
            server keeps nothing by digest, so that every request carries the bytes.
    """

    def __init__(self, misses: Callable[[RequestRefused], bool] | None = None) -> None:
        self._misses = misses
        self._known: OrderedDict[str, int] = OrderedDict()
        """Digest -> number of the request that brought its bytes to the server."""
        self._uploads: dict[str, asyncio.Future[None]] = {}
        """Digest -> future that ends when the request carrying its bytes has returned."""
        self._numbers = count(1)
        self.sendings: OrderedDict[str, int] = OrderedDict()
        """Digest -> number of times its bytes were sent, for the most recently used digests."""

    @property
    def by_name(self) -> bool:
        """Return whether the server keeps attachments and finds them by digest."""
        return self._misses is not None

    def forget(self) -> None:
        """Forget what the server has, because it was restarted or has emptied its caches."""
        self._known.clear()

    async def send(self, attempt_id: str, attached: Sequence[Placed], post: Callable[[Urls], Awaitable[T]]) -> T:
        """Call ``post`` with data URLs of the attachments that the server lacks, until the server accepts the request.

        If the server refuses the request because it has lost other attachments, ``post`` is called again with these,
        too. If several requests bring the same attachment at once, the first one sends its bytes and the others wait
        until its ``post`` ends. So ``post`` must not return before the server has accepted the attachments.

        Raises:
            RequestRefused: The content cannot be read, or the server refuses the request.
        """
        distinct = {placed.attachment.digest: placed.attachment for placed in attached}
        for again in reversed(range(MAX_SENDS)):
            relied = await self._known_after_uploads(distinct, alone=not again)
            lacking = [attachment for digest, attachment in distinct.items() if digest not in relied]
            own = [a.digest for a in lacking if a.digest not in self._uploads]
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._uploads |= dict.fromkeys(own, done)
            try:
                urls = {a.digest: await _url(attempt_id, a) for a in lacking}
                result = await post(urls)
            except RequestRefused as error:
                if self._misses is None or not relied or not again or not self._misses(error):
                    raise
                self._count(lacking)
                for digest, number in relied.items():
                    if self._known.get(digest) == number:  # another request may have sent it again since
                        del self._known[digest]
            else:
                self._count(lacking)
                self._note_known(distinct, relied)
                return result
            finally:
                for digest in own:
                    if self._uploads.get(digest) is done:
                        del self._uploads[digest]
                done.set_result(None)
        raise AssertionError("the last sending relies on nothing")

    async def _known_after_uploads(self, distinct: Iterable[str], *, alone: bool) -> dict[str, int]:
        """Wait for uploads in progress; return the known digests with the numbers of the requests that brought them.

        With ``alone`` the result is empty, so that the request carries all bytes.
        """
        if self._misses is None or alone:
            return {}
        while coming := [self._uploads[digest] for digest in distinct if digest in self._uploads]:
            await asyncio.wait(coming)
        return {digest: self._known[digest] for digest in distinct if digest in self._known}

    def _count(self, sent: Sequence[Attachment]) -> None:
        for attachment in sent:
            self.sendings[attachment.digest] = self.sendings.pop(attachment.digest, 0) + 1
        while len(self.sendings) > MAX_REMEMBERED:
            self.sendings.popitem(last=False)

    def _note_known(self, distinct: Iterable[str], relied: Mapping[str, int]) -> None:
        if self._misses is None:
            return
        number = next(self._numbers)
        for digest in distinct:
            self._known[digest] = self._known.pop(digest, number) if digest in relied else number
            self._known.move_to_end(digest)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)


async def _url(attempt_id: str, attachment: Attachment) -> str:
    def read() -> str:
        return data_url(attachment.kind, attachment_bytes(attachment))

    try:
        if attachment.data is not None and attachment.size <= MAX_INLINE_BYTES:
            return read()
        return await run_in_thread(read)
    except AttachmentError as error:
        raise AttachmentError(f"attempt {attempt_id} cannot continue: {error}") from None
