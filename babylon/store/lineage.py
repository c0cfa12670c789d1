"""How old a policy is: generations along the line of descent, not the distance of its number.

Version numbers count every commit, also the challengers that never served, so two policies whose
numbers differ by nine may be parent and child. What separates the policy that sampled a call from
the one that is trained on it is the number of updates between them.
"""

from collections.abc import Iterator, Mapping


def staleness(parents: Mapping[int, int | None], trained: int) -> dict[int, int]:
    """Version → updates between it and ``trained``, for every version that descends from the same
    base.

    An ancestor lies as many generations back as there are between the two. A policy of another
    branch, one that was rolled back for instance, counts the updates down to the common ancestor
    and up again: neither saw the other's. Versions of another line are unknown, hence absent.

    Args:
        parents: version → the version that it was trained from; None for a base model.

    Example:
        ``staleness({0: None, 1: 0, 2: 1, 3: 1}, 3)`` is ``{3: 0, 1: 1, 0: 2, 2: 2}``.
    """
    own = {version: depth for depth, version in enumerate(_line(parents, trained))}
    result: dict[int, int] = {}
    for version in parents:
        for depth, ancestor in enumerate(_line(parents, version)):
            if ancestor in own:
                result[version] = depth + own[ancestor]
                break
    return result


def _line(parents: Mapping[int, int | None], version: int) -> Iterator[int]:
    """A version and its ancestors, as far as they are known."""
    current: int | None = version
    while current is not None and current in parents:
        yield current
        current = parents[current]
