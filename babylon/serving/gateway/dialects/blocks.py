"""The answer of a chat as blocks: a thought, text or a tool call, one after the other.

Responses calls them output items, Messages content blocks. A whole message and a stream of deltas
give the same blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from babylon.serving.openai_wire import JsonObject

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Block:
    """A part of an answer. ``text``: of a call, its arguments as JSON text."""

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)  # of text, if the client wants them


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """A block begins, grows by ``added``, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    added: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)


class BlockReader:
    """Collects the blocks of one answer. At most one block is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._calls: list[Block] = []
        self._unsaid: list[JsonObject] = []  # logprobs of tokens before the first text

    def read(self, choice: JsonObject) -> Iterator[BlockChange]:
        """Read a choice of a whole answer, or of a chunk of a streamed one."""
        message = choice.get("delta") or choice.get("message") or {}
        # Engines name the reasoning differently; some send both names.
        if thought := message.get("reasoning") or message.get("reasoning_content"):
            yield from self._add("reasoning", thought)
        if (text := message.get("content")) is not None:
            yield from self._add_text(text, (choice.get("logprobs") or {}).get("content") or [])
        for piece in message.get("tool_calls") or ():
            yield from self._add_call(piece)

    def end(self) -> Iterator[BlockChange]:
        """End the last block. An answer without any gets a block of empty text."""
        if not self.blocks:
            yield from self._begin(Block(kind="text", index=0))
        yield from self._close()

    def _add_text(self, text: str, logprobs: list[JsonObject]) -> Iterator[BlockChange]:
        """Add text, or the logprobs of tokens that say nothing: a part of a character, the end."""
        self._unsaid += logprobs
        if text or (self._unsaid and self._open is not None and self._open.kind == "text"):
            logprobs, self._unsaid = self._unsaid, []
            yield from self._add("text", text, logprobs)

    def _add(
        self, kind: Kind, text: str, logprobs: list[JsonObject] | None = None
    ) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind=kind, index=len(self.blocks)))
        assert self._open is not None
        yield _grown(self._open, text, logprobs or [])

    def _add_call(self, piece: Mapping[str, JsonObject]) -> Iterator[BlockChange]:
        """Add a whole tool call, or a piece of a streamed one; see ``exchange``."""
        position, function = piece.get("index", len(self._calls)), piece.get("function") or {}
        if not isinstance(position, int) or position >= len(self._calls):
            call = Block(
                kind="call",
                index=len(self.blocks),
                call_id=str(piece.get("id") or ""),
                name=function.get("name") or "",
            )
            self._calls.append(call)
            yield from self._begin(call)
            position = -1
        if arguments := function.get("arguments"):
            yield _grown(self._calls[position], arguments, [])

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield BlockChange(what="begin", block=block)

    def _close(self) -> Iterator[BlockChange]:
        if self._open is not None:
            yield BlockChange(what="end", block=self._open)
        self._open = None


def blocks_of(choice: JsonObject) -> list[Block]:
    """Return the blocks of a whole answer."""
    reader = BlockReader()
    for changes in (reader.read(choice), reader.end()):
        for _ in changes:
            pass
    return reader.blocks


def _grown(block: Block, added: str, logprobs: list[JsonObject]) -> BlockChange:
    block.text += added
    block.logprobs += logprobs
    return BlockChange(what="add", block=block, added=added, logprobs=logprobs)
