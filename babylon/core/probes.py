"""Probes: chats that check how a policy answers, and its answers with the exact tokens."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

IDENTITY_PATH = "/health/identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A chat to answer at temperature 1."""

    messages: Sequence[Mapping[str, object]]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """An answer of T tokens.

    ``logprobs`` ``[T]``: the logprobs with which the tokens were sampled, NaN where one is missing.
    ``ended``: the policy stopped by itself, not at ``max_tokens``.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    ended: bool


def identity_proof(key: str, gateway_id: str, nonce: str) -> str:
    """Return the answer that only the gateway with this key gives to a nonce."""
    return hmac.new(key.encode(), f"{gateway_id}\n{nonce}".encode(), sha256).hexdigest()
