"""A checkpoint as a policy that answers chats in this process, for the arena."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from babylon.engine.generate import Request, Sampling, generate
from babylon.engine.policies import load
from babylon.market.arena import Chat
from babylon.market.orders import MAX_REPLY_TOKENS

BATCH = 256


def reply_policy(path: str, *, seed: int = 0) -> Callable[[Sequence[Chat]], Sequence[str]]:
    """Load a checkpoint as the engine does → a function from chats to replies, at temperature 1.

    Each reply is seeded by ``seed`` and its chat, so that results are reproducible and do not
    depend on how chats are batched.

    Raises:
        ModelError: the checkpoint does not load, or cannot answer.
    """
    policy = load("arena", path, 0, "cuda" if torch.cuda.is_available() else "cpu")

    def answer(chats: Sequence[Chat]) -> list[str]:
        completions = generate(
            policy.model,
            [
                Request(
                    policy.prompt(list(chat)),
                    Sampling(max_tokens=MAX_REPLY_TOKENS, seed=_seed(seed, chat)),
                )
                for chat in chats
            ],
            eos_token_ids=policy.eos_token_ids,
            pad_token_id=policy.pad_token_id,
        )
        return [policy.decode(completion.token_ids) for completion in completions]

    def replies(chats: Sequence[Chat]) -> list[str]:
        return [
            reply
            for start in range(0, len(chats), BATCH)
            for reply in answer(chats[start : start + BATCH])
        ]

    return replies


def _seed(seed: int, chat: Chat) -> int:
    digest = blake2b(repr((seed, chat)).encode(), digest_size=7)
    return int.from_bytes(digest.digest())
