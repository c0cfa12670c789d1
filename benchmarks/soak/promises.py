"""The promises that a soak checks at its end, in Postgres."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from babylon.core.windows import DONE, WindowState
from babylon.store import Store
from babylon.store.windows import list_windows
from benchmarks.soak.fleet import Played

ENDED = DONE | {WindowState.SKIPPED}  # skipped: nothing to train, until more play comes

LATE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, what was found, and whether it was kept."""

    text: str
    found: str
    kept: bool


async def check_promises(
    store: Store, played: Played, answered_at_end: int | None
) -> list[Promise]:
    """Compare what the agents saw with what Postgres has or had.

    ``answered_at_end``: the version that answered a call when all faults were over.
    """
    await played.look_for_calls(store)
    return [
        _no_call_lost(played),
        _right_version(played),
        await _champion_of_its_time(store, played),
        await _trained_once(store),
        await _windows_accounted_for(store, played),
        await _champion_serves(store, answered_at_end),
    ]


def _no_call_lost(played: Played) -> Promise:
    lost = played.answered.keys() - played.stored.keys()
    return Promise(
        "no answered call is lost",
        f"{len(played.answered)} answered, {len(lost)} lost {sorted(lost)[:3] or ''}",
        not lost and bool(played.answered),
    )


def _right_version(played: Played) -> Promise:
    wrong = [
        name
        for name, one in played.answered.items()
        if played.stored.get(name, one.version) != one.version
    ]
    return Promise("each answer is stored with its policy", f"{len(wrong)} wrong", not wrong)


async def _champion_of_its_time(store: Store, played: Played) -> Promise:
    """Each answer came from a policy that was champion between question and answer.

    Without a promotion nothing was shown.

    A gateway that starts, or that Postgres does not reach, may serve the one before for LATE.
    """
    routes = await store.pool.fetch(
        "SELECT created_at, policy_version FROM babylon.routes ORDER BY route_version"
    )
    ends = [row["created_at"] for row in routes[1:]] + [datetime.max.replace(tzinfo=UTC)]
    reigns = [
        (row["created_at"], end, row["policy_version"])
        for row, end in zip(routes, ends, strict=True)
    ]
    strange = [
        name
        for name, one in played.answered.items()
        if not any(
            version == one.version and begins <= one.at and one.asked - LATE <= ends
            for begins, ends, version in reigns
        )
    ]
    return Promise(
        "each answer came from the champion of its time",
        f"{len(routes)} routes, {len(strange)} answers of others {strange[:3] or ''}",
        not strange and len(reigns) > 1,
    )


async def _trained_once(store: Store) -> Promise:
    """A trajectory is in the batch of one policy at most that was not superseded."""
    rows = await store.pool.fetch(
        "SELECT t.id, count(*) FROM training_batches b, jsonb_array_elements_text("
        'b."trajectoryIds"::jsonb) AS t(id) JOIN babylon.policies p ON true'
        ' WHERE p.batch_id = b."batchId" AND NOT EXISTS ('
        " SELECT FROM babylon.releases r WHERE r.policy_version = p.policy_version)"
        " GROUP BY t.id"
    )
    twice = [row[0] for row in rows if row[1] > 1]
    return Promise(
        "no trajectory is trained twice",
        f"{len(rows)} trained, {len(twice)} twice {twice[:3] or ''}",
        not twice and bool(rows),
    )


async def _windows_accounted_for(store: Store, played: Played) -> Promise:
    states = {row.window_id: row.state for row in await list_windows(store)}
    open_ = [name for name in played.windows if states.get(name) not in ENDED]
    counts: dict[str, int] = {}
    for name in played.windows:
        state = str(states.get(name, "never claimed"))
        counts[state] = counts.get(state, 0) + 1
    return Promise(
        "every window has an end", f"{counts}, open: {open_ or 'none'}", not open_ and bool(counts)
    )


async def _champion_serves(store: Store, answered: int | None) -> Promise:
    champion = await store.pool.fetchval(
        "SELECT policy_version FROM babylon.routes ORDER BY route_version DESC LIMIT 1"
    )
    return Promise(
        "the champion serves at the end",
        f"champion {champion}, last call answered by {answered}",
        answered == champion,
    )
