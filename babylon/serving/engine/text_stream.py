"""Incremental decoding of tokens to text: whole characters, nothing after a stop string."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character
_BYTES = 4  # of a character, at most, and so tokens


class TextStream:
    """Text of a growing answer.

    A byte-level token may end in the middle of a character, and text may be the beginning of a stop
    string. Such text is held back until it is decided. The pieces add up to the whole text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode, self._stops = decode, stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._ids: list[int] = []
        self._start = self._read = 0  # tokens [start, read) are the context for decoding the next
        self._text = ""
        self._sent = 0

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> tuple[str, int]:
        """Return new text, and the number of these tokens that belong to the answer.

        Tokens after a stop string do not.
        """
        used = 0
        for ids in [[i] for i in token_ids] if self._stops else [token_ids]:
            self._append(ids)
            used += len(ids)
            if self._cut():
                return self._release(0), used
        if last:
            self._append((), complete=True)
            self._cut()
        return self._release(0 if last else self._hold), used

    def _append(self, token_ids: Sequence[int], *, complete: bool = False) -> None:
        self._ids.extend(token_ids)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if complete or not text.endswith(_INCOMPLETE):
            self._accept(known, text, len(self._ids))
            return
        # No later token changes what ends this far back. A place inside a character is none.
        latest = len(self._ids) - _BYTES
        for end in range(latest, max(latest - _BYTES, self._read), -1):
            part = self._decode(self._ids[self._start : end])
            if part + self._decode(self._ids[end:]) == text:
                self._accept(known, part, end)
                return

    def _accept(self, known: str, text: str, end: int) -> None:
        self._text += text[len(known) :]
        self._start, self._read = self._read, end

    def _cut(self) -> bool:
        found = [at for stop in self._stops if (at := self._text.find(stop, self._sent)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
        return self.stopped

    def _release(self, hold: int) -> str:
        end = max(self._sent, len(self._text) - hold)
        piece, self._sent = self._text[self._sent : end], end
        return piece
