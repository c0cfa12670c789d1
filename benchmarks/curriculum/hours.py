"""Hours of a level: played, scored and trained by the code of the real stages, in this process.

There is no database, no gateway and no gate. All seeds of a level and all settings meet the same
worlds.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.settings import EvaluationSettings
from babylon.core.trajectories import Call, TrainingRow, Trajectory
from babylon.evaluation.arena.fleet_promise import broken_promise, pairs_of
from babylon.evaluation.arena.match import compare
from babylon.evaluation.arena.play import Plays, play, replies
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import simulated
from babylon.evaluation.preferences.choose import informative
from babylon.evaluation.preferences.play_on import value_replies
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
from babylon.stages.words import decision_words
from babylon.store.fleet_pairs import FleetPair
from benchmarks.curriculum.wording import reworded

if TYPE_CHECKING:
    from babylon.training.preferences.objective import Preferences

AGENTS_A_WORLD = 8
RETURNED = "return"
CHANGES = ("promote", RETURNED)  # of the policy that plays the next hour
LOOK_WORLDS = 256
PREFERENCES = PreferenceSettings()
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """An hour of one seed. Mean P&L in simulator dollars; ``looked``: of the policy after it.

    ``wealth``: the balances with which the agents begin the next hour, if they keep their wealth.
    """

    level: str
    seed: int
    hour: int
    fleet_pnl: float
    failed: float  # share of the fleet's actions, malformed and refused
    kl_after: float | None
    entropy: float | None
    cpu_s: float
    undone: int = 0
    gate: str = ""
    gains: tuple[float | None, ...] = ()  # of a population's members over the policy that played
    pairs: tuple[
        FleetPair, ...
    ] = ()  # of the gate: the fleet and the base model in the same worlds
    looked: float | None = None
    wealth: tuple[float, ...] = ()


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


def wealth_after(rules: Rules, play: Sequence[Trajectory], wealth: Sequence[float]) -> list[float]:
    """Return the balances with which the agents of an hour begin the next one.

    Those that cannot pay the largest order begin anew.
    """
    opening = wealth or [rules.start_balance] * len(play)
    closing = [before + own.pnl_usd for before, own in zip(opening, play, strict=True)]
    return [after if after >= rules.max_order else rules.start_balance for after in closing]


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
    wealth: Sequence[float] = ()
    for hour in range(hours):
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        play = played(sampler, worlds, seed, level.shared, wealth)
        wealth = wealth_after(level.rules(hour), play, wealth) if level.shared else ()
        for row in scored(play):
            if row.scenario_id not in best or row.score > best[row.scenario_id].score:
                best[row.scenario_id] = row
    target = directory / f"sft-{level.name}-{seed}"
    fine_tune(base, [*best.values()], target, tuning="full", batch_size=8)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An hour's play as an update gets it, the policy that played, and the hours before."""

    level: CurriculumLevel
    hour: int
    base: Path
    policy: Path
    worlds: Sequence[Scenario]
    play: Sequence[Trajectory]
    rows: Sequence[TrainingRow]
    seed: int
    before: Sequence[Hour] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The figures of an update: nats a token, the iterations that were undone, the gate's words.

    ``None``: nothing was trained, or the trainer does not say.
    """

    kl_after: float | None = None
    entropy: float | None = None
    undone: int = 0
    gate: str = ""
    gains: tuple[float | None, ...] = ()
    pairs: tuple[FleetPair, ...] = ()


Update = Callable[[Window, TrainingSettings, Path], Moved]


def own_update(
    window: Window,
    training: TrainingSettings,
    target: Path,
    asked: PreferenceSettings = PREFERENCES,
) -> Moved:
    """Train as the stage does. A window that teaches nothing leaves the policy as it is."""
    from babylon.training.update import update_checkpoint
    from babylon.training.update_options import trainer_config

    try:
        report: Any = update_checkpoint(
            window.policy,
            window.rows,
            target,
            tuning=training.tuning,
            config=trainer_config(training, window.seed, asked),
            staleness={0: 0},
            preferences=preferred(window, training, asked),
        ).report
    except (WindowNotReadyError, TrainingError) as error:
        print(f"not trained: {error}", flush=True)
        shutil.copytree(window.policy, target, dirs_exist_ok=True)
        return Moved()
    return Moved(
        kl_after=report.kl_after,
        entropy=getattr(report, "entropy", None),
        undone=getattr(report, "iterations_undone", 0),
    )


def gated_update(
    window: Window,
    training: TrainingSettings,
    target: Path,
    asked: PreferenceSettings = PREFERENCES,
) -> Moved:
    """Do the same, and keep the policy that played unless the arena's gate promotes the new one.

    The gate plays fresh worlds of the hour's rules, as it does where the fleet plays the simulator.
    As in the stage ``deploy``, the base model returns once the fleet's play shows that it earns
    more.
    """
    from babylon.evaluation.arena.players import checkpoint_player

    moved = own_update(window, training, target, asked)
    seed = f"curriculum:{window.level.name}:{window.seed}:{window.hour}"
    budget = EvaluationSettings().scenarios
    worlds = simulated(
        unseen_scenarios("gate", seed, budget, window.level.rules(window.hour)),
        seats_of(window.level),
    )
    old, new = (checkpoint_player(str(path), window.seed) for path in (window.policy, target))
    match = asyncio.run(compare(old, new, worlds))
    gain = match.challenger.mean_pnl - match.champion.mean_pnl
    kept, gate, pairs = window.policy, f"{match.ruling}: {match.reason}", _beside_base(window)
    lost = broken_promise([*_since_change(window.before), pairs])
    returns = lost is not None and (match.ruling != "promote" or -lost.mean > gain)
    if returns:
        kept, gate = window.base, f"{RETURNED}: the fleet earned {lost} a play over the base model"
    if returns or match.ruling != "promote":
        shutil.rmtree(target)
        shutil.copytree(kept, target)
    return replace(moved, gate=gate, pairs=pairs)


def _beside_base(window: Window) -> tuple[FleetPair, ...]:
    """Return the pairs of an hour, none if the base model itself played it."""
    from babylon.evaluation.arena.players import checkpoint_player

    changes = [hour.gate for hour in window.before if hour.gate.startswith(CHANGES)]
    if window.level.shared or not changes or changes[-1].startswith(RETURNED):
        return ()
    worlds = _recorded(window.worlds, window.play)
    return tuple(pairs_of(worlds, checkpoint_player(str(window.base), window.seed)))


def _since_change(before: Sequence[Hour]) -> list[tuple[FleetPair, ...]]:
    """Return the pairs of the hours that the present policy played."""
    found: list[tuple[FleetPair, ...]] = []
    for hour in before:
        found = [] if hour.gate.startswith(CHANGES) else [*found, hour.pairs]
    return found


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
    first: int = 0,
    update: Update = own_update,
) -> Iterator[tuple[Hour, Path]]:
    """Play and train ``hours`` hours from ``first`` on. Without a gate every update serves at once.

    ``directory`` keeps the hours and the newest policy, and a later call goes on from there.
    """
    known = directory / "hours.jsonl"
    policy, before = base, list[Hour]()
    for line in known.read_bytes().splitlines() if known.exists() else ():
        hour = msgspec.json.decode(line, type=Hour)
        policy = directory / str(hour.hour)
        before.append(hour)
        yield hour, policy
    for number in range(first if policy == base else int(policy.name) + 1, first + hours):
        began = time.process_time()
        worlds = worlds_of(level, seed, number, agents // AGENTS_A_WORLD)
        wealth = before[-1].wealth if before else ()
        play = played(Sampler(str(policy)), worlds, seed, level.shared, wealth)
        window = Window(
            level=level,
            hour=number,
            base=base,
            policy=policy,
            worlds=worlds,
            play=play,
            rows=scored(play),
            seed=seed,
            before=tuple(before),
        )
        moved = update(window, training, directory / str(number))
        failed = [payoff.failed for own in play for payoff in own.payoffs]
        earlier, policy = policy, directory / str(number)
        hour = Hour(
            level=level.name,
            seed=seed,
            hour=number,
            fleet_pnl=sum(own.pnl_usd for own in play) / len(play),
            failed=sum(failed) / len(failed),
            kl_after=moved.kl_after,
            entropy=moved.entropy,
            undone=moved.undone,
            gate=moved.gate,
            gains=moved.gains,
            pairs=moved.pairs,
            cpu_s=time.process_time() - began,
            looked=look(level, number, policy).mean_pnl if number in looks else None,
            wealth=(*wealth_after(level.rules(number), play, wealth),) if level.shared else (),
        )
        with known.open("ab") as lines:
            lines.write(msgspec.json.encode(hour) + b"\n")
        before.append(hour)
        if earlier != base:
            shutil.rmtree(earlier)
        yield hour, policy


def preferred(
    window: Window, training: TrainingSettings, asked: PreferenceSettings
) -> "Preferences":
    """The objective, and the replies or words that it needs, made as the stages make them."""
    from babylon.evaluation.preferences.sample import sample_replies
    from babylon.training.preferences.objective import Preferences
    from babylon.training.update_options import preference_config

    objective, options = training.objective, preference_config(asked)
    if "sdpo" in objective.split("+"):
        words = tuple(decision_words(window.rows, window.play, {}))
        return Preferences(objective=objective, options=options, words=words)
    if "dpo" not in objective.split("+"):
        return Preferences(objective=objective, options=options)
    if window.level.shared:
        raise ValueError(
            f"objective={objective} plays recorded hours on from the start balance, but agents of"
            f" level {window.level.name} keep their wealth: choose another level or objective"
        )
    points = informative(window.rows, asked.prompts)
    found = sample_replies(
        str(window.policy), points, asked.replies, asked.temperature, window.seed
    )
    recorded = _recorded(window.worlds, window.play)
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


def _recorded(worlds: Sequence[Scenario], play: Sequence[Trajectory]) -> list[RecordedScenario]:
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


def seats_of(level: CurriculumLevel) -> int:
    """Return the number of agents in one market."""
    return AGENTS_A_WORLD if level.shared else 1


def unseen(level: CurriculumLevel, hour: int, worlds: int) -> list[Scenario]:
    """Return worlds of an hour's rules that are never trained on."""
    return unseen_scenarios("final", f"curriculum:{level.name}", worlds, level.rules(hour))
