"""Replies of a checkpoint that is loaded into this process."""

from collections.abc import Sequence

from babylon.core.learning_settings import Precision
from babylon.evaluation.arena.play import Chat, ReplyPolicy
from babylon.game.market.orders import MAX_REPLY_TOKENS
from babylon.serving.engine.loaded_policies import load
from babylon.serving.engine.sampling import Request, Sampling

BATCH = 256


def reply_policy(path: str, precision: Precision = "fp32") -> ReplyPolicy:
    """Load a checkpoint as the engine does → a function from chats and seeds to replies.

    Frozen weights are in ``precision``. Replies are sampled at temperature 1, each with its own
    seed. They are reproducible and do not depend on the batching.

    Raises:
        ModelError: The checkpoint does not load or cannot answer.
    """
    policy = load("arena", path, 0, precision)

    def answer(chats: Sequence[Chat], seeds: Sequence[int]) -> list[str]:
        requests = [
            Request(policy.prompt(list(chat)), Sampling(max_tokens=MAX_REPLY_TOKENS, seed=seed))
            for chat, seed in zip(chats, seeds, strict=True)
        ]
        completions = policy.generate(requests)
        return [policy.decode(completion.token_ids) for completion in completions]

    def replies(chats: Sequence[Chat], seeds: Sequence[int]) -> list[str]:
        return [
            reply
            for start in range(0, len(chats), BATCH)
            for reply in answer(chats[start : start + BATCH], seeds[start : start + BATCH])
        ]

    return replies
