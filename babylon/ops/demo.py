"""The demo: a fleet plays simulated hours, each becomes a policy, and the last meets the first.

Everything is the real thing: Postgres, gateway, engine, recorder and the training flow. How a
window is trained is passed in, because flows are above the library. The closing comparison is
on scenarios that neither training nor any gate has seen.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import Window
from babylon.evaluation.arena.confidence import paired_difference
from babylon.evaluation.arena.play import Plays, play, scripted
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.play_fleet import FleetResult
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scripted import oracle
from babylon.ops.demo_plot import plot_windows
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.serving.serve import serving
from babylon.store import Store, open_store
from babylon.store.policies import champion, ensure_base, get_policy

AGENTS = 64  # eight scenarios of eight agents an hour
PLAY_MIN = 6  # game minutes an hour, one decision each
FINAL_SCENARIOS = 512
FIRST_HOUR = datetime(2026, 1, 1, tzinfo=UTC)  # always the same, so that a seed repeats its demo
RECIPE: dict[str, Any] = {
    "training": {
        "tuning": "full",
        "learning_rate": 5e-4,
        "iterations": 2,
        "batch_size": 16,
        "accumulation": 1,
    },
    "scoring": {"scorer": "heuristic"},
}
Say = Callable[[str], None]
Step = Callable[[str, int, int], None]  # what, done, of
Train = Callable[[str], Awaitable[WindowResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Base against final policy on the same unseen scenarios; P&L in simulator dollars each."""

    scenarios: int
    pnl_base: float
    pnl_final: float
    pnl_oracle: float
    difference: float
    difference_low: float  # 95 % interval of the paired difference
    difference_high: float
    gap_closed: float  # share of the way from base to oracle
    win_rate_base: float
    win_rate_final: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What a demo came to; ``ok`` when the final policy is better beyond doubt."""

    ok: bool
    seed: int
    home: str
    windows: tuple[WindowResult, ...]
    fleet_pnl: tuple[float, ...]  # of the play that each window was trained on
    final: Final
    policy_version: int
    plot: str
    duration_s: float


def demo_overrides(settings: Settings, now: datetime) -> dict[str, Any]:
    """Settings of a demo: a fresh home of its own below the given one, and the demo's recipe.

    The database is the embedded one of that home, whatever the environment says: a toy model has
    no place among the policies of a live game.
    """
    name = f"{now:%Y%m%dT%H%M%S}-seed{settings.seed}"
    return {
        **RECIPE,
        "home": settings.home.root / "demo" / name,
        "database": {"url": None},
        "seed": settings.seed,
        "windows": {"grace_s": 0},  # its hours are over before they are trained
    }


async def run_demo(
    settings: Settings, models: Path, *, windows: int, train: Train, say: Say, step: Step
) -> DemoReport:
    """Play and train ``windows`` hours from ``FIRST_HOUR`` on.

    Args:
        settings: made from ``demo_overrides``.
        models: where the embedded base model is cached from demo to demo.
        train: trains one window by id.
        say, step: told what happens, for people.

    Raises:
        ServingError: a port is busy. Any error of a stage: nothing is hidden in a demo.
    """
    started = time.monotonic()
    async with open_store(settings) as store:
        say(f"Postgres is up under {settings.home.root}")
        await _register_base(store, settings, models, step)
        async with serving(settings) as running:
            say(f"agents play through {running.url}")
            results, played = await _hours(store, settings, windows, train, say, step)
        say("base and final policy meet on unseen scenarios")
        final = await _compare(store, settings)
        policy, _ = await champion(store)
    plot = plot_windows(results, [fleet.mean_pnl for fleet in played], final, settings.home.root)
    return DemoReport(
        ok=final.difference_low > 0,
        seed=settings.seed,
        home=str(settings.home.root),
        windows=tuple(results),
        fleet_pnl=tuple(fleet.mean_pnl for fleet in played),
        final=final,
        policy_version=policy.policy_version,
        plot=str(plot),
        duration_s=time.monotonic() - started,
    )


async def _register_base(store: Store, settings: Settings, models: Path, step: Step) -> None:
    from babylon.training.base_model import resolve_base

    cached = settings.replace(home=models.parent)

    def progress(done: int, total: int) -> None:
        step("base model", done, total)

    base = await asyncio.to_thread(resolve_base, cached, progress)
    await ensure_base(
        store,
        uri=str(base),
        base_model=settings.model.base or Path(base).name,
        digest=await asyncio.to_thread(checkpoint_digest, str(base)),
    )


async def _hours(
    store: Store, settings: Settings, count: int, train: Train, say: Say, step: Step
) -> tuple[list[WindowResult], list[FleetResult]]:
    window = Window(FIRST_HOUR)
    results: list[WindowResult] = []
    played: list[FleetResult] = []
    for number in range(count):
        step("hours of play, trained", number, count)
        plan = FleetPlan(
            start=window.start,
            duration_min=PLAY_MIN,
            agents=AGENTS,
            seed=settings.seed,
            fleet_id=f"demo-{number}",
        )
        played.append(await run_fleet(store, settings, plan, "llm"))
        result = await train(window.id)
        results.append(result)
        say(_line(result, played[-1]))
        window = window.next()
    step("hours of play, trained", count, count)
    return results, played


def _line(result: WindowResult, fleet: FleetResult) -> str:
    before, after = (result.metrics.get(f"pnl_{when}") for when in ("before", "after"))
    gate = f", gate {before:.0f} → {after:.0f}" if isinstance(before, float) else ""
    return (
        f"{result.window_id}: fleet P&L {fleet.mean_pnl:+.0f} over"
        f" {fleet.trajectories} trajectories{gate}, {result.status}"
    )


async def _compare(store: Store, settings: Settings) -> Final:
    suite = unseen_scenarios("final", str(settings.seed), FINAL_SCENARIOS)

    async def arena(version: int) -> Plays:
        policy = await get_policy(store, version)
        player = await asyncio.to_thread(checkpoint_player, policy.uri, settings.seed)
        return await asyncio.to_thread(play, player, suite)

    policy, _ = await champion(store)
    base, final = await arena(0), await arena(policy.policy_version)
    best = play(scripted(oracle), suite).mean_pnl
    difference = paired_difference(base.pnl, final.pnl)
    return Final(
        scenarios=len(suite),
        pnl_base=base.mean_pnl,
        pnl_final=final.mean_pnl,
        pnl_oracle=best,
        difference=difference.mean,
        difference_low=difference.low,
        difference_high=difference.high,
        gap_closed=difference.mean / (best - base.mean_pnl),
        win_rate_base=float(base.win_rate.mean()),
        win_rate_final=float(final.win_rate.mean()),
    )


def report_json(report: DemoReport) -> dict[str, Any]:
    """The report as one flat-enough JSON object."""
    fields = asdict(report)
    return {**fields.pop("final"), **fields}
