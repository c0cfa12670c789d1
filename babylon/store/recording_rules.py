"""The table ``recording_rules``: which calls are recorded, and without which fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from babylon.core.api_keys import LOCAL, parse_key
from babylon.core.errors import ConfigError
from babylon.store.connection import Store, affected
from babylon.store.routes import CHANNEL

RuleKind = Literal["key", "agent"]
_KNOWN = "SELECT EXISTS (SELECT FROM babylon.api_keys WHERE key_id = $1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """A rule for the calls of a key or an agent.

    ``subject``: the key's id, an agent, or ``crowd-*`` for all agents whose id begins so. ``share``
    of the trajectories is recorded. ``redact``: names of JSON fields whose values are left out.
    """

    kind: RuleKind
    subject: str
    share: float
    redact: tuple[str, ...]


async def list_rules(store: Store) -> list[RecordingRule]:
    rows = await store.pool.fetch(
        "SELECT kind, subject, share, redact FROM babylon.recording_rules ORDER BY kind, subject"
    )
    return [RecordingRule(**{**row, "redact": tuple(row["redact"])}) for row in rows]


async def set_rule(
    store: Store, kind: RuleKind, subject: str, share: float, redact: Sequence[str]
) -> None:
    """Set a rule, in the place of one for the same subject.

    Raises:
        ConfigError: the share is none, or there is no such key.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share {share:g}: name a number from 0 (no call) to 1 (all calls)")
    # A rule of no key would record all that it is meant to leave out.
    if kind == "key" and subject != LOCAL and not await store.pool.fetchval(_KNOWN, subject):
        raise ConfigError(
            f"a rule needs a key's id, not {_shown(subject)}: see `babylon keys list`"
        )
    await store.pool.execute(
        "INSERT INTO babylon.recording_rules (kind, subject, share, redact) VALUES ($1, $2, $3, $4)"
        " ON CONFLICT (kind, subject) DO UPDATE SET share = excluded.share,"
        " redact = excluded.redact, set_at = now()",
        *(kind, subject, share, list(redact)),
    )
    await _tell_gateways(store)


async def remove_rule(store: Store, kind: RuleKind, subject: str) -> None:
    """Remove a rule.

    Raises:
        ConfigError: there is no such rule.
    """
    status = await store.pool.execute(
        "DELETE FROM babylon.recording_rules WHERE kind = $1 AND subject = $2", kind, subject
    )
    if not affected(status):
        raise ConfigError(f"no rule for {_shown(subject)}: see `babylon calls rules`")
    await _tell_gateways(store)


def _shown(subject: str) -> str:
    """Return what may be shown of a subject: a whole key has a secret."""
    whole = parse_key(subject)
    return f"the key {whole.key_id} itself" if whole else repr(subject)


async def _tell_gateways(store: Store) -> None:
    await store.pool.execute("SELECT pg_notify($1, 'recording rules')", CHANNEL)
