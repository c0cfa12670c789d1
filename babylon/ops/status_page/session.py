"""Sessions of the status page: a signed cookie that stands for an API key.

The cookie names the key and part of the hash of the secret that was shown. A session ends when
that secret is no longer accepted: at once if the key is revoked, after the overlap if it was
rotated. The cookie is signed with a secret that is derived from the home's local key. Cookies are
shared by all ports of a host, which is why the cookie never holds the key itself.
"""

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from babylon.core.api_keys import ApiKey
from babylon.serving.gateway.auth import KeyRing

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


class SessionCookies:
    """Makes and checks the tokens of one home."""

    def __init__(self, local: ApiKey) -> None:
        self._secret = hmac.digest(local.digest, b"status page", "sha256")

    def open(self, key: ApiKey) -> str:
        """Return a token for a key that was just checked."""
        until = time.time() + LASTS_S
        claims = msgspec.json.encode(_Claims(key.key_id, _part(key.digest), until))
        body = urlsafe_b64encode(claims).decode()
        return f"{body}.{self._sign(body)}"

    def visitor(self, keys: KeyRing, token: str) -> Visitor | None:
        """Return who a token stands for; ``None`` if it is forged, over, or its key is revoked."""
        body, _, signature = token.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return None
        claims = msgspec.json.decode(urlsafe_b64decode(body), type=_Claims)
        holder = keys.holder_of(claims.key_id)
        if holder is None or claims.until < time.time():
            return None
        if claims.digest not in map(_part, holder.digests):
            return None
        return Visitor(holder.key_id, holder.scopes, token)

    def form_token(self, token: str) -> str:
        """Return what every form of a session must send back: no other site can know it."""
        return self._sign(f"form {token}")

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()


def _part(digest: bytes) -> str:
    return digest.hex()[:32]
