"""A checkpoint as a policy that answers chats in this process, for the arena."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import cast

from babylon.checkpoints.load import load_policy
from babylon.checkpoints.tokenizer import render_prompt
from babylon.engine.generate import Request, Sampling, generate
from babylon.market.orders import MAX_REPLY_TOKENS

BATCH = 256
Chat = list[dict[str, str]]


def reply_policy(path: str, *, seed: int = 0) -> Callable[[Sequence[Chat]], Sequence[str]]:
    """Load a checkpoint → a function from chats to replies, sampled at temperature 1.

    Each reply is seeded by ``seed`` and its chat, so that results are reproducible and do not
    depend on how chats are batched.
    """
    model, tokenizer = load_policy(path)

    def answer(chats: Sequence[Chat]) -> list[str]:
        requests = [
            Request(
                render_prompt(tokenizer, chat),
                Sampling(max_tokens=MAX_REPLY_TOKENS, seed=_seed(seed, chat)),
            )
            for chat in chats
        ]
        completions = generate(
            model,
            requests,
            eos_token_ids={tokenizer.eos_token_id},
            pad_token_id=tokenizer.pad_token_id,
        )
        return [
            cast(str, tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            for completion in completions
        ]

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
