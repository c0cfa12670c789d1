"""Segments that versions before COPY's lines have left: their records are calls in MessagePack."""

import msgspec

from babylon.store.calls import RecordedCall, copy_line

SUFFIX = ".calls"
_decoder = msgspec.msgpack.Decoder(RecordedCall)


def line(body: bytes) -> bytes:
    """Return a record's body as a line of COPY's text format with the columns ``CALL_COLUMNS``.

    What is no call becomes a line that COPY refuses.
    """
    try:
        return copy_line(_decoder.decode(body))
    except msgspec.DecodeError:
        return b"unreadable\n"
