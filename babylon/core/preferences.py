"""Sources of an update beside scores: valued replies to one prompt, and feedback in words."""

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


class DecisionWords(msgspec.Struct, frozen=True, kw_only=True):
    """Feedback on one recorded decision, for the teacher's context alone (``OBJECTIVE=sdpo``).

    ``call``: place of the decision among the calls of the trajectory's row.
    ``text`` may quote the judge and tell the outcome, so neither a training row nor a prompt that
    is trained holds it.
    """

    trajectory_id: str
    call: int
    text: str
