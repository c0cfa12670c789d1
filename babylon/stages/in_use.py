"""Decisions about what is still in use: checkpoints, and the play of windows. No disk, no database.

Retention removes the rest. A window's play is its rows, calls, scores and artifacts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import date, datetime, timedelta

from babylon.core.windows import DONE, Window, WindowState, parse_window_id
from babylon.store.checkpoints_in_use import Holdings
from babylon.store.play_in_use import WindowUse
from babylon.store.routes import champions


def kept(holdings: Holdings, bases: Mapping[int, str], *, number: int) -> frozenset[int]:
    """Return the policies whose checkpoints stay.

    These are: policies that serve or are proposed; the last ``number`` champions, for a rollback;
    the ``number`` newest and the ``number`` best by P&L of their verdict, among those that may
    serve; base models; policies of windows in work; and the bases of kept adapters.

    Args:
        bases: version of an adapter → directory of its base model.
    """
    present = [held for held in holdings.policies if not held.removed]
    barred = _barred(holdings)
    may_serve = [held for held in present if held.policy_version not in barred]
    keep = {held.policy_version for held in present if held.kind == "base"}
    keep |= set(champions(holdings.routed)[-1 - number :]) | holdings.in_use
    keep |= {held.policy_version for held in may_serve[-number:]}
    judged = [(held.pnl, held.policy_version) for held in may_serve if held.pnl is not None]
    keep |= {version for _, version in sorted(judged)[-number:]}
    needed = {bases[version] for version in keep if version in bases}
    return frozenset(keep | {held.policy_version for held in present if held.uri in needed})


def _barred(holdings: Holdings) -> set[int]:
    """Return the policies that may never serve again: released ones and their descendants."""
    barred: set[int] = set()
    for held in holdings.policies:  # parents come first
        if held.released or held.parent_version in barred:
            barred.add(held.policy_version)
    return barred


def oldest_in_use(
    now: datetime, *, days: int, lookback_hours: int, experiment_began: datetime | None
) -> datetime:
    """Return the moment since which all play is in use.

    Play of the last ``days`` can be judged again, published and trained by a recipe; play of the
    lookback is trained by itself; a running experiment is judged by all play since its beginning.
    """
    oldest = now - max(timedelta(days=days), timedelta(hours=lookback_hours))
    return min(oldest, experiment_began or oldest)


def spent(
    windows: Iterable[WindowUse], *, before: datetime, published: Collection[str] | None
) -> frozenset[str]:
    """Return the windows whose play is no longer in use.

    A window is in use if any of these holds, for itself or for another window over the same play,
    which is a recipe's or has another length:

    - it ended or changed after ``before`` (a backfill changes an old window),
    - a worker holds it,
    - its checkpoint is committed and not yet judged,
    - its checkpoint exists: after a rollback its play may be trained again,
    - somebody publishes, and it was trained but not published.

    Args:
        published: windows in a repository of the dataset; None if nobody publishes.
    """
    spans = [(one, parse_window_id(one.window_id, one.minutes)) for one in windows]
    in_use: defaultdict[date, list[Window]] = defaultdict(list)  # no window crosses midnight
    for one, span in spans:
        if _in_use(one, span.end, before, published):
            in_use[span.start.date()].append(span)
    return frozenset(
        one.window_id
        for one, span in spans
        if not any(
            span.start < other.end and other.start < span.end for other in in_use[span.start.date()]
        )
    )


def _in_use(
    one: WindowUse, end: datetime, before: datetime, published: Collection[str] | None
) -> bool:
    unpublished = published is not None and one.window_id not in published
    return (
        max(end, one.changed_at) >= before
        or one.leased
        or one.state == WindowState.TRAINED
        or one.has_checkpoint
        or (one.state in DONE and one.is_scored and unpublished)
    )
