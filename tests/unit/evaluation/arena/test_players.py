"""Exported numeric policies are players like others, and yardsticks of each promotion report."""

from pathlib import Path

import pytest

from babylon.core.errors import ArenaError, ArtifactError
from babylon.core.home import Home
from babylon.core.types import Claim, Verdict
from babylon.evaluation.arena.leaderboard import CheckedSuite, leaderboard
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.evaluation.arena.play import Decide, play, scripted
from babylon.evaluation.arena.players import (
    Player,
    all_yardsticks,
    baseline_players,
    identity_of,
    unregistered_player,
)
from babylon.evaluation.arena.suite import Suite, unseen_scenarios
from babylon.game.market.scenario import HOUR, STARTER
from babylon.game.market.scripted import bold
from babylon.store.connection import Store
from babylon.store.population import Sibling, fitness_by_member
from tests.exported import exported, news_buyer

WORLDS = unseen_scenarios("test", "players", 24)


def test_a_numeric_policy_is_a_player_by_its_path(tmp_path: Path) -> None:
    player = unregistered_player(str(news_buyer(tmp_path / "news")), seed=0)
    plays = play(player.enter(), WORLDS)
    assert plays.pnl == pytest.approx(play(scripted(bold), WORLDS).pnl, abs=1e-6)
    assert not plays.malformed.any()
    same = unregistered_player(str(news_buyer(tmp_path / "again")), seed=7)
    other = unregistered_player(str(exported(tmp_path / "other", {})), seed=0)
    assert identity_of(player, WORLDS) == identity_of(same, WORLDS) != identity_of(other, WORLDS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArenaError, match="a numeric policy, or scripted:"):
        unregistered_player(str(tmp_path / "nowhere"), seed=0)


def test_a_homes_baselines_are_yardsticks_where_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home.at(tmp_path)
    news_buyer(home.baselines / "news" / "policy")
    exported(home.baselines / "torn" / "policy", {})
    (home.baselines / "torn" / "policy" / "policy.pt2").write_bytes(b"")
    exported(home.baselines / "unread" / "policy", {})
    (home.baselines / "unread" / "policy" / "numeric.json").write_bytes(b"{")
    assert baseline_players(home, HOUR) == []
    names = [player.name for player in baseline_players(home, STARTER)]
    assert names == ["baseline:news", "baseline:torn"]
    results = all_yardsticks(home, WORLDS)
    assert list(results) == ["random", "news", "oracle", "baseline:news"]
    assert results["oracle"].mean_pnl.mean > results["baseline:news"].mean_pnl.mean
    assert "torn" in caplog.text and "unread" in caplog.text


def test_the_report_has_the_siblings_of_the_winner(tmp_path: Path) -> None:
    def sibling(member: int, fitness: float | None, chosen: bool = False) -> Sibling:
        return Sibling(
            window_id="w",
            batch_id="b",
            generation=1,
            member=member,
            parent_version=0,
            uri="",
            fitness=fitness,
            fitness_error=None,
            worlds=8,
            metrics={},
            trajectory_ids=(),
            chosen=chosen,
        )

    known = fitness_by_member([sibling(0, -3.0), sibling(1, None), sibling(2, 4.25, chosen=True)])
    assert list(known) == ["member 2 of generation 1, chosen", "member 0 of generation 1"]
    verdict = Verdict(
        claim=Claim(window_id="2026-01-01T09:00", epoch=1, owner="test"),
        policy_version=1,
        route_version=1,
        promote=False,
        reason="none",
        yardsticks={"baseline:ppo": 1.0},
        siblings=known,
    )
    page = verdict_markdown(verdict)
    assert "| baseline:ppo | 1.0 |" in page
    assert "| member 2 of generation 1, chosen | +4.2 |" in page


async def test_a_checkpoint_that_the_object_store_lacks_leaves_the_other_players_their_places() -> (
    None
):
    def gone() -> Decide:
        raise ArtifactError("checkpoints/1 is neither here nor in the store")

    players = [Player(name="gone", enter=gone), Player(name="bold", enter=lambda: scripted(bold))]
    small = Suite(name="small", version=1, rules=STARTER, scenarios=len(WORLDS))
    suite = CheckedSuite(suite=small, digest="", worlds=WORLDS)
    nowhere = object.__new__(Store)  # neither of the two is stored
    standings = await leaderboard(nowhere, suite, players, seed=0, model="babylon")
    assert [one.player for one in standings] == ["bold", "gone"]
    assert standings[0].result and "neither here" in (standings[1].problem or "")
