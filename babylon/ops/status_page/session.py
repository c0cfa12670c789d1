"""Sessions of the status page: a signed cookie that stands for an API key.

The cookie names the key and part of its hash, so a revoked or replaced key ends its sessions at
once. It is signed with a secret that is derived from the home's local key. Cookies are shared by
all ports of a host, which is why the cookie never holds the key itself.
"""

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from babylon.core.api_keys import LOCAL, SCOPES, ApiKey
from babylon.store import Store
from babylon.store.api_keys import list_keys

COOKIE = "babylon_session"
LASTS_S = 12 * 3600


@dataclass(frozen=True, slots=True)
class Visitor:
    """The holder of a valid key. ``token`` is the session's, empty for a caller with a header."""

    key_id: str
    scopes: frozenset[str]
    token: str = ""

    @property
    def may_change(self) -> bool:
        return "deploy" in self.scopes

    @property
    def may_read(self) -> bool:
        return not self.scopes.isdisjoint(("read", "deploy"))


class _Claims(msgspec.Struct):
    key_id: str
    digest: str
    until: float


class Sessions:
    """Makes and checks the tokens of one home."""

    def __init__(self, local: ApiKey) -> None:
        self._local = local
        self._secret = hmac.digest(local.digest, b"status page", "sha256")

    def open(self, key_id: str, digest: bytes) -> str:
        """Return a token for a key that was just checked."""
        until = time.time() + LASTS_S
        claims = msgspec.json.encode(_Claims(key_id, digest.hex()[:32], until))
        body = urlsafe_b64encode(claims).decode()
        return f"{body}.{self._sign(body)}"

    async def visitor(self, store: Store, token: str) -> Visitor | None:
        """Return who a token stands for; ``None`` if it is forged, over, or its key is revoked."""
        body, _, signature = token.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return None
        claims = msgspec.json.decode(urlsafe_b64decode(body), type=_Claims)
        if claims.until < time.time():
            return None
        for key_id, digest, scopes in await self._keys(store):
            if key_id == claims.key_id and digest.hex()[:32] == claims.digest:
                return Visitor(key_id, frozenset(scopes), token)
        return None

    def form_token(self, token: str) -> str:
        """Return what every form of a session must send back: no other site can know it."""
        return self._sign(f"form {token}")

    async def _keys(self, store: Store) -> Iterable[tuple[str, bytes, Iterable[str]]]:
        stored = [k for k in await list_keys(store) if k.revoked_at is None and k.key_id != LOCAL]
        return [
            (self._local.key_id, self._local.digest, SCOPES),
            *((key.key_id, key.digest, key.scopes) for key in stored),
        ]

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()
