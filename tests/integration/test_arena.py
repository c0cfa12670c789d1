"""The gate on real policies: what it lets through, what it refuses and why, and the leaderboard."""

import asyncio
import itertools
import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import typer

from babylon.cli import arena
from babylon.core.artifacts import write_artifact
from babylon.core.errors import ArenaError, BabylonError
from babylon.core.learning_settings import TrainingSettings
from babylon.core.settings import Settings
from babylon.core.trajectories import (
    TRAJECTORY_SCHEMA,
    Call,
    TrainingRow,
    trajectory_row,
)
from babylon.core.types import OffPolicy, Scored, Trained
from babylon.core.windows import parse_window_id
from babylon.evaluation.arena.held_out import held_out_check
from babylon.evaluation.arena.leaderboard import check_suite, player_result
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.evaluation.arena.play import Decide
from babylon.evaluation.arena.players import find_player, scripted_player
from babylon.evaluation.arena.suite import SUITES, Suite, digest, unseen_scenarios
from babylon.evaluation.arena.verdicts import recorded_verdict
from babylon.game.market.orders import Hold, Order, OrderKind, render_decision
from babylon.game.market.scenario import PRESETS, Rules
from babylon.game.market.transcripts import scripted_chats
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.validate_checkpoint import validate_checkpoint
from babylon.store import Store
from babylon.store.policies import champion, ensure_base
from babylon.store.population import MemberRow, Sibling, add_generation, put_sibling
from babylon.store.windows import claim_window, get_window
from babylon.training.sft import fine_tune
from tests.deployments import commit_under
from tests.exported import news_buyer
from tests.tiny_policy import plain_logprobs
from tests.trajectories import a_trajectory

NOON = datetime(2025, 11, 14, 12, tzinfo=UTC)
TRAINING = TrainingSettings()
SUITE = Suite(name="small", version=1, rules=Rules(ticks=2), scenarios=8)


@pytest.fixture
def base(embedded_model: Path) -> Path:
    return embedded_model


@pytest.fixture
async def quick(store: Store, settings: Settings, base: Path) -> Settings:
    await ensure_base(store, uri=str(base), base_model="embedded")
    return settings.replace(evaluation={"scenarios": 32, "rules": "starter"})


def damaged(base: Path, directory: Path) -> Path:
    """Every weight with noise of the size of its matrix."""
    model, tokenizer = load_policy(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) * weight.std()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def taught(base: Path, directory: Path, reply: str, chats: int = 128) -> Path:
    """Taught to answer the same, whatever it sees."""
    rows = [
        TrainingRow(
            trajectory_id=str(number),
            agent_id="a",
            scenario_id="s",
            score=0.0,
            calls=(
                Call(
                    step=0,
                    messages=tuple(dict(message) for message in chat[:-1]),
                    response=reply,
                ),
            ),
        )
        for number, chat in enumerate(itertools.islice(scripted_chats(7), chats))
    ]
    rates = itertools.repeat(3e-3)
    fine_tune(base, rows, directory, tuning="full", learning_rates=rates, batch_size=8)
    return directory


def collapsed(base: Path, directory: Path) -> Path:
    return taught(base, directory, render_decision(Hold()))


async def challenge(
    store: Store, uri: Path, *, hour: int = 9, parent: int = 0, trajectory: str = "t"
) -> Trained:
    """A checkpoint committed as the policy that a window was trained into."""
    window = parse_window_id(f"2025-11-14T{hour:02}:00")
    claim = await claim_window(store, window, owner="worker", lease_s=60)
    version = await commit_under(
        store,
        claim,
        parent,
        kind="full",
        uri=str(uri),
        base_model="embedded",
        batch_id=f"window-{window.id}",
        trajectory_ids=[f"{trajectory}{hour}"],
        metrics={},
    )
    return Trained(
        claim=claim,
        batch_id=f"window-{window.id}",
        policy_version=version,
        parent_version=parent,
        checkpoint_uri=str(uri),
        metrics={},
    )


@pytest.mark.parametrize(
    ("spoil", "reason"), [(damaged, "malformed replies rose from "), (collapsed, "collapsed: ")]
)
async def test_a_spoilt_checkpoint_is_refused_and_the_champion_keeps_serving(
    store: Store, quick: Settings, base: Path, tmp_path: Path, spoil: object, reason: str
) -> None:
    assert callable(spoil)
    trained = await challenge(store, await asyncio.to_thread(spoil, base, tmp_path / "spoilt"))
    verdict = await validate_checkpoint(store, quick, trained)
    assert verdict.ruling == "reject" and verdict.reason.startswith(reason), verdict.reason
    assert not (await deploy_checkpoint(store, quick, verdict)).deployed
    assert (await champion(store))[0].policy_version == 0

    assert verdict.report is not None and verdict.suite_digest is not None
    report = json.loads(Path(store.home.resolve(verdict.report), "report.json").read_text())
    assert report["verdict"]["suite_digest"] == verdict.suite_digest
    assert list(report["players"]) == ["champion", "challenger", "random", "news", "oracle"]
    pictures = sorted(path.name for path in Path(store.home.resolve(verdict.report)).glob("*.png"))
    assert pictures == ["differences.png", "equity.png", "sequence.png"]
    assert await validate_checkpoint(store, quick, trained) == verdict  # bought once


async def test_an_equal_checkpoint_is_undecided(store: Store, quick: Settings, base: Path) -> None:
    """Common random numbers: it answers as the champion does, to the letter."""
    verdict = await validate_checkpoint(store, quick, await challenge(store, base))
    assert verdict.ruling == "insufficient"
    assert verdict.reason.startswith("insufficient evidence: P&L difference +0.0 [")
    assert verdict.pnl_after == verdict.pnl_before and verdict.scenarios == 32


async def test_the_gate_plays_the_game_that_it_is_told(
    store: Store, quick: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "hour", Rules(markets=2, ticks=1))
    trained = await challenge(store, base)
    hours = quick.replace(evaluation={"rules": "hour"})
    verdict = await validate_checkpoint(store, hours, trained)
    worlds = unseen_scenarios("gate", f"{quick.seed}:{trained.batch_id}", 32, PRESETS["hour"])
    assert verdict.suite_digest == digest(worlds)


async def test_what_is_clearly_better_serves(
    store: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    """Staking all on one question is worse than holding; a champion that does it is replaced."""
    gambler = render_decision(Order("m1", OrderKind.BUY_YES, 150))
    reckless = await asyncio.to_thread(taught, base, tmp_path / "reckless", gambler)
    await ensure_base(store, uri=str(reckless), base_model="embedded")
    calm = await challenge(store, await asyncio.to_thread(collapsed, base, tmp_path / "calm"))
    quick = settings.replace(evaluation={"scenarios": 256, "rules": "starter"})
    verdict = await validate_checkpoint(store, quick, calm)
    assert verdict.ruling == "promote", verdict.reason
    assert verdict.scenarios < 256 and verdict.pnl_difference_low is not None
    assert verdict.pnl_difference_low > 0
    assert verdict.off_policy is not None and verdict.off_policy.problem is not None
    assert verdict.off_policy.problem.startswith("no held-out play")
    assert verdict.frozen is not None and verdict.frozen.best_version == 0
    assert verdict.frozen.pnl > verdict.frozen.best_pnl and verdict.frozen.scenarios == 32
    assert (await deploy_checkpoint(store, settings, verdict)).deployed
    assert (await champion(store))[0].policy_version == calm.policy_version
    assert "no held-out play" in verdict_markdown(verdict)


async def recorded(
    store: Store, settings: Settings, base: Path, trained: Trained, *, wins: str
) -> None:
    """A window of eighty trajectories, each one exact call of the base; those that say ``wins``
    earned $2,000, the others nothing."""
    model, tokenizer = load_policy(base)
    messages = [{"role": "user", "content": "m1 0.50"}]
    prompt = render_prompt(tokenizer, messages)
    rows = []
    for number in range(80):
        reply = ("yes", "no")[number % 2]
        completion = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        call = Call(
            step=0,
            messages=tuple(dict(message) for message in messages),
            response=reply,
            prompt_token_ids=tuple(prompt),
            completion_token_ids=tuple(completion),
            logprobs=tuple(plain_logprobs(model, prompt, completion).tolist()),
        )
        trajectory = a_trajectory(
            f"{trained.claim.window_id}-{number}",
            agent_id=f"a{number}",
            window_id=trained.claim.window_id,
            scenario_id=f"s{number // 8}",
            start=NOON,
            end=NOON,
            pnl_usd=2000.0 * (reply == wins),
            actions=1,
            calls=(call,),
        )
        rows.append(trajectory_row(trajectory, game_json="[]", knowledge_json="{}"))
    artifact = write_artifact(
        settings.home,
        pl.DataFrame(rows, schema=TRAJECTORY_SCHEMA),
        window_id=trained.claim.window_id,
        stage="scored",
    )
    scored = Scored(
        claim=trained.claim,
        artifact=artifact,
        eligible=80,
        agents=80,
        scorer="heuristic",
        avg_reward=0.5,
    )
    await store.pool.execute(
        "UPDATE babylon.windows SET scored = $2 WHERE window_id = $1",
        trained.claim.window_id,
        asdict(scored),
    )


async def test_recorded_play_that_was_not_trained_on_is_a_second_check(
    store: Store, quick: Settings, base: Path, tmp_path: Path
) -> None:
    """The challenger prefers one of two replies by far; where that one lost, it is vetoed."""
    naysayer = await asyncio.to_thread(taught, base, tmp_path / "no", "no", chats=24)
    rejected = await challenge(store, base, hour=8)
    trained = await challenge(store, naysayer, hour=9)
    assert (await held_out_check(store, trained, TRAINING)).problem is not None

    checks = []
    for wins in ("yes", "no"):
        await recorded(store, quick, base, rejected, wins=wins)
        await store.pool.execute(
            "UPDATE babylon.windows SET state = 'rejected' WHERE window_id = $1",
            rejected.claim.window_id,
        )
        checks.append(await held_out_check(store, trained, TRAINING))
    assert [check.trajectories for check in checks] == [80, 80], checks
    assert {check.veto for check in checks} == {True, False}, checks

    child = await challenge(store, naysayer, hour=10, parent=rejected.policy_version)
    assert (await held_out_check(store, child, TRAINING)).problem == (
        "no held-out play: all that was recorded was trained on or taken down"
    )


async def test_what_dropout_left_out_is_held_out(store: Store, quick: Settings, base: Path) -> None:
    trained = await challenge(store, base)
    await recorded(store, quick, base, trained, wins="no")
    assert (await held_out_check(store, trained, TRAINING)).trajectories == 0
    row = await get_window(store, trained.claim.window_id)
    assert row is not None and row.scored is not None
    scored = replace(row.scored, held_out=row.scored.artifact)
    await store.pool.execute("UPDATE babylon.windows SET scored = $1", asdict(scored))
    check = await held_out_check(store, trained, TRAINING)
    assert check.ess == pytest.approx(80, abs=0.1) and not check.veto

    Path(quick.home.resolve(scored.artifact.uri)).unlink()
    lost = await held_out_check(store, trained, TRAINING)
    assert lost.problem is not None and "cannot be read" in lost.problem
    card = str(recorded_verdict(trained, 1, lost))  # its reason goes into the published model card
    assert "cannot be read" in card and str(quick.home.root) not in card
    rejected = await challenge(store, base, hour=8)
    await recorded(store, quick, base, rejected, wins="no")
    await store.pool.execute(
        "UPDATE babylon.windows SET state = 'rejected' WHERE window_id = $1",
        rejected.claim.window_id,
    )
    assert (await held_out_check(store, trained, TRAINING)).trajectories == 80  # another window


async def test_play_of_an_hour_that_was_trained_on_proves_no_gain(
    store: Store, quick: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout leaves plays out of a world that the challenger knows from the other plays."""
    trained, other = await challenge(store, base), await challenge(store, base, hour=8)
    for one in (trained, other):
        await recorded(store, quick, base, one, wins="no")
        row = await get_window(store, one.claim.window_id)
        assert row is not None and row.scored is not None
        await store.pool.execute(
            "UPDATE babylon.windows SET scored = $1 WHERE window_id = $2",
            asdict(replace(row.scored, held_out=row.scored.artifact)),
            one.claim.window_id,
        )
    telling: set[tuple[str, bool]] = set()

    def check(*given: Any) -> OffPolicy:
        played, fresh = given[1], given[-1]
        telling.update(
            (one.window_id, bool(is_so)) for one, is_so in zip(played, fresh, strict=True)
        )
        return OffPolicy()

    monkeypatch.setattr("babylon.evaluation.arena.held_out._check", check)
    await held_out_check(store, trained, TRAINING)
    assert telling == {(trained.claim.window_id, False), (other.claim.window_id, True)}


async def test_held_out_play_counts_once(store: Store, quick: Settings, base: Path) -> None:
    trained = await challenge(store, base)
    await recorded(store, quick, base, trained, wins="no")
    row = await get_window(store, trained.claim.window_id)
    assert row is not None and row.scored is not None
    left_out = asdict(replace(row.scored, held_out=row.scored.artifact))
    later = await challenge(store, base, hour=10, parent=trained.policy_version)
    await store.pool.execute("UPDATE babylon.windows SET scored = $1", left_out)  # of both
    await store.pool.execute(
        "INSERT INTO babylon.trained SELECT $1 || '-' || n, $1, $2 FROM generate_series(0, 19) n",
        trained.claim.window_id,
        trained.batch_id,
    )
    await store.pool.execute(  # also in a shorter window
        "INSERT INTO babylon.trained VALUES ('x', '2026-01-01T09:15', $1)", trained.batch_id
    )
    assert (await held_out_check(store, trained, TRAINING)).trajectories == 60
    assert (await held_out_check(store, later, TRAINING)).trajectories == 60  # its parent saw them
    other = await challenge(store, base, hour=11)
    assert (await held_out_check(store, other, TRAINING)).trajectories == 80


async def test_a_suite_whose_worlds_changed_is_refused(store: Store) -> None:
    await check_suite(store, SUITE)
    await check_suite(store, SUITE)
    await check_suite(store, replace(SUITE, version=2))
    with pytest.raises(ArenaError, match=r"suite small@1 was registered here with digest"):
        await check_suite(store, replace(SUITE, rules=Rules(ticks=2, fee=0.002)))


async def test_what_was_played_once_is_not_played_again(store: Store, quick: Settings) -> None:
    venue = await check_suite(store, SUITE)
    policy = await find_player(store, "0", seed=0)
    first = await player_result(store, venue, policy, 0, "babylon")

    def unplayable() -> Decide:
        raise AssertionError("entered again")

    known = replace(policy, enter=unplayable)
    assert await player_result(store, venue, known, 0, "babylon") == first
    with pytest.raises(AssertionError, match="entered again"):
        await player_result(store, venue, known, 1, "babylon")

    news = scripted_player("news", 0)
    other = replace(news, enter=scripted_player("contrarian", 0).enter)
    first = await player_result(store, venue, news, 0, "babylon")
    assert first != await player_result(store, venue, other, 0, "babylon")


@pytest.mark.parametrize(
    ("who", "complaint"),
    [
        ("scripted:nobody", "no scripted agent is called 'nobody': choose from random, news"),
        ("/nowhere", "'/nowhere' is not a player"),
        ("7", "no policy version 7"),
        ("99999999999", "no policy version 99999999999"),
    ],
)
async def test_unknown_player_is(store: Store, quick: Settings, who: str, complaint: str) -> None:
    with pytest.raises(BabylonError, match=complaint):
        await find_player(store, who, 0)


async def test_the_command_line_compares_two_and_ranks_all(
    store: Store,
    quick: Settings,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SUITES, "starter", SUITE)
    for name, value in quick.environment().items():
        monkeypatch.setenv(name, value)
    trained = await challenge(store, Path("/nowhere"))
    sibling = Sibling(
        window_id=trained.claim.window_id,
        batch_id=trained.batch_id,
        generation=0,
        member=1,
        parent_version=0,
        uri="",
        fitness=2.0,
        fitness_error=1.0,
        worlds=8,
        metrics={},
        trajectory_ids=(),
        chosen=True,
    )
    member = MemberRow(generation=0, member=1, parent=None, origin="founder", genes={})
    await add_generation(store, [member])
    await put_sibling(store, trained.claim, sibling)
    news_buyer(store.home.baselines / "news" / "policy")
    more = str(news_buyer(store.home.root / "elsewhere"))

    await asyncio.to_thread(arena.play, "scripted:random", "scripted:oracle", json=True)
    duel = json.loads(capsys.readouterr().out)
    assert duel["difference"]["low"] > 0 and duel["suite"] == "small@1"
    assert (Path(duel["report"]) / "equity.png").exists()
    assert Path(duel["report"]).name == "small@1-scripted-random-vs-scripted-oracle"
    report = json.loads((Path(duel["report"]) / "report.json").read_text())
    assert [*report["players"]] == [
        "scripted:random",
        "scripted:oracle",
        "news",
        "baseline:news",
    ]
    for same in ("0", "00"):
        with pytest.raises(ArenaError, match="policy 0 cannot be compared with itself"):
            await asyncio.to_thread(arena.play, "0", same)

    with pytest.raises(typer.Exit) as left:
        await asyncio.to_thread(arena.leaderboard, player=[more], json=True)
    board = json.loads(capsys.readouterr().out)
    names = [standing["player"] for standing in board["standings"]]
    assert names[0] == "scripted:oracle" and names[-1] == "policy 1 (member 1 of generation 0)"
    assert {"policy 0", "baseline:news", more} <= {*names}
    assert left.value.exit_code == 1 and "no policy loads" in board["standings"][-1]["problem"]
    assert all(s["pnl_low"] <= s["pnl"] <= s["pnl_high"] for s in board["standings"][:-1])
