"""Authentication by API key, and the rights of its holder.

The key comes in the ``Authorization`` header, or as Anthropic's clients send it, in ``x-api-key``.
Keys are cached in memory and refreshed from the database: requests do not wait for it, and keys
work while it is down. Headers name the agent of a call; a key bound to agents may name only those.
"""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from babylon.core.api_keys import SCOPES, ApiKey, match_key, parse_key
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.api_keys import StoredKey, list_keys

_NO_DIGEST = bytes(32)
# Any program of the home may read this key. Changing what serves everybody takes a key of its own.
_LOCAL_SCOPES = frozenset(SCOPES) - {"deploy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The holder of a key; the fields are those of ``babylon.store.api_keys.StoredKey``.

    ``not_agents``: agents with keys of their own, for which the home's local key may not call.
    """

    key_id: str
    digest: bytes
    scopes: frozenset[str]
    agents: tuple[str, ...] | None = None
    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    former_digest: bytes | None = None
    former_until: datetime | None = None
    not_agents: tuple[str, ...] = ()

    @property
    def limited(self) -> bool:
        """True if any number of its calls is limited."""
        limits = (self.max_concurrency, self.requests_per_minute, self.tokens_per_minute)
        return limits != (None, None, None)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Hashes of the secrets that are accepted now."""
        if self.former_digest and self.former_until and datetime.now(UTC) < self.former_until:
            return self.digest, self.former_digest
        return (self.digest,)

    @property
    def _sole_agent(self) -> str | None:
        """The agent whose calls these are, if there is only one."""
        agent, *others = self.agents or ("*",)
        return None if others or agent.endswith("*") else agent

    def agent_of(self, user: str | None) -> str | None:
        """Return the agent that OpenAI's ``user`` names, if the key does not name it itself."""
        return self._sole_agent or user

    def require_all_agents(self, what: str) -> None:
        """Check that the key is not bound to agents; ``what`` concerns all of them.

        Raises:
            RequestError: 403, it is.
        """
        if self.agents is not None:
            raise RequestError(
                403,
                f"{what} all agents, and this key is for {', '.join(self.agents)}: use a key"
                " without --agent",
                code="wrong_agent",
            )

    def attributed_agent(self, agent_id: str | None) -> str | None:
        """Return the agent of a call. A key bound to one agent need not name it.

        Raises:
            RequestError: 403, the key is bound to other agents.
        """
        if self.agents is None:
            if agent_id is not None and any(_matches(agent_id, other) for other in self.not_agents):
                raise RequestError(
                    403,
                    f"agent {agent_id!r:.80} has a key of its own: call with that key",
                    code="wrong_agent",
                )
            return agent_id
        if agent_id is None and self._sole_agent:
            return self._sole_agent
        if agent_id is None or not any(_matches(agent_id, agent) for agent in self.agents):
            named = "no agent" if agent_id is None else f"agent {agent_id!r:.80}"
            raise RequestError(
                403,
                f"the request names {named}, and this key is for {', '.join(self.agents)}: name"
                " one of them in x-babylon-agent",
                code="wrong_agent",
            )
        return agent_id


class KeyRing:
    """All valid keys."""

    def __init__(self, local: ApiKey, probe: ApiKey | None = None) -> None:
        self._local = Principal(key_id=local.key_id, digest=local.digest, scopes=_LOCAL_SCOPES)
        self._probes = [
            Principal(key_id=key.key_id, digest=key.digest, scopes=frozenset({"infer"}))
            for key in ((probe, match_key(str(probe))) if probe else ())
        ]
        self.stored: Sequence[StoredKey] = ()
        self.set(())

    async def renew(self, store: Store) -> None:
        self.set(await list_keys(store))

    def set(self, keys: Sequence[StoredKey]) -> None:
        """Admit these keys, the home's local key, and those for pinned calls to this gateway."""
        self.stored = keys
        stored = [
            Principal(
                key_id=key.key_id,
                digest=key.digest,
                scopes=frozenset(key.scopes),
                agents=key.agents,
                max_concurrency=key.max_concurrency,
                requests_per_minute=key.requests_per_minute,
                tokens_per_minute=key.tokens_per_minute,
                former_digest=key.former_digest,
                former_until=key.former_until,
            )
            for key in keys
            if key.revoked_at is None
        ]
        taken = tuple({agent for one in stored for agent in one.agents or ()})
        local = replace(self._local, not_agents=taken)
        self._principals = {one.key_id: one for one in (*stored, local, *self._probes)}

    def admit(self, headers: Iterable[tuple[bytes, bytes]], *scopes: str) -> Principal:
        """Return the caller, who has at least one of ``scopes``.

        Raises:
            RequestError: 401, no valid key; 403, a key without these scopes.
        """
        given = [one for one in headers if one[0] in (b"authorization", b"x-api-key")]
        sent = [value for name, value in given if name == b"authorization"] or [
            b"Bearer " + value for _, value in given
        ]
        principal = self._holder(sent[0]) if len(sent) == 1 else None
        if principal is None:
            raise RequestError(
                401,
                "no valid API key: send `Authorization: Bearer KEY`; this home's key is in"
                " local.key, `babylon keys create` makes others",
                code="invalid_api_key",
            )
        if principal.scopes.isdisjoint(scopes):
            raise RequestError(
                403, f"key {principal.key_id} lacks the scope {' or '.join(scopes)}", code="scope"
            )
        return principal

    def holder_of(self, key_id: str) -> Principal | None:
        """Return the holder of a valid key by its public id."""
        return self._principals.get(key_id)

    def _holder(self, authorization: bytes) -> Principal | None:
        """Return the key's holder. The time does not tell unknown ids from wrong secrets."""
        scheme, _, text = authorization.partition(b" ")
        key = parse_key(text.strip().decode("latin-1")) or ApiKey("", "")
        principal = self._principals.get(key.key_id)
        digests = principal.digests if principal else (_NO_DIGEST,)
        right = any(hmac.compare_digest(key.digest, digest) for digest in digests)
        return principal if right and scheme.lower() == b"bearer" else None


def _matches(agent_id: str, pattern: str) -> bool:
    return agent_id.startswith(pattern[:-1]) if pattern.endswith("*") else agent_id == pattern
