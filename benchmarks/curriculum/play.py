"""The play of a level's worlds by a checkpoint, with what an update needs of it.

There is no database and no gateway. All seeds of a level and all settings meet the same worlds.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from babylon.core.trajectories import Call, TrainingRow, Trajectory
from babylon.evaluation.arena.play import Plays, play, replies
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.fleet.fleet_records import action_of, environment_state
from babylon.game.market.game import make_market
from babylon.game.market.levels import CurriculumLevel
from babylon.game.market.market import Seat
from babylon.game.market.orders import MAX_REPLY_TOKENS, parse_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Rules, Scenario, make_scenario
from babylon.quality.correctness import Outcomes
from babylon.quality.decode import GameStep
from babylon.quality.payoffs import payoffs
from babylon.scoring.rewards.heuristic import heuristic
from benchmarks.curriculum.wording import reworded

AGENTS_A_WORLD = 8
LOOK_WORLDS = 256
START = datetime(2026, 1, 1, tzinfo=UTC)


def worlds_of(level: CurriculumLevel, seed: int, hour: int, count: int) -> list[Scenario]:
    """Return the worlds that the fleet plays in an hour."""
    name = f"curriculum:{level.name}:{seed}:{hour}"
    return [make_scenario(f"{name}:{number}", level.rules(hour)) for number in range(count)]


def unseen(level: CurriculumLevel, hour: int, worlds: int) -> list[Scenario]:
    """Return worlds of an hour's rules that are never trained on."""
    return unseen_scenarios("final", f"curriculum:{level.name}", worlds, level.rules(hour))


def seats_of(level: CurriculumLevel) -> int:
    """Return the number of agents in one market."""
    return AGENTS_A_WORLD if level.shared else 1


class Sampler:
    """A checkpoint that plays with its tokens and logprobs kept, as the engine does."""

    def __init__(self, path: str) -> None:
        from babylon.serving.engine.loaded_policies import load

        self.policy = load("curriculum", path, 0)

    def calls(self, seats: Sequence[Seat], seed: int) -> list[Call]:
        """Return one call for each seat."""
        from babylon.serving.engine.running_batch import generate
        from babylon.serving.engine.sampling import Request, Sampling

        chats: list[list[dict[str, Any]]] = [
            list(render_observation(seat, seat.account.name)) for seat in seats
        ]
        requests = [
            Request(
                self.policy.prompt(chat),
                Sampling(max_tokens=MAX_REPLY_TOKENS, seed=_draw(seed, seat)),
            )
            for seat, chat in zip(seats, chats, strict=True)
        ]
        completions = generate(
            self.policy.model,
            requests,
            eos_token_ids=self.policy.eos_token_ids,
            pad_token_id=self.policy.pad_token_id,
        )
        return [
            Call(
                step=seat.tick,
                messages=tuple(chat),
                response=self.policy.decode(completion.token_ids),
                policy_version=0,
                prompt_token_ids=tuple(request.prompt_token_ids),
                completion_token_ids=tuple(completion.token_ids),
                logprobs=tuple(completion.logprobs),
            )
            for seat, chat, request, completion in zip(
                seats, chats, requests, completions, strict=True
            )
        ]


def _draw(seed: int, seat: Seat) -> int:
    identity = f"{seed}:{seat.scenario.scenario_id}:{seat.tick}:{seat.account.name}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=7).digest())


def played(
    sampler: Sampler,
    worlds: Sequence[Scenario],
    seed: int,
    shared: bool,
    wealth: Sequence[float] = (),
) -> list[Trajectory]:
    """Play all worlds in lock-step, each by a group of agents.

    ``wealth``: the agents' opening balances in dollars, world by world; empty: the rules'.
    """
    names = [f"agent-{number}" for number in range(AGENTS_A_WORLD)]
    opening = iter(wealth)
    tables: list[list[Seat]] = []
    for world in worlds:
        groups = [names] if shared else [[name] for name in names]
        tables += [_seated(world, group, opening) for group in groups]
    seats = [seat for table in tables for seat in table]
    calls: dict[int, list[Call]] = {id(seat): [] for seat in seats}
    states: dict[int, list[dict[str, object]]] = {id(seat): [] for seat in seats}
    while not seats[0].over:
        for seat in seats:
            states[id(seat)].append(environment_state(seat))
        asked = dict(zip(map(id, seats), sampler.calls(seats, seed), strict=True))
        for table in tables:
            table[0].market.step(
                {seat.account.name: parse_decision(asked[id(seat)].response) for seat in table}
            )
        for key, call in asked.items():
            calls[key].append(call)
    for table in tables:
        table[0].market.settle()
    return [_trajectory(seat, calls[id(seat)], states[id(seat)]) for seat in seats]


def _seated(world: Scenario, names: Sequence[str], opening: Iterator[float]) -> list[Seat]:
    market = make_market(world)
    return [market.join(name, next(opening, None)) for name in names]


def _trajectory(
    seat: Seat, calls: Sequence[Call], states: Sequence[Mapping[str, object]]
) -> Trajectory:
    steps = [
        {
            "stepNumber": tick,
            "environmentState": state,
            "llmCalls": [],
            "action": msgspec.to_builtins(action_of(outcome, seat, tick)),
        }
        for tick, (state, outcome) in enumerate(zip(states, seat.outcomes, strict=True))
    ]
    curve = [float(str(state["agentPnL"])) for state in states] + [seat.pnl]
    falls = (peak - now for peak, now in zip(accumulate(curve, max), curve, strict=True))
    world = seat.scenario.scenario_id
    return Trajectory(
        trajectory_id=f"{world}/{seat.account.name}",
        agent_id=seat.account.name,
        window_id="",
        scenario_id=world,
        start=START,
        end=START + timedelta(hours=1),
        pnl_usd=seat.pnl,
        drawdown_usd=max(falls),
        wins=0,
        trades=0,
        actions=0,
        steps=len(steps),
        calls=tuple(calls),
        payoffs=payoffs(
            msgspec.convert(steps, tuple[GameStep, ...]), Outcomes([]), world, seat.pnl
        ),
    )


def wealth_after(rules: Rules, play: Sequence[Trajectory], wealth: Sequence[float]) -> list[float]:
    """Return the balances with which the agents of an hour begin the next one.

    Those that cannot pay the largest order begin anew.
    """
    opening = wealth or [rules.start_balance] * len(play)
    closing = [before + own.pnl_usd for before, own in zip(opening, play, strict=True)]
    return [after if after >= rules.max_order else rules.start_balance for after in closing]


def scored(play: Sequence[Trajectory]) -> list[TrainingRow]:
    """Score a window by the default scorer."""
    return [
        TrainingRow(
            trajectory_id=own.trajectory_id,
            agent_id=own.agent_id,
            scenario_id=own.scenario_id,
            score=given.value,
            calls=own.calls,
            rewards=given.rewards,
        )
        for own, given in zip(play, heuristic(play), strict=True)
    ]


def look(
    level: CurriculumLevel,
    hour: int,
    policy: Path,
    worlds: int = LOOK_WORLDS,
    *,
    new_words: bool = False,
) -> Plays:
    """Play the level's unseen worlds, which are the same for all policies and seeds.

    The policy has all seats of a shared market, and its results are means over them.
    """
    from babylon.evaluation.arena.checkpoint_replies import reply_policy

    met = unseen(level, hour, worlds)
    met = [reworded(world) for world in met] if new_words else met
    seats = seats_of(level)
    return play(replies(reply_policy(str(policy))), met, seats=seats, copies=seats)


def recorded(worlds: Sequence[Scenario], play: Sequence[Trajectory]) -> list[RecordedScenario]:
    found = []
    for world in worlds:
        plays = tuple(
            RecordedPlay(
                trajectory_id=own.trajectory_id,
                agent_id=own.agent_id,
                replies=tuple(call.response for call in own.calls),
                pnl_usd=own.pnl_usd,
            )
            for own in play
            if own.scenario_id == world.scenario_id
        )
        found.append(RecordedScenario(window_id="", scenario=world, plays=plays))
    return found
