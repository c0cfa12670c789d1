"""A population through the train stage: siblings, the fittest, resumption and evolution."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as with_changes

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.core.trajectories import TrainingRow
from babylon.core.windows import parse_window_id
from babylon.evaluation.arena.fitness import fitness, fitness_worlds
from babylon.evaluation.arena.play import Plays
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.scenario import STARTER
from babylon.ops.population_page import population_standings
from babylon.ops.population_plot import plot_lineage
from babylon.policies.load import load_policy
from babylon.stages import siblings as stage
from babylon.stages.train import train_window
from babylon.store import Store
from babylon.store.policies import ensure_base, get_policy
from babylon.store.population import list_members, list_siblings
from babylon.store.windows import claim_window
from babylon.training.learning_rate import reinforcement_rate
from tests.deciding_policy import save_deciding_policy
from tests.integration.test_train_stage import rows, scored
from tests.tiny_policy import save_tiny_policy
from tests.unit.evaluation.arena.test_match import plays


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture
async def three(store: Store, settings: Settings, base: Path) -> Settings:
    await ensure_base(store, uri=str(base), base_model="tiny")
    return settings.replace(
        training={"iterations": 1, "batch_size": 2, "accumulation": 1, "lora_rank": 2},
        population={"size": 3, "evolve_every": 2, "worlds": 16},
    )


def fitter(monkeypatch: pytest.MonkeyPatch, by_member: dict[int, float]) -> list[int]:
    """Replace the play, which the arena's tests cover, by known fitness; return who played."""
    played: list[int] = []

    async def worlds(*_: object) -> object:
        return object()

    async def known(work: object, worlds: object, siblings: object) -> object:
        found = []
        for one in siblings:  # type: ignore[attr-defined]
            if one.uri and one.fitness is None:
                played.append(one.member)
                values = {"fitness": by_member[one.member], "fitness_error": 1.0, "worlds": 16}
                one = stage.replace(one, **values)
                await stage.put_sibling(work.store, work.claim, one)  # type: ignore[attr-defined]
            found.append(one)
        return found

    monkeypatch.setattr(stage, "fitness_worlds", worlds)
    monkeypatch.setattr(stage, "_played", known)
    return played


def window(base: Path, hour: int) -> list[TrainingRow]:
    """Six trajectories with names of their own, for no play is trained twice."""
    return [
        with_changes(row, trajectory_id=f"{row.trajectory_id} {hour}")
        for row in rows(base, version=0)
    ]


async def test_a_window_yields_siblings_and_commits_the_fittest(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = fitter(monkeypatch, {0: 1.0, 1: 5.0, 2: -2.0})
    trained = await train_window(store, three, await scored(store, three, 9, window(base, 9)))
    assert played == [0, 1, 2]
    assert trained.metrics["population_member"] == 1 and trained.metrics["population"] == 3
    assert trained.metrics["population_fitness"] == 5.0
    siblings = await list_siblings(store)
    assert [(s.member, s.chosen, Path(s.uri).exists()) for s in siblings] == [
        (0, False, False),  # the checkpoints of the others are gone, their figures stay
        (1, True, True),
        (2, False, False),
    ]
    assert (await get_policy(store, 1)).uri == siblings[1].uri
    assert len({s.metrics["update_norm"] for s in siblings}) == 3  # genes of their own
    used = await store.pool.fetchval("SELECT count(*) FROM babylon.trained")
    assert used == 6
    # a month of windows has a million trajectories, which no page of all siblings shows
    whole = await list_siblings(store, batch_id=trained.batch_id)
    assert [len(s.trajectory_ids) for s in whole] == [6] * 3
    assert [s.trajectory_ids for s in siblings] == [()] * 3


async def test_the_first_member_learns_at_the_rate_that_an_update_would_begin_with(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEARNING_RATE is not set, so it follows from the model's size."""
    fitter(monkeypatch, {0: 2.0, 1: 1.0, 2: 0.0})
    await train_window(store, three, await scored(store, three, 9, window(base, 9)))
    rate = reinforcement_rate(load_policy(base)[0], "lora")
    assert (await list_members(store))[0].genes["learning_rate"] == rate


@pytest.mark.parametrize("scored_anew", [False, True])
async def test_a_killed_run_goes_on_with_the_next_sibling_unless_the_scores_changed(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch, scored_anew: bool
) -> None:
    fitter(monkeypatch, {0: 0.0, 1: 1.0, 2: 2.0})
    begun: list[str] = []
    own = stage._work_of

    async def noted(work: object, scored: object, judge: object, member: object) -> object:
        begun.append(str(member.member))  # type: ignore[attr-defined]
        if begun == ["0", "1"]:
            raise InterruptedError
        return await own(work, scored, judge, member)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "_work_of", noted)
    window_of = await scored(store, three, 9, window(base, 9))
    with pytest.raises(InterruptedError):
        await train_window(store, three, window_of)
    (first,) = await list_siblings(store)
    if scored_anew:  # as after outcomes that arrived meanwhile
        rows_now = [with_changes(row, score=-row.score) for row in window(base, 9)]
        window_of = await scored(store, three, 9, rows_now)
    again = await claim_window(
        store, parse_window_id("2025-11-14T09:00"), owner="second", lease_s=60
    )
    trained = await train_window(store, three, stage.replace(window_of, claim=again))
    assert begun == ["0", "1", *(["0"] if scored_anew else []), "1", "2"]
    assert ((await list_siblings(store))[0].metrics == first.metrics) is not scored_anew
    assert trained.metrics["population_member"] == 2


async def test_a_sibling_that_could_not_be_stored_is_finished_and_not_trained_again(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitter(monkeypatch, {0: 0.0, 1: 1.0, 2: 2.0})
    monkeypatch.setattr("babylon.training.progress_file.PATIENCE", 0)
    window_of = await scored(store, three, 9, window(base, 9))

    async def lost(*_: object) -> None:
        raise ConnectionError

    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(stage, "put_sibling", lost)
        await train_window(store, three, window_of)
    again = await claim_window(
        store, parse_window_id("2025-11-14T09:00"), owner="second", lease_s=60
    )
    steps: list[int] = []
    await train_window(
        store,
        three,
        stage.replace(window_of, claim=again),
        progress=lambda done, _: steps.append(done),
    )
    assert steps[:2] == [3, 1]  # the last of three, and then the next sibling begins
    assert not list(three.home.progress.rglob("progress.pt"))


async def test_settings_evolve_after_their_windows_and_the_lineage_is_drawn(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fitter(monkeypatch, {0: 0.0, 1: 4.0, 2: -1.0})
    # the champion stays policy 0, so each window's siblings start from it
    for hour in (9, 10, 11):
        await train_window(store, three, await scored(store, three, hour, window(base, hour)))
    members = await list_members(store)
    assert [(m.generation, m.member) for m in members] == [
        (g, m) for g in (0, 1) for m in (0, 1, 2)
    ]
    assert [s.generation for s in await list_siblings(store)] == [0] * 6 + [1] * 3
    elite = members[3]
    assert (elite.origin, elite.parent, elite.genes) == ("elite", 1, members[1].genes)
    assert members[4].origin == "mutant" and members[4].genes != members[members[4].parent].genes
    standings = await population_standings(store)
    assert [s.fitness for s in standings] == [0.0, 4.0, -1.0] * 2
    assert [(s.windows, s.chosen) for s in standings[:2]] == [(2, 0), (2, 2)]
    assert plot_lineage(standings, tmp_path / "lineage.png").stat().st_size > 5000


async def test_another_size_founds_the_population_anew(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitter(monkeypatch, {0: 0.0, 1: 4.0})
    two = three.replace(population={"size": 2})
    await train_window(store, two, await scored(store, two, 10, window(base, 10)))
    other = two.replace(population={"genes": "learning_rate"})
    await train_window(store, other, await scored(store, other, 11, window(base, 11)))
    members = await list_members(store)
    assert [(m.generation, m.origin) for m in members] == [(0, "founder")] * 2 + [
        (1, "founder")
    ] * 2
    assert set(members[-1].genes) == {"learning_rate"}


async def test_siblings_play_fresh_worlds_that_the_gate_does_not(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    evaluation = settings.replace(evaluation={"rules": "starter", "scenarios": 64}).evaluation
    worlds = await fitness_worlds(store, "2025-11-14T09:00", "0:batch", evaluation, 16)
    assert worlds is not None and len(worlds.scenarios) == 16
    gate = {s.scenario_id for s in unseen_scenarios("gate", "0:batch", 64, STARTER)}
    assert not gate & {s.scenario_id for s in worlds.scenarios}
    path = str(save_deciding_policy(tmp_path / "policy"))
    plays = worlds.played_by(path, 0)
    same = fitness(plays, worlds.played_by(path, 0))  # equal policies act equally
    assert (same.mean, same.error, same.worlds) == (0.0, 0.0, 16)


class _Worlds:
    """Worlds in which each checkpoint earns and fails as its file name says."""

    def __init__(self, played: list[str]) -> None:
        self.played = played

    def played_by(self, path: str, seed: int, precision: str) -> Plays:
        assert precision == "bf16"
        self.played.append(path)
        earned, malformed = {"-m0": (1.0, 0.0), "-m1": (9.0, 0.5)}.get(path[-3:], (0.0, 0.0))
        return plays([earned, earned], malformed=malformed)


async def test_a_sibling_that_the_gate_would_refuse_is_not_chosen(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    async def worlds(*_: object) -> _Worlds:
        return _Worlds(played)

    monkeypatch.setattr(stage, "fitness_worlds", worlds)
    three = three.replace(training={"base_precision": "bf16"})  # for play too
    trained = await train_window(store, three, await scored(store, three, 9, window(base, 9)))
    assert trained is not None and trained.metrics["population_member"] == 0
    first, unfit, last = await list_siblings(store)
    assert (first.fitness, unfit.fitness, last.fitness) == (1.0, None, 0.0)
    assert unfit.worlds == 2 and "rose from 0.0% to 50.0%" in unfit.metrics["unfit"]
    assert len(played) == 4
    await stage._played(None, _Worlds(played), [first, unfit, last])  # type: ignore[arg-type]
    assert len(played) == 4  # they do not play again
    assert stage.rated([first, unfit, last]) == {0: 1.0, 1: 0.0, 2: 0.0}


class _RichFirst:
    """Worlds in which the first member earns most."""

    def played_by(self, path: str, *_: object) -> Plays:
        return plays([9.0, 9.0] if path.endswith("-m0") else [0.0, 0.0])


@pytest.mark.parametrize("worlds", [_RichFirst(), None])
async def test_a_sibling_that_its_own_metrics_rule_out_is_not_chosen(
    store: Store,
    three: Settings,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    worlds: _RichFirst | None,
) -> None:
    """It forgot the chats of RECALL_CHATS. The gate would reject it without a game."""
    own = stage.update_metrics
    forgotten = [{"recall": 9.0, "recall_best": 1.0}]

    def measured(*update: Any) -> dict[str, Any]:
        return own(*update) | (forgotten.pop() if forgotten else {})

    async def made(*_: object) -> _RichFirst | None:
        return worlds

    monkeypatch.setattr(stage, "update_metrics", measured)
    monkeypatch.setattr(stage, "fitness_worlds", made)
    trained = await train_window(store, three, await scored(store, three, 9, window(base, 9)))
    assert trained is not None and trained.metrics["population_member"] == 1
    first, *others = await list_siblings(store)
    assert (first.metrics["recall"], first.fitness, first.worlds) == (9.0, None, 0)
    assert [one.fitness for one in others] == ([0.0, 0.0] if worlds else [None, None])


def test_siblings_are_adapters_of_our_own_trainer(settings: Settings) -> None:
    with pytest.raises((ValueError, ConfigError), match="POPULATION=2"):
        settings.replace(population={"size": 2}, training={"tuning": "full"})


async def test_members_that_other_workers_trained_are_not_trained_again(
    store: Store, three: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = fitter(monkeypatch, {0: 0.0, 1: 1.0, 2: 2.0})
    window_of = await scored(store, three, 9, window(base, 9))
    alone = [train_window(store, three, window_of, member=member) for member in range(3)]
    assert await asyncio.gather(*alone) == [None] * 3
    assert sorted(played) == [0, 1, 2]
    rows_of = await list_siblings(store)
    assert len(rows_of) == 3 and not any(one.chosen for one in rows_of)
    assert len(await list_members(store)) == 3  # one generation
    trained = await train_window(store, three, window_of)
    assert trained is not None and trained.metrics["population_member"] == 2
    assert len(played) == 3 and [s.metrics for s in await list_siblings(store)] == [
        s.metrics for s in rows_of
    ]
