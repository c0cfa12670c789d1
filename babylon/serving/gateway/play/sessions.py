"""Sessions: calls that name no trajectory, recognised by the continuation of their messages.

A chat that goes on repeats its messages, then the answer, then new ones. So each answer leaves a
digest of the conversation up to it, and a call that begins with a known conversation continues its
session. A session is its key's and agent's alone. Two equal conversations of different sessions
cannot be told apart: a call that continues such a one begins a new session.

This process knows its newest conversations. Other gateways find them in Postgres a moment after
the answer; a call that comes earlier, or while Postgres is away, begins a new session there.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_hex
from typing import NoReturn

import msgspec
from cachetools import TTLCache

from babylon.core.llm_calls import content_text
from babylon.serving.gateway.play.owners import REMEMBERED_S, SESSION
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.plays import find_continued, note_continuations

MAX_CACHED = 50_000  # conversations, about 20 MB
MAX_UNSAVED = 50_000
ANSWER_S = 0.1  # the longest that a call waits for the database
REST_S = 5.0  # without questions after it did not answer
SAVE_S = 0.1
_NEWEST = 4  # conversations of one call that the database is asked for
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(slots=True)
class ChatSession:
    """The session of one call. ``digest`` is that of the conversation as the call sent it."""

    trajectory_id: str
    continued: bool
    digest: "blake2b"
    sessions: "Sessions"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers: the trajectory, and whether the call continues it."""
        return [
            (b"x-babylon-trajectory", self.trajectory_id.encode()),
            (b"x-babylon-session", b"continued" if self.continued else b"new"),
        ]

    def answered(self, text: str, tool_calls: Iterable[Mapping[str, object]]) -> None:
        """Note the answer, with which the next call of the session begins."""
        answer = {"role": "assistant", "content": text, "tool_calls": [*tool_calls]}
        self.digest.update(_canonical(answer))
        self.sessions.note(self.digest.digest(), self.trajectory_id)


class Sessions:
    """Digest of each conversation → its session, None if two sessions have the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = TTLCache[bytes, str | None](MAX_CACHED, REMEMBERED_S)
        self._unsaved: dict[bytes, str | None] = {}
        self._missed = TTLCache[bytes, None](MAX_CACHED, REMEMBERED_S)
        self._asks_again = 0.0

    async def find(
        self, key_id: str, agent_id: str | None, messages: Sequence[Mapping[str, object]]
    ) -> ChatSession:
        """Return the session that the messages continue, or a new one."""
        digest = blake2b(_encode([key_id, agent_id]), digest_size=16)
        conversations: list[bytes] = []
        for message in messages:
            digest.update(_canonical(message))
            if message.get("role") == "assistant":
                conversations.append(digest.digest())
        found = await self._longest(conversations[::-1])
        name = found or f"{SESSION}{key_id}-{token_hex(8)}"
        return ChatSession(name, found is not None, digest, self)

    def note(self, digest: bytes, trajectory_id: str) -> None:
        """Note a conversation of a session."""
        same = self._known.get(digest, trajectory_id) == trajectory_id
        session = trajectory_id if same else None  # one that still waits to be written counts too
        self._known[digest] = session
        if len(self._unsaved) < MAX_UNSAVED:
            self._unsaved[digest] = session

    async def run(self) -> NoReturn:
        """Write conversations to the database for the other gateways."""
        while True:
            await asyncio.sleep(SAVE_S)
            if unsaved := self._unsaved:
                self._unsaved = {}
                try:
                    await note_continuations(self._store, unsaved)
                except UNREACHABLE:  # RouteFollower reports it
                    self._unsaved = unsaved | self._unsaved

    async def _longest(self, conversations: Sequence[bytes]) -> str | None:
        for digest in conversations:
            with suppress(KeyError):
                return self._known[digest]
        asked = [one for one in conversations[:_NEWEST] if one not in self._missed]
        if not asked or time.monotonic() < self._asks_again:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await find_continued(self._store, asked)
        except UNREACHABLE:  # TimeoutError too
            self._asks_again = time.monotonic() + REST_S
            return None
        for digest in asked:
            if digest in found:
                self._known[digest] = found[digest]
                return found[digest]
        self._missed.update(dict.fromkeys(asked))  # examples in a prompt: nobody's conversation
        return None


def _canonical(message: Mapping[str, object]) -> bytes:
    """Encode a message so that a client's repetition of an answer equals the answer.

    Clients drop reasoning and rewrite a tool call's arguments, but keep its id.
    """
    if message.get("role") != "assistant":
        return _encode(message)
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, list) else []
    ids = [call.get("id") for call in listed if isinstance(call, dict)]
    return _encode(["assistant", content_text(dict(message)).strip(), ids])
