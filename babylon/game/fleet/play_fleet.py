"""Playing a fleet: LLM agents through an ordinary ``openai`` client, or scripted agents.

A round deals the agents into scenarios of a few. A scenario lasts the ticks of its rules, one game
minute each; then the next round begins. Each agent has its own copy of the market, or the agents of
a scenario share one. The recorder writes the play in the format of the live game's rows. Time is
simulated (a past window is played at full speed) or real (one tick per minute).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from babylon.core.errors import ServingError
from babylon.core.windows import sleep_until, window_at
from babylon.game.fleet.answers import Answer, Turn
from babylon.game.fleet.fleet_plan import TICK, FleetPlan, deal, plan_rounds, shards
from babylon.game.fleet.fleet_records import (
    PlayedStep,
    environment_state,
    ground_truth,
    observe,
    observe_end,
    record_step,
)
from babylon.game.market.game import make_market
from babylon.game.market.market import Seat
from babylon.game.market.observed import observed
from babylon.game.market.orders import parse_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Scenario
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder

Progress = Callable[[int, int], None]  # rounds played, rounds planned
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Totals of a fleet's play; ``mean_pnl`` per trajectory in simulator dollars.

    ``abandoned``: tables of which nothing is recorded, because a call failed.
    """

    windows: tuple[str, ...]
    scenarios: int
    trajectories: int
    calls: int
    mean_pnl: float
    abandoned: int = 0


async def play_fleet(
    plan: FleetPlan,
    answer: Answer,
    recorder: TrajectoryRecorder,
    tracker: MarketOutcomesTracker,
    *,
    progress: Progress | None = None,
) -> FleetResult:
    """Play all rounds and record every trajectory.

    A window's outcomes are written as soon as its last round is over, so that training can collect
    it while later windows are played. A call that fails ends its table alone.

    Raises:
        ServingError: The endpoint answers no table of a round.
    """
    rounds = plan_rounds(plan)
    windows = [window_at(start, plan.window_minutes) for start, _ in rounds]
    pnl: list[float] = []
    calls = abandoned = 0
    for number, (start, ticks) in enumerate(rounds):
        tables = []
        for scenario, agents in deal(plan, start, ticks, number):
            # Each agent moves its own copy of the prices, so no copy has the public ones.
            if not plan.shared:
                _observe_unattended(tracker, scenario, start)
            for members in [agents] if plan.shared else [[agent] for agent in agents]:
                table = _Table(plan, number, scenario, members, start, answer, recorder, tracker)
                tables.append(table.try_to_play())
        results = await _together(tables)
        played = [one for result in results if isinstance(result, list) for one in result]
        failed = [result for result in results if isinstance(result, ServingError)]
        if not played:
            raise failed[0]
        for error in failed:
            log.warning("round %d: a table is abandoned and not recorded: %s", number + 1, error)
        pnl += played
        calls += ticks * len(played)
        abandoned += len(failed)
        if progress is not None:
            progress(number + 1, len(rounds))
        if windows[number] not in windows[number + 1 :]:
            if plan.live:
                await sleep_until(windows[number].end)
            await tracker.write(windows[number].id)
    return FleetResult(
        windows=tuple(dict.fromkeys(window.id for window in windows)),
        scenarios=len(rounds) * len(shards(plan)),
        trajectories=len(pnl),
        calls=calls,
        mean_pnl=sum(pnl) / len(pnl),
        abandoned=abandoned,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """One market and its players."""

    plan: FleetPlan
    number: int
    scenario: Scenario
    agents: list[str]
    start: datetime
    answer: Answer
    recorder: TrajectoryRecorder
    tracker: MarketOutcomesTracker

    async def try_to_play(self) -> list[float] | ServingError:
        """Play, and return the error of a call that failed: other tables go on."""
        try:
            return await self.play()
        except ServingError as error:
            return error

    async def play(self) -> list[float]:
        """Play to the end, record one trajectory per agent and return the agents' P&L."""
        market = make_market(self.scenario)
        seats = {agent: market.join(agent) for agent in self.agents}
        for agent in self.agents:
            self.recorder.start(
                agent,
                self.scenario.scenario_id,
                trajectory_id=self._trajectory_id(agent),
                at=self.start,
            )
        played: list[PlayedStep] = []
        while not market.over:
            played += await self._tick(seats)
        market.settle()
        if self.plan.shared:
            observe_end(self.tracker, self.scenario, self.start)
        for step in played:
            record_step(self.recorder, step)
        for agent, seat in seats.items():
            await self.recorder.finish(
                self._trajectory_id(agent),
                final_balance=seat.balance,
                final_pnl=seat.pnl,
                status="completed",
                game_knowledge=ground_truth(self.scenario),
                at=self.start + self.scenario.rules.ticks * TICK,
            )
        return [seat.pnl for seat in seats.values()]

    async def _tick(self, seats: dict[str, Seat]) -> list[PlayedStep]:
        """Ask all agents about the same state, then carry out their decisions."""
        market = next(iter(seats.values())).market
        tick = market.tick
        moment = self.start + tick * TICK
        if self.plan.live:
            await sleep_until(moment)
        if self.plan.shared:
            observe(self.tracker, market, moment)
        turns = [
            Turn(agent, self._trajectory_id(agent), tick, render_observation(seat, agent), seat)
            for agent, seat in seats.items()
        ]
        before = [(environment_state(seat) | observed(seat), seat.pnl) for seat in seats.values()]
        replies = await _together([self.answer(turn) for turn in turns])
        outcomes = market.step(
            {
                t.agent_id: parse_decision(reply.text)
                for t, reply in zip(turns, replies, strict=True)
            }
        )
        return [
            PlayedStep(turn, moment, state, reply, outcomes[turn.agent_id], turn.game.pnl - pnl)
            for turn, (state, pnl), reply in zip(turns, before, replies, strict=True)
        ]

    def _trajectory_id(self, agent: str) -> str:
        return f"{self.plan.fleet_id}-r{self.number}-{agent}"


def _observe_unattended(
    tracker: MarketOutcomesTracker, scenario: Scenario, start: datetime
) -> None:
    """Track the public history of a scenario as it runs without players."""
    market = make_market(scenario)
    while not market.over:
        observe(tracker, market, start + market.tick * TICK)
        market.step({})
    observe_end(tracker, scenario, start)


async def _together(awaitables: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Await all and return the results in order.

    Only the first error is raised: if the endpoint is down, all errors are the same.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(awaitable) for awaitable in awaitables]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
