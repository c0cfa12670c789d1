"""What a window's prompts share, and what the order of their segments loses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from babylon.grpo.batch import CallTokens

if TYPE_CHECKING:
    from babylon.grpo.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Token counts of a tree; the last token of a call is a target only and not counted."""

    flat_tokens: int  # that a trainer without a tree would forward, padding aside
    unique_tokens: int  # that the tree forwards
    trained_tokens: int  # loss terms: completion tokens of all calls
    lost_tokens: int  # of the unique ones: copies that shared-first prompts would not have
    advice: str | None  # how to win them back, None when nothing is lost


def find_sharing(
    calls: Sequence[CallTokens],
    nodes: Sequence["Node"],
    node_of_call: Sequence[int],
    decode: Callable[[Sequence[int]], str] | None,
) -> Sharing:
    return Sharing(
        flat_tokens=sum(len(c.prompt) + len(c.completion) - 1 for c in calls),
        unique_tokens=sum(len(node.tokens) for node in nodes),
        trained_tokens=sum(len(c.completion) for c in calls),
        lost_tokens=0,
        advice=None,
    )
