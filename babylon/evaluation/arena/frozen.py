"""Forgetting: the challenger that won its match also plays a suite that stays the same for months.

A gate plays new worlds and compares with the serving policy only. What each gate tolerates, such as
2 points more of malformed replies, and losses that luck hid could add up. The frozen suite belongs
to the rules that the fleet plays: its worlds are the same at every gate, and the challenger is
compared with the best policy that ever served by these rules. Results are stored, so each policy
plays a suite once. Under other rules the fleet needs other play, so they have a suite of their own;
results with other numbers of seats in a market are results of their own.

The best of many results is a lucky one. A challenger is vetoed only if it is surely more than
``MAX_FORGOTTEN`` below it, or if its share of malformed replies is surely more than
``MAX_EXTRA_MALFORMED`` above the lowest. The longer the line, the luckier is the lowest share, and
the surer this must be.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import blake2b

import msgspec

from babylon.core.types import Frozen, Verdict
from babylon.evaluation.arena.confidence import paired_difference
from babylon.evaluation.arena.play import Decide, PlayerResult, play, result_of
from babylon.evaluation.arena.ruling import MAX_EXTRA_MALFORMED
from babylon.evaluation.arena.suite import digest, unseen_scenarios
from babylon.evaluation.arena.worlds import GateWorlds
from babylon.game.market.scenario import Rules, Scenario
from babylon.store.arena_results import register_suite, store_result, stored_result
from babylon.store.connection import Store
from babylon.store.routes import all_routes

MAX_FORGOTTEN = 0.05  # share of the start balance
SHARE = 8  # a gate's worlds for each world of the suite
FEWEST, MOST = 32, 256  # worlds of a suite


async def frozen_check(
    store: Store, worlds: GateWorlds, players: dict[int, Decide], own: int, seed: int
) -> Frozen:
    """Let policy ``own`` play the frozen suite, and compare it with those that served before.

    ``players``: the challenger and the serving policy, which plays too if it never has.
    """
    rules = worlds.scenarios[-1].rules  # the fresh worlds come last: they have the fleet's rules
    scenarios = suite_of(rules, worlds.budget)
    name = await _registered(store, scenarios)
    results: dict[int, PlayerResult] = {}
    served = {route.policy_version for route in await all_routes(store)} - {own}
    for version in sorted({*served, *players}):
        player = f"policy:{version}" + (f":{worlds.seats} seats" if worlds.seats > 1 else "")
        known = await stored_result(store, name, player, seed)
        if known is not None:
            results[version] = msgspec.convert(known, PlayerResult)
        elif version in players:
            meet = (players[version], scenarios)
            plays = await asyncio.to_thread(play, *meet, seats=worlds.seats, copies=worlds.seats)
            results[version] = result_of(plays)
            await store_result(store, name, player, seed, asdict(results[version]))
    challenger = results.pop(own)
    return compared(challenger, results, rules, name)


def suite_of(rules: Rules, budget: int) -> list[Scenario]:
    """Return the frozen worlds of the rules, an eighth as many as a gate plays at most."""
    count = max(FEWEST, min(MOST, budget // SHARE))
    name = blake2b(repr(rules).encode(), digest_size=8).hexdigest()
    return unseen_scenarios("frozen", name, count, rules)


async def _registered(store: Store, scenarios: Sequence[Scenario]) -> str:
    """Register the suite under its digest: worlds that a new version changes are a new suite."""
    found = await asyncio.to_thread(digest, scenarios)
    await register_suite(store, f"frozen-{found[:16]}", 1, digest=found, scenarios=len(scenarios))
    return found


def compared(
    own: PlayerResult, others: dict[int, PlayerResult], rules: Rules, suite: str
) -> Frozen:
    """Compare a challenger with the policies before. ``others``: version → result, at least one."""
    best = max(others, key=lambda version: others[version].mean_pnl.mean)
    difference = paired_difference(others[best].pnl, own.pnl)
    allowed = MAX_FORGOTTEN * rules.start_balance
    fewest = min(others.values(), key=lambda result: result.malformed)
    # the lowest of many noisy shares is a lucky one, so all of them share the error
    rise = paired_difference(_shares(fewest), _shares(own), means=len(others))
    problem, where = None, "on the frozen suite"
    if difference.high < -allowed:
        problem = f"{where} its P&L difference to policy {best} is {difference}"
        problem += f"; the limit is ${allowed:.0f} less"
    elif rise.low > MAX_EXTRA_MALFORMED:
        problem = (
            f"{where} malformed replies are {own.malformed:.1%}, of an earlier policy"
            f" {fewest.malformed:.1%}, so they rose by {rise.low:.1%} at least; the limit is"
            f" {MAX_EXTRA_MALFORMED:.0%} more"
        )
    return Frozen(
        suite_digest=suite,
        scenarios=len(own.pnl),
        pnl=own.mean_pnl.mean,
        malformed=own.malformed,
        best_version=best,
        best_pnl=others[best].mean_pnl.mean,
        difference_low=difference.low,
        difference_high=difference.high,
        problem=problem,
    )


def _shares(result: PlayerResult) -> tuple[float, ...]:
    """Malformed replies by world. An earlier version stored their mean alone."""
    return result.malformed_shares or (result.malformed,) * len(result.pnl)


def withheld(verdict: Verdict, check: Frozen) -> Verdict:
    """Add the check to a verdict that promotes. A problem turns it into a rejection."""
    verdict = replace(verdict, frozen=check)
    if check.problem is None:
        return verdict
    reason = f"forgotten: {check.problem}; in the arena, {verdict.reason}"
    return replace(verdict, promote=False, reason=reason, evidence="the frozen suite")
