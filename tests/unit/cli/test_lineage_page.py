"""The line of policies as text."""

from babylon.cli.lineage_page import lineage_lines
from babylon.store.learning import LinePolicy

LINE, REJECTED = "in the champion's line", "in a rejected candidate"


def policy(version: int, parent: int | None, fate: str, reason: str | None = None) -> LinePolicy:
    return LinePolicy(
        policy_version=version,
        parent_version=parent,
        window_id=None if parent is None else f"2025-11-14T{version:02}:00",
        fate=fate,
        trajectories=7,
        reason=reason,
    )


def test_the_champions_line_stays_at_the_left_and_the_others_hang_below_their_parents() -> None:
    policies = [
        policy(0, None, LINE),
        policy(1, 0, LINE),
        policy(2, 1, REJECTED, "worse"),
        policy(3, 1, LINE),
        policy(4, 3, "in a policy rolled back"),
        policy(5, 4, "released for training again", "another policy leads"),
    ]
    assert list(lineage_lines(policies, champion=3)) == [
        "  0  base model",
        "  1  2025-11-14T01:00, 7 trajectories",
        "     2  2025-11-14T02:00, 7 trajectories: rejected candidate (worse)",
        "* 3  2025-11-14T03:00, 7 trajectories: champion",
        "     4  2025-11-14T04:00, 7 trajectories: policy rolled back",
        "        5  2025-11-14T05:00, 7 trajectories: released for training again (another policy"
        " leads)",
    ]


def test_a_line_of_thousands_of_generations_is_drawn() -> None:
    line = [policy(0, None, LINE), *(policy(n, n - 1, LINE) for n in range(1, 5000))]
    assert len(list(lineage_lines(line, champion=4999))) == 5000
