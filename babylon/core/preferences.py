"""Replies of one policy to one prompt, with the value of each: what preferences are made of."""

import msgspec


class ValuedReply(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A sampled reply. Values of one prompt's replies are comparable; higher is better."""

    completion_token_ids: tuple[int, ...]
    value: float


class PromptReplies(msgspec.Struct, frozen=True, kw_only=True):
    """The replies to the prompt of one recorded decision.

    It holds token ids and numbers only: no text, and no ground truth. ``policy_version`` sampled
    all replies at ``temperature``.
    """

    trajectory_id: str
    step: int
    prompt_token_ids: tuple[int, ...]
    replies: tuple[ValuedReply, ...]
    temperature: float
    policy_version: int
