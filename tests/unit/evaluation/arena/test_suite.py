from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice

import pytest

from babylon.evaluation.arena.suite import SUITES, digest, unseen_scenarios
from babylon.game.fleet.fleet_plan import FleetPlan, deal, plan_rounds
from babylon.game.market import amm, prompts
from babylon.game.market.scenario import Rules, Scenario
from babylon.game.market.transcripts import scripted_chats

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def content(world: Scenario) -> tuple[object, ...]:
    """Content of a world, without its name."""
    return world.questions, world.news, world.noise, world.perps, world.posts


@pytest.mark.parametrize(
    ("name", "known"), [("starter@3", "1e9c62bbdd1812ee"), ("hour@6", "194923632503af44")]
)
def test_a_frozen_suite_is_what_it_always_was(name: str, known: str) -> None:
    """If this fails, the game's worlds or their play changed: give the suite a new version."""
    suite = SUITES[name.partition("@")[0]]
    assert (str(suite), digest(suite.worlds())[:16]) == (name, known)


def test_another_version_or_other_rules_are_other_worlds() -> None:
    small = replace(SUITES["starter"], scenarios=16)
    others = [
        small,
        replace(small, version=9),
        replace(small, name="other"),
        replace(small, scenarios=17),
        replace(small, rules=Rules(news_reliability=0.9)),
    ]
    assert len({digest(suite.worlds()) for suite in others}) == len(others)


@pytest.mark.parametrize("changed", ["mechanics", "prompt"])
def test_a_game_change_changes_the_digest(monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    worlds = unseen_scenarios("arena", "changing", 4)
    before = digest(worlds)
    if changed == "prompt":
        monkeypatch.setattr(prompts, "SYSTEM_PROMPT", "Trade.")
    else:
        monkeypatch.setattr(amm, "INITIAL_RESERVE", 400.0)
        monkeypatch.setattr(amm.Pool, "__init__", _shallow)
    assert digest(worlds) != before


def _shallow(self: amm.Pool, yes: float = 400.0, no: float = 400.0) -> None:
    object.__setattr__(self, "yes", yes)
    object.__setattr__(self, "no", no)


def test_fleets_and_transcripts_never_use_arena_worlds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever their seed and plan: a thousand of theirs against the arena's, by content."""
    kept = {
        content(world)
        for worlds in (
            SUITES["starter"].worlds(),
            unseen_scenarios("gate", "0:window-2026-11-21T12:00", 256),
            unseen_scenarios("final", "0", 256),
        )
        for world in worlds
    }
    drawn: set[tuple[object, ...]] = set()
    for seed in range(8):
        plan = FleetPlan(start=NOON, duration_min=60, agents=64, seed=seed)
        for number, (start, ticks) in enumerate(plan_rounds(plan)):
            drawn |= {content(world) for world, _ in deal(plan, start, ticks, number)}
    assert len(drawn) == 8 * 6 * 8 and not drawn & kept

    seeds: list[str] = []
    from babylon.game.fleet import fleet_plan
    from babylon.game.market import transcripts

    real = transcripts.make_scenario

    def spied(seed: str, *args: object, **named: object) -> Scenario:
        seeds.append(seed)
        return real(seed, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(transcripts, "make_scenario", spied)
    monkeypatch.setattr(fleet_plan, "make_scenario", spied)
    deal(plan, NOON, 6, 0)
    list(islice(scripted_chats(0), 100))
    assert {seed.partition(":")[0] for seed in seeds} == {"fleet", "transcript"}
