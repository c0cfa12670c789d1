import pytest

from babylon.store.lineage import staleness

# 0 ─ 1 ─ 3 ─ 6      2, 4 and 5 were rejected or rolled back
#     ├─ 2   └─ 7
#     └─ 4 ─ 5
PARENTS = {0: None, 1: 0, 2: 1, 3: 1, 4: 1, 5: 4, 6: 3, 7: 3}


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (6, {6: 0, 3: 1, 1: 2, 0: 3, 7: 2, 2: 3, 4: 3, 5: 4}),
        (1, {1: 0, 0: 1, 2: 1, 3: 1, 4: 1, 6: 2, 7: 2, 5: 2}),
        (0, {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3}),
    ],
)
def test_age_counts_updates_along_the_descent(trained: int, expected: dict[int, int]) -> None:
    assert staleness(PARENTS, trained) == expected


def test_rejected_challengers_do_not_count_as_updates() -> None:
    rejected = {version: 0 for version in range(1, 9)}
    assert staleness({0: None, **rejected, 9: 0}, 9)[0] == 1


def test_a_policy_of_another_line_is_unknown() -> None:
    assert staleness({0: None, 1: 0, 5: None, 6: 5, 8: 7}, 1) == {0: 1, 1: 0}


def test_a_long_line_is_followed_to_its_end() -> None:
    count = 20_000
    line = {0: None, **{version: version - 1 for version in range(1, count)}}
    assert staleness(line, count - 1)[0] == count - 1
