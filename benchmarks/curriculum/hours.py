"""Hours of a level: played, scored and trained by the code of the real stages, in this process.

There is no database, no gateway and no gate. All seeds of a level and all settings meet the same
worlds.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from babylon.core.learning_settings import PreferenceSettings
from babylon.core.llm_calls import Message
from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.settings import TrainingSettings
from babylon.core.trajectories import Call, TrainingRow, Trajectory
from babylon.evaluation.arena.fitness import best_of, fitness
from babylon.evaluation.arena.play import Plays, play, replies
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.preferences.choose import informative
from babylon.evaluation.preferences.play_on import value_replies
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.fleet.fleet_records import action_of, environment_state
from babylon.game.market.game import make_market
from babylon.game.market.levels import CurriculumLevel
from babylon.game.market.market import Seat
from babylon.game.market.orders import MAX_REPLY_TOKENS, parse_decision
from babylon.game.market.prompts import render_observation
from babylon.game.market.scenario import Scenario, make_scenario
from babylon.quality.correctness import Outcomes
from babylon.quality.decode import GameStep
from babylon.quality.payoffs import payoffs
from babylon.scoring.rewards.heuristic import heuristic
from babylon.stages.words import decision_words
from babylon.training.population.evolve import PopulationMember, Rated, evolve
from babylon.training.population.genes import training_with

if TYPE_CHECKING:
    from babylon.training.preferences.objective import Preferences

AGENTS_A_WORLD = 8
LOOK_WORLDS = 256
PREFERENCES = PreferenceSettings()
EVOLVE_EVERY, FITNESS_WORLDS = 2, 128
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """An hour of one seed. Mean P&L in simulator dollars; ``looked``: of the policy after it."""

    level: str
    seed: int
    hour: int
    fleet_pnl: float
    malformed: float  # share of the fleet's replies
    kl_after: float
    entropy: float
    cpu_s: float
    looked: float | None = None


def worlds_of(level: CurriculumLevel, seed: int, hour: int, count: int) -> list[Scenario]:
    """Return the worlds that the fleet plays in an hour."""
    name = f"curriculum:{level.name}:{seed}:{hour}"
    return [make_scenario(f"{name}:{number}", level.rules(hour)) for number in range(count)]


class Sampler:
    """A checkpoint that plays with its tokens and logprobs kept, as the engine does."""

    def __init__(self, path: str) -> None:
        from babylon.serving.engine.loaded_policies import load

        self.policy = load("curriculum", path, 0)

    def calls(self, seats: Sequence[Seat], seed: int) -> list[Call]:
        """Return one call for each seat."""
        from babylon.serving.engine.running_batch import generate
        from babylon.serving.engine.sampling import Request, Sampling

        asked: list[list[Message]] = [
            [dict(message) for message in render_observation(seat, seat.account.name)]
            for seat in seats
        ]
        requests = [
            Request(
                self.policy.prompt(messages),
                Sampling(max_tokens=MAX_REPLY_TOKENS, seed=_draw(seed, seat)),
            )
            for seat, messages in zip(seats, asked, strict=True)
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
                messages=tuple(observation),
                response=self.policy.decode(completion.token_ids),
                policy_version=0,
                prompt_token_ids=tuple(request.prompt_token_ids),
                completion_token_ids=tuple(completion.token_ids),
                logprobs=tuple(completion.logprobs),
            )
            for seat, observation, request, completion in zip(
                seats, asked, requests, completions, strict=True
            )
        ]


def _draw(seed: int, seat: Seat) -> int:
    identity = f"{seed}:{seat.scenario.scenario_id}:{seat.tick}:{seat.account.name}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=7).digest())


def played(
    sampler: Sampler, worlds: Sequence[Scenario], seed: int, shared: bool
) -> list[Trajectory]:
    """Play all worlds in lock-step, each by a group of agents."""
    names = [f"agent-{number}" for number in range(AGENTS_A_WORLD)]
    tables: list[list[Seat]] = []
    for world in worlds:
        groups = [names] if shared else [[name] for name in names]
        tables += [_seated(world, group) for group in groups]
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


def _seated(world: Scenario, names: Sequence[str]) -> list[Seat]:
    market = make_market(world)
    return [market.join(name) for name in names]


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


def taught(
    level: CurriculumLevel, base: Path, *, seed: int, hours: int, agents: int, directory: Path
) -> Path:
    """Teach the base model the best of its own plays of every world of all hours (SFT only)."""
    from babylon.training.sft import fine_tune

    best: dict[str, TrainingRow] = {}
    sampler = Sampler(str(base))
    for hour in range(hours):
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        for row in scored(played(sampler, worlds, seed, level.shared)):
            if row.scenario_id not in best or row.score > best[row.scenario_id].score:
                best[row.scenario_id] = row
    target = directory / f"sft-{level.name}-{seed}"
    fine_tune(base, [*best.values()], target, tuning="full", batch_size=8)
    return target


def reader(
    level: CurriculumLevel, base: Path, *, seed: int, hours: int, agents: int, directory: Path
) -> Path:
    """Teach the base model to read words: with them, to give the best answer of the moment.

    The hours are those of another seed. Every call is also taught as it was, without words, so that
    the policy without them changes little.
    """
    from babylon.training.sft import fine_tune
    from babylon.training.teacher_prompt import teacher_prompt

    sampler = Sampler(str(base))
    lessons: list[TrainingRow] = []
    for hour in range(hours):
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        play = played(sampler, worlds, seed, level.shared)
        rows = scored(play)
        words = {(one.trajectory_id, one.call): one.text for one in decision_words(rows, play, {})}
        best: dict[tuple[str, int], tuple[float, Call]] = {}
        for row in rows:
            for call in row.calls:
                key, worth = (row.scenario_id, call.step), row.rewards[call.step]
                best[key] = max(best.get(key, (worth, call)), (worth, call), key=lambda one: one[0])
        for row in rows:
            for at, call in enumerate(row.calls):
                answer = best[row.scenario_id, call.step][1].completion_token_ids
                told = teacher_prompt(
                    sampler.policy.tokenizer,
                    call,
                    call.prompt_token_ids or (),
                    words[row.trajectory_id, at],
                    sampler.policy.context,
                )
                read = msgspec.structs.replace(
                    call, prompt_token_ids=told, completion_token_ids=answer, logprobs=None
                )
                lessons.append(msgspec.structs.replace(row, calls=(read, call)))
    Random(seed).shuffle(lessons)
    target = directory / f"reader-{level.name}-{seed}"
    fine_tune(base, lessons, target, tuning="full", batch_size=16)
    return target


def learn(
    level: CurriculumLevel,
    base: Path,
    training: TrainingSettings,
    *,
    seed: int,
    hours: int,
    agents: int,
    looks: Sequence[int],
    directory: Path,
    asked: PreferenceSettings = PREFERENCES,
    rates: Sequence[float] = (),
) -> Iterator[tuple[Hour, Path]]:
    """Play and train hour after hour. Every update serves at once: there is no gate.

    With ``rates``, each hour yields one sibling for each member of a population, whose founders
    have these learning rates; the fittest goes on.
    """
    policy, members = base, _founders(rates)
    rated: dict[int, list[float]] = {}
    for hour in range(hours):
        began = time.process_time()
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        play = played(Sampler(str(policy)), worlds, seed, level.shared)
        rows = scored(play)
        given = preferred(policy, rows, worlds, play, level.shared, training, asked, seed)
        target = directory / f"{level.name}-{seed}-{hour}"
        if members:
            if hour and hour % EVOLVE_EVERY == 0:
                members, rated = _evolved(members, rated, Random(f"{seed}:{hour}")), {}
            fresh = unseen_scenarios(
                "fitness", f"curriculum:{seed}:{hour}", FITNESS_WORLDS, level.rules(hour)
            )
            made = {}
            for member in members:
                own = training_with(training, member.genes)
                place = target.with_name(f"{target.name}-{member.member}")
                made[member.member] = _updated(policy, rows, place, own, asked, given, seed), place
            parent = _plays(policy, fresh)
            gains = [fitness(parent, _plays(place, fresh)).mean for _, place in made.values()]
            for member, gain in zip(members, gains, strict=True):
                rated.setdefault(member.member, []).append(gain)
            report, policy = made[members[best_of(gains)].member]
        else:
            report = _updated(policy, rows, target, training, asked, given, seed)
            policy = target
        failed = [payoff.failed for own in play for payoff in own.payoffs]
        yield (
            Hour(
                level=level.name,
                seed=seed,
                hour=hour,
                fleet_pnl=sum(own.pnl_usd for own in play) / len(play),
                malformed=sum(failed) / len(failed),
                kl_after=report.kl_after,
                entropy=getattr(report, "entropy", float("nan")),
                cpu_s=time.process_time() - began,
                looked=look(level, hour, policy).mean_pnl if hour in looks else None,
            ),
            policy,
        )


def _updated(
    policy: Path,
    rows: Sequence[TrainingRow],
    target: Path,
    training: TrainingSettings,
    asked: PreferenceSettings,
    given: "Preferences",
    seed: int,
) -> Any:
    from babylon.training.update import update_checkpoint
    from babylon.training.update_options import trainer_config

    return update_checkpoint(
        policy,
        rows,
        target,
        tuning=training.tuning,
        config=trainer_config(training, seed, asked),
        staleness={0: 0},
        preferences=given,
    ).report


def _founders(rates: Sequence[float]) -> list[PopulationMember]:
    return [
        PopulationMember(
            generation=0, member=n, parent=None, origin="founder", genes={"learning_rate": rate}
        )
        for n, rate in enumerate(rates)
    ]


def _evolved(
    members: Sequence[PopulationMember], rated: Mapping[int, Sequence[float]], random: Random
) -> list[PopulationMember]:
    means = [Rated(member=one, fitness=fmean(rated[one.member])) for one in members]
    return evolve(means, 1, len(members), random)


def preferred(
    policy: Path,
    rows: Sequence[TrainingRow],
    worlds: Sequence[Scenario],
    play: Sequence[Trajectory],
    shared: bool,
    training: TrainingSettings,
    asked: PreferenceSettings,
    seed: int,
) -> "Preferences":
    """The objective, and the replies that it needs, sampled and valued as the stage does."""
    from babylon.evaluation.preferences.sample import sample_replies
    from babylon.training.preferences.objective import Preferences
    from babylon.training.update_options import preference_config

    objective, options = training.objective, preference_config(asked)
    if "sdpo" in objective.split("+"):
        words = tuple(decision_words(rows, play, {}))
        return Preferences(objective=objective, options=options, words=words)
    if "dpo" not in objective.split("+"):
        return Preferences(objective=objective, options=options)
    points = informative(rows, asked.prompts)
    found = sample_replies(str(policy), points, asked.replies, asked.temperature, seed)
    recorded = _recorded(worlds, play, shared)
    values = value_replies(recorded, points, [[one.text for one in own] for own in found])
    return Preferences(
        objective=objective,
        options=options,
        replies=tuple(
            PromptReplies(
                trajectory_id=point.trajectory_id,
                step=point.call.step,
                prompt_token_ids=tuple(point.call.prompt_token_ids or ()),
                replies=tuple(
                    ValuedReply(completion_token_ids=one.token_ids, value=value)
                    for one, value in zip(own, known, strict=True)
                ),
                temperature=asked.temperature,
                policy_version=0,
            )
            for point, own, known in zip(points, found, values, strict=True)
            if known
        ),
    )


def _recorded(
    worlds: Sequence[Scenario], play: Sequence[Trajectory], shared: bool
) -> list[RecordedScenario]:
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
        players = tuple(one.agent_id for one in plays) if shared else ()
        found.append(RecordedScenario(window_id="", scenario=world, plays=plays, players=players))
    return found


def look(level: CurriculumLevel, hour: int, policy: Path, worlds: int = LOOK_WORLDS) -> Plays:
    """Play the level's unseen worlds, which are the same for all policies and seeds."""
    return _plays(policy, unseen(level, hour, worlds))


def _plays(policy: Path, worlds: Sequence[Scenario]) -> Plays:
    from babylon.evaluation.arena.checkpoint_replies import reply_policy

    return play(replies(reply_policy(str(policy))), worlds)


def unseen(level: CurriculumLevel, hour: int, worlds: int) -> list[Scenario]:
    """Return worlds of an hour's rules that are never trained on."""
    return unseen_scenarios("final", f"curriculum:{level.name}", worlds, level.rules(hour))
