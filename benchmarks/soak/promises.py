"""The promises that a soak checks at its end, in Postgres."""

from dataclasses import dataclass

from babylon.core.windows import DONE, WindowState
from babylon.store import Store
from babylon.store.windows import list_windows
from benchmarks.soak.fleet import Played

ENDED = DONE | {WindowState.SKIPPED}  # skipped: nothing to train, until more play comes


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, what was found, and whether it was kept."""

    text: str
    found: str
    kept: bool


async def check_promises(
    store: Store, played: Played, answered_at_end: int | None
) -> list[Promise]:
    """Compare what the agents saw with what Postgres has.

    ``answered_at_end``: the version that answered a call when all faults were over.
    """
    return [
        await _no_call_lost(store, played),
        await _right_version(store, played),
        await _trained_once(store),
        await _windows_accounted_for(store, played),
        await _champion_serves(store, answered_at_end),
    ]


async def _no_call_lost(store: Store, played: Played) -> Promise:
    rows = await store.pool.fetch(
        "SELECT call_id FROM babylon.calls WHERE call_id = ANY($1)", list(played.answered)
    )
    lost = played.answered.keys() - {row[0] for row in rows}
    return Promise(
        "no answered call is lost",
        f"{len(played.answered)} answered, {len(lost)} lost {sorted(lost)[:3] or ''}",
        not lost and bool(played.answered),
    )


async def _right_version(store: Store, played: Played) -> Promise:
    rows = await store.pool.fetch("SELECT call_id, policy_version FROM babylon.calls")
    stored = {row[0]: row[1] for row in rows}
    wrong = [
        call for call, version in played.answered.items() if stored.get(call, version) != version
    ]
    return Promise("each answer is stored with its policy", f"{len(wrong)} wrong", not wrong)


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
    versions = await store.pool.fetch("SELECT policy_version FROM babylon.routes")
    champion = await store.pool.fetchval(
        "SELECT policy_version FROM babylon.routes ORDER BY route_version DESC LIMIT 1"
    )
    strange = {
        row[0]
        for row in await store.pool.fetch("SELECT DISTINCT policy_version FROM babylon.calls")
    } - {row[0] for row in versions}
    return Promise(
        "the champion serves, and only policies of a route answered",
        f"champion {champion}, last call answered by {answered}, others: {strange or 'none'}",
        answered == champion and not strange,
    )
