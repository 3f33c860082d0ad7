"""Reads the bytes of a prompt's attachments (images) from memory or from their files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from april.core.attachments import Attachment
from april.errors import AttachmentError
from april.text.server_text import clean


def attachment_bytes(attachment: Attachment) -> bytes:
    """Return the bytes of an attachment, read from its file if they are not in memory.

    Raises:
        AttachmentError: the file cannot be read, or has changed since the prompt was drawn.
    """
    if attachment.data is not None:
        return attachment.data
    what = f"the {attachment.kind} {attachment.path}"
    try:
        data = Path(attachment.path).read_bytes()
    except OSError as error:
        raise AttachmentError(f"{what} cannot be read: {clean(error.strerror or error)}") from None
    if hashlib.sha256(data).hexdigest() != attachment.digest:
        raise AttachmentError(
            f"{what} has changed since its prompt was drawn, so a response that has begun cannot continue; restore the "
            "old content"
        )
    return data
