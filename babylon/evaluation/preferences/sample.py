"""Replies of a policy to recorded prompts, sampled in this process."""

from collections.abc import Sequence

from babylon.core.learning_settings import Precision
from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.evaluation.preferences.draws import SampledReply, by_point, draws_of
from babylon.serving.engine.loaded_policies import load
from babylon.serving.engine.sampling import Request, Sampling

BATCH = 256  # replies at a time


def sample_replies(
    path: str,
    points: Sequence[DecisionPoint],
    count: int,
    temperature: float,
    seed: int,
    precision: Precision = "fp32",
) -> list[list[SampledReply]]:
    """Return ``count`` replies of the checkpoint to each decision's exact prompt. Blocking.

    A repeated call returns the same. A prompt with tokens of another model has no replies.

    Raises:
        ModelError: the checkpoint does not load.
    """
    policy = load("preferences", path, 0, precision)
    draws = [
        draw
        for draw in draws_of(points, count, temperature, seed, policy.context)
        if max(draw.prompt) < policy.vocabulary
    ]
    replies: list[SampledReply | None] = []
    for start in range(0, len(draws), BATCH):
        requests = [
            Request(
                list(draw.prompt),
                Sampling(max_tokens=draw.max_tokens, temperature=draw.temperature, seed=draw.seed),
            )
            for draw in draws[start : start + BATCH]
        ]
        completions = policy.generate(requests)
        replies += [
            SampledReply(token_ids=tuple(one.token_ids), text=policy.decode(one.token_ids))
            if one.finish_reason == "stop"
            else None
            for one in completions
        ]
    return by_point(points, zip(draws, replies, strict=True))
