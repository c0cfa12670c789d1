"""The line of policies as a tree of text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from babylon.store.learning import LinePolicy

IN_LINE = "in the champion's line"


def lineage_lines(policies: Sequence[LinePolicy], champion: int | None) -> Iterator[str]:
    """Yield one line a policy, below its parent; the champion is marked with ``*``."""
    children: dict[int | None, list[LinePolicy]] = defaultdict(list)
    for policy in policies:
        children[policy.parent_version].append(policy)
    # A stack, not recursion: a line of a year has thousands of generations. The champion's line
    # stays at its depth, so that it does not run out of the terminal.
    stack = [(policy, 0) for policy in reversed(children[None])]
    while stack:
        policy, depth = stack.pop()
        yield "   " * depth + _text(policy, champion)
        below = list(reversed(children[policy.policy_version]))
        stack += [(child, depth) for child in below if child.fate == IN_LINE]
        stack += [(child, depth + 1) for child in below if child.fate != IN_LINE]


def _text(policy: LinePolicy, champion: int | None) -> str:
    mark = "*" if policy.policy_version == champion else " "
    if policy.window_id is None:
        return f"{mark} {policy.policy_version}  base model"
    text = f"{mark} {policy.policy_version}  {policy.window_id}, {policy.trajectories} trajectories"
    if policy.policy_version == champion:
        return f"{text}: champion"
    if policy.fate == IN_LINE:
        return text
    what = policy.fate.removeprefix("in a ")
    return f"{text}: {what}" + (f" ({policy.reason})" if policy.reason else "")
