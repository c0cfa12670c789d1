"""The demo: a fleet plays simulated hours, each hour trains a policy, and the last policy is
compared with the first.

Postgres, gateway, engine, recorder and the training flow are the real ones. The caller passes the
flow in, because flows lie above the library. The final comparison uses scenarios that neither
training nor the gate has seen.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from babylon.core.home import Home
from babylon.core.settings import ModelSettings, Settings
from babylon.core.trajectories import TrainingRow, training_rows
from babylon.core.types import WindowResult
from babylon.core.windows import GAME_MINUTES, MIN_MINUTES, Window
from babylon.evaluation.arena.confidence import paired_difference
from babylon.evaluation.arena.play import Plays, best_rule, play, scripted
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.play_fleet import FleetResult
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import HOUR, STARTER, Rules
from babylon.game.market.scripted import oracle
from babylon.ops.demo_plot import plot_windows
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.serving.serve import serving
from babylon.store import Store, open_store
from babylon.store.policies import champion, ensure_base, get_policy
from babylon.store.windows import list_windows

FIRST_HOUR = datetime(2026, 1, 1, tzinfo=UTC)  # fixed, so that a seed repeats its demo
MIN_AGENTS = 3  # of a window, whatever the setting of other homes
STEP_DECISIONS = 96  # of a train step: 16 plays of the small game, 2 of the full hour


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoGame:
    """The rules of a demo. An hour lasts as many minutes as the rules have ticks.

    ``windows``: hours of play, unless asked otherwise. ``final``: worlds of the last comparison;
    ``gate``: most worlds of a gate, else the setting's.
    """

    rules: Rules
    windows: int
    agents: int
    final: int
    gate: int | None = None
    base: str | None = None


GAMES = {
    "starter": DemoGame(rules=STARTER, windows=7, agents=128, final=512),
    "hour": DemoGame(rules=HOUR, windows=3, agents=16, final=64, gate=128, base="embedded:hour"),
}
Say = Callable[[str], None]
Step = Callable[[str, int, int], None]  # name, done, total
Train = Callable[[str], Awaitable[WindowResult]]
PlayHour = Callable[[FleetPlan], Awaitable[FleetResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Base against final policy on the same unseen scenarios. Mean P&L in simulator dollars.

    ``rule`` is the scripted rule that earns most there. ``pnl_sft`` is that of the base model after
    supervised fine-tuning on the best play of every scenario of all hours.
    """

    scenarios: int
    pnl_base: float
    pnl_sft: float
    pnl_final: float
    rule: str
    pnl_rule: float
    pnl_oracle: float
    difference: float
    difference_low: float  # 95 % interval of the paired difference
    difference_high: float
    gap_closed: float  # share of the distance from base to the best rule
    win_rate_base: float
    win_rate_final: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The result of a demo. ``ok``: the final policy is better with 95 % confidence."""

    ok: bool
    seed: int
    home: str
    windows: tuple[WindowResult, ...]
    fleet_pnl: tuple[float, ...]  # mean P&L of the play in each window
    final: Final
    policy_version: int
    plot: str
    duration_s: float


def training_recipe(rules: Rules) -> dict[str, Any]:
    """Training settings that fit a tiny model and the length of a play.

    In short plays, four passes teach more than two; in those of an hour, six taught no more.
    """
    return {
        "tuning": "full",
        "learning_rate": 5e-4,
        "iterations": 4 if rules.ticks == STARTER.ticks else 2,
        "batch_size": max(2, STEP_DECISIONS // rules.ticks),
        "accumulation": 1,
    }


def demo_overrides(
    home: Home, seed: int, now: datetime, game: DemoGame, base: str | None, live: bool = False
) -> dict[str, Any]:
    """Settings of a demo: a new home below ``home``, the recipe, and ``base`` or the game's own.

    ``live``: the windows are the shortest that hold a game, and close as in production.

    The database is always the embedded one of that home, and no store, hub or other database takes
    part: a toy model must not get among the policies of a live game.
    """
    name = f"{now:%Y%m%dT%H%M%S}-seed{seed}"
    minutes = MIN_MINUTES if game.rules.ticks < MIN_MINUTES else GAME_MINUTES
    # Without the clock, each hour is a window, and long over.
    windows = {"minutes": minutes} if live else {"minutes": GAME_MINUTES, "grace_s": 0}
    gate = {} if game.gate is None else {"evaluation": {"scenarios": game.gate}}
    return {
        "training": training_recipe(game.rules),
        "scoring": {"scorer": "heuristic"},
        "home": home.root / "demo" / name,
        "artifact_store": None,
        "database": {"url": None, "game_url": None},
        "publish": {"repository": None, "models": None},
        "seed": seed,
        "windows": {**windows, "min_agents": MIN_AGENTS},
        **gate,
        "model": {"base": base or game.base},
    }


async def run_demo(
    settings: Settings,
    models: Path,
    game: DemoGame,
    *,
    windows: int,
    shared: bool,
    train: Train,
    say: Say,
    step: Step,
) -> DemoReport:
    """Play and train ``windows`` hours from ``FIRST_HOUR`` on.

    Args:
        settings: Made from ``demo_overrides``.
        models: Directory that caches the embedded base model between demos.
        shared: The agents of a world trade in one market.
        train: Trains one window by id.
        say: Shows a line to the user.
        step: Shows progress.

    Raises:
        BabylonError: A port is busy, or a stage failed.
    """
    started = time.monotonic()
    async with open_store(settings) as store:
        say(f"Postgres is up under {settings.home.root}")
        await _register_base(store, settings.model, settings.seed, models, step)
        async with serving(settings.serving, settings.home, settings.environment()) as running:
            say(f"agents play through {running.url}")

            async def play_hour(plan: FleetPlan) -> FleetResult:
                # not "scripted": only calls that the policy answered can be trained on
                return await run_fleet(store, settings, plan, "llm")

            plans = _plans(game, settings.seed, windows, shared)
            results, played = await _hours(play_hour, plans, train, say, step)
        say("base and final policy meet on unseen scenarios")
        hours = tuple(zip(results, played, strict=True))
        return await report_hours(store, settings.home, settings.seed, game, hours, started)


async def report_hours(
    store: Store,
    home: Home,
    seed: int,
    game: DemoGame,
    hours: Sequence[tuple[WindowResult, FleetResult]],
    started: float,
) -> DemoReport:
    """Compare base and final policy, and draw the hours. ``started``: ``time.monotonic()``."""
    final = await _compare(store, seed, home, game)
    policy, _ = await champion(store)
    results, fleet_pnl = [one for one, _ in hours], tuple(fleet.mean_pnl for _, fleet in hours)
    plot = plot_windows(results, fleet_pnl, levels(final), home.root)
    return DemoReport(
        ok=final.difference_low > 0,
        seed=seed,
        home=str(home.root),
        windows=tuple(results),
        fleet_pnl=fleet_pnl,
        final=final,
        policy_version=policy.policy_version,
        plot=str(plot),
        duration_s=time.monotonic() - started,
    )


def levels(final: Final) -> dict[str, float]:
    """Return the lines of the plot: name → mean P&L."""
    return {
        "oracle": final.pnl_oracle,
        f"best rule, {final.rule}": final.pnl_rule,
        "base model": final.pnl_base,
        "base model, taught": final.pnl_sft,
        "final policy": final.pnl_final,
    }


async def _register_base(
    store: Store, model: ModelSettings, seed: int, models: Path, step: Step
) -> None:
    from babylon.training.base_model import resolve_base

    def progress(done: int, total: int) -> None:
        step("base model", done, total)

    base = await asyncio.to_thread(resolve_base, model.base, models, seed, progress)
    await ensure_base(
        store,
        uri=str(base),
        base_model=model.base or Path(base).name,
        digest=await asyncio.to_thread(checkpoint_digest, str(base)),
    )


def _plans(game: DemoGame, seed: int, count: int, shared: bool) -> list[FleetPlan]:
    return [
        FleetPlan(
            start=FIRST_HOUR + timedelta(hours=number),
            duration_min=game.rules.ticks,
            agents=game.agents,
            rules=game.rules,
            shared=shared,
            seed=seed,
            fleet_id=f"demo-{number}",
        )
        for number in range(count)
    ]


async def _hours(
    play_hour: PlayHour, plans: Sequence[FleetPlan], train: Train, say: Say, step: Step
) -> tuple[list[WindowResult], list[FleetResult]]:
    results: list[WindowResult] = []
    played: list[FleetResult] = []
    for number, plan in enumerate(plans):
        step("hours of play, trained", number, len(plans))
        played.append(await play_hour(plan))
        result = await train(Window(plan.start).id)
        results.append(result)
        say(hour_line(result, played[-1]))
    step("hours of play, trained", len(plans), len(plans))
    return results, played


def hour_line(result: WindowResult, fleet: FleetResult) -> str:
    """Return a window's end in one line."""
    before, after = (result.metrics.get(f"pnl_{when}") for when in ("before", "after"))
    gate = f", gate {before:.0f} → {after:.0f}" if isinstance(before, float) else ""
    lost = f" ({fleet.abandoned} tables abandoned)" if fleet.abandoned else ""
    return (
        f"{result.window_id}: fleet P&L {fleet.mean_pnl:+.0f} over"
        f" {fleet.trajectories} trajectories{lost}{gate}, {result.status}"
    )


async def _compare(store: Store, seed: int, home: Home, game: DemoGame) -> Final:
    suite = unseen_scenarios("final", str(seed), game.final, game.rules)

    async def arena(checkpoint: str) -> Plays:
        player = await asyncio.to_thread(checkpoint_player, checkpoint, seed)
        return await asyncio.to_thread(play, player, suite)

    policy, _ = await champion(store)
    base_uri = (await get_policy(store, 0)).uri
    base, final = await arena(base_uri), await arena(policy.uri)
    taught = await arena(str(await _taught(store, home, base_uri)))
    rule, best = await asyncio.to_thread(best_rule, suite)
    difference = paired_difference(base.pnl, final.pnl)
    return Final(
        scenarios=len(suite),
        pnl_base=base.mean_pnl,
        pnl_sft=taught.mean_pnl,
        pnl_final=final.mean_pnl,
        rule=rule,
        pnl_rule=best.mean_pnl,
        pnl_oracle=play(scripted(oracle), suite).mean_pnl,
        difference=difference.mean,
        difference_low=difference.low,
        difference_high=difference.high,
        gap_closed=difference.mean / (best.mean_pnl - base.mean_pnl),
        win_rate_base=float(base.win_rate.mean()),
        win_rate_final=float(final.win_rate.mean()),
    )


async def _taught(store: Store, home: Home, base: str) -> Path:
    """Teach the base model the best play of every scenario, and return the checkpoint."""
    from babylon.training.sft import fine_tune

    rows: dict[str, TrainingRow] = {}
    for window in await list_windows(store):
        if window.scored is not None:
            for row in training_rows(home, window.scored.artifact):
                if row.scenario_id not in rows or row.score > rows[row.scenario_id].score:
                    rows[row.scenario_id] = row
    target = home.root / "sft"
    teach = partial(fine_tune, base, [*rows.values()], target, tuning="full", batch_size=8)
    await asyncio.to_thread(teach)
    return target


def report_json(report: DemoReport) -> dict[str, Any]:
    """The report as one JSON object."""
    fields = asdict(report)
    return {**fields.pop("final"), **fields}
