"""Publishing to a hub: exactly one commit, whatever happens on the way."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from hashlib import blake2b, sha256
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from huggingface_hub import close_session

from babylon.core.artifacts import write_artifact
from babylon.core.errors import ConfigError, PublishError
from babylon.core.settings import Settings
from babylon.core.trajectories import (
    Call,
    TrainingRow,
    training_rows,
    trajectory_row,
)
from babylon.core.types import Scored
from babylon.core.windows import WindowState, parse_window_id
from babylon.dataset import build as building
from babylon.dataset import erase as erasing
from babylon.dataset import hub as hub_module
from babylon.dataset import publish as publishing
from babylon.dataset.build import build_tables, build_windows, selection_of, windows_of
from babylon.dataset.card import write_card
from babylon.dataset.erase import NothingToEraseError, erase
from babylon.dataset.hub import Hub
from babylon.dataset.messages import call_of
from babylon.dataset.performance import performance_rows
from babylon.dataset.publish import publish_days, publishing_status
from babylon.dataset.rows import read_rows
from babylon.dataset.schema import SCHEMAS
from babylon.dataset.table_file import TableName, split_of, write_table
from babylon.dataset.trajectories import Selection
from babylon.store import Store, published
from babylon.store.late import store_collected
from babylon.store.lineage import trained_into
from babylon.store.published import PublishedFile, list_published, read_withheld, was_trained
from babylon.store.windows import claim_window, set_state
from babylon.training.call_tokens import scored_trajectories
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.training_window import compile_window
from tests.hub_double import HubState
from tests.tiny_policy import tiny_tokenizer
from tests.trajectories import a_trajectory

REPOSITORY = "datasets/owner/play"
WINDOW = "2025-11-14T09:00"
NEXT_DAY = "2025-11-15T00:00"


def played(window_id: str, agent: str, text: str = "HOLD") -> dict[str, object]:
    start = parse_window_id(window_id).start
    trajectory = a_trajectory(
        f"{window_id}-{agent}", agent_id=agent, window_id=window_id, scenario_id=window_id,
        start=start, end=start, pnl_usd=len(agent) * 1.5, wins=1, trades=2, actions=1,
        calls=(
            Call(
                step=0, messages=({"role": "user", "content": f"{agent}: what now?"},),
                response=text, policy_version=0, prompt_token_ids=(5, 6),
                completion_token_ids=(7,), logprobs=(-0.5,),
            ),
        ),
    )  # fmt: skip
    game = (
        '[{"stepNumber":0,"timestamp":1763110800000,"environmentState":{"agentBalance":990.5,'
        '"agentPnL":0},"llmCalls":[],"reward":0.25,"action":{"actionType":"BUY_SHARES","success":'
        'true,"parameters":{"marketId":"m1"},"result":{"shares":3},"correctness":'
        '{"predictionCorrect":true}}}]'
    )
    truth = '{"game_knowledge":{"actualOutcomes":{"m1":"YES"}},"market_outcomes":[{"windowId":"%s",'
    truth += '"predictionMarketId":"m1","question":"Will it rain?","outcome":"YES"}]}'
    return trajectory_row(
        trajectory,
        game_json=game,
        knowledge_json=truth % window_id,
        step_rewards_json='[{"stepNumber":0,"reward":1.0,"predictionCorrect":true}]',
    )


async def finish(
    store: Store,
    settings: Settings,
    window_id: str,
    rows: list[dict[str, object]],
    scores: list[float] | None = None,
    held_out: list[dict[str, object]] | None = None,
) -> None:
    """A window that was scored and trained, with these rows."""
    claim = await claim_window(store, parse_window_id(window_id), owner="test", lease_s=60)
    frame = pl.DataFrame(rows).with_columns(score=pl.Series(scores or [0.5] * len(rows)))
    artifact = write_artifact(settings.home, frame, window_id=window_id, stage="scored")
    scored = Scored(
        claim=claim, artifact=artifact, eligible=len(rows), agents=len(rows), scorer="heuristic",
        avg_reward=0.5,
        held_out=write_artifact(
            settings.home, pl.DataFrame(held_out), window_id=window_id, stage="held-out"
        ) if held_out else None,
    )  # fmt: skip
    await store_collected(
        store, claim, pl.Series([str(row["trajectory_id"]) for row in [*rows, *(held_out or ())]])
    )
    for row in rows:
        await store.pool.execute(
            "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score)"
            " VALUES ($1, $2, 'heuristic', 0.5)",
            window_id,
            row["trajectory_id"],
        )
    await set_state(store, claim, WindowState.TRAINED, scored=scored)
    await set_state(store, claim, WindowState.DEPLOYED)


async def two_days(store: Store, settings: Settings) -> None:
    for window_id in (WINDOW, "2025-11-14T10:00", NEXT_DAY):
        await finish(store, settings, window_id, [played(window_id, one) for one in ("ann", "bo")])


async def push(store: Store, settings: Settings, **options: object) -> list[str]:
    days = await publish_days(store, settings.home, settings.publish, **options)  # type: ignore[arg-type]
    return [one.day for one in days]


def read(hub: HubState, config: str) -> pl.DataFrame:
    files = hub.repositories[REPOSITORY].files
    parts = [
        pl.read_parquet(BytesIO(content))
        for path, (_, content) in sorted(files.items())
        if path.startswith(f"{config}/")
    ]
    return pl.concat(parts)


async def test_each_day_is_one_commit_and_a_second_run_makes_none(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await two_days(store, publisher)
    assert await push(store, publisher, before=date(2025, 11, 15)) == ["2025-11-14"]
    assert hub.repositories[REPOSITORY].private
    assert await push(store, publisher) == ["2025-11-15"]
    assert await push(store, publisher) == []
    assert hub.commits(REPOSITORY) == ["Windows of 2025-11-14", "Windows of 2025-11-15"]
    rows = read(hub, "trajectories")
    assert rows["window_id"].unique().len() == 3 and rows.height == 6
    for name, split in rows.select("window_id", "split").rows():
        assert split == split_of(name)
    (row, *_) = rows.rows(named=True)
    assert (row["scorer"], row["score"], row["month"]) == ("heuristic", 0.5, "2025-11")
    assert row["steps"][0]["result_json"] == '{"shares":3}' and row["steps"][0]["reward"] == 0.25
    assert row["calls"][0]["logprobs"] == [-0.5] and row["policy_versions"] == [0]
    truth = {"outcome_rewards", "ground_truth_json"}
    assert "YES" not in str({k: v for k, v in row.items() if k not in truth})
    assert "predictionCorrect" not in str(row)
    assert read(hub, "outcomes").select("market_id", "outcome").rows()[0] == ("m1", "YES")
    status = await publishing_status(store, publisher.publish)
    assert (status.windows, status.files, status.waiting) == (3, 12, 0)


async def test_a_window_that_finishes_late_goes_with_the_next_day_or_by_hand_at_once(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    late, later = "2025-11-14T10:00", "2025-11-14T11:00"
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    assert await push(store, publisher, before=date(2025, 11, 15)) == ["2025-11-14"]
    await finish(store, publisher, late, [played(late, "ann")])
    assert await push(store, publisher, before=date(2025, 11, 15)) == []
    await finish(store, publisher, NEXT_DAY, [played(NEXT_DAY, "ann")])
    assert await push(store, publisher, before=date(2025, 11, 16)) == ["2025-11-15"]
    assert hub.commits(REPOSITORY) == ["Windows of 2025-11-14", "Windows of 2025-11-15"]
    assert read(hub, "trajectories")["window_id"].to_list() == [WINDOW, late, NEXT_DAY]
    await finish(store, publisher, later, [played(later, "ann")])
    assert await push(store, publisher) == ["2025-11-14"]


async def test_a_damaged_window_does_not_stop_the_build_of_the_others(
    store: Store, publisher: Settings
) -> None:
    await two_days(store, publisher)
    (first, *_) = await windows_of(store)
    Path(publisher.home.resolve(first.artifact.uri)).unlink()
    written, (problem,) = await build_windows(store, publisher.home, Selection())
    assert {one.window_id for one in written} == {"2025-11-14T10:00", NEXT_DAY}
    assert f"window {WINDOW} was not written" in problem


async def test_a_dry_run_sends_nothing_and_shows_what_would_go(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await two_days(store, publisher)
    days = await publish_days(store, publisher.home, publisher.publish, dry_run=True)
    assert hub.requests == []
    assert {file.config for file in days[0].files} == {*SCHEMAS} and days[0].bytes > 1000
    await push(store, publisher)
    sent = {path for path in hub.repositories[REPOSITORY].files if path.endswith(".parquet")}
    assert sent == {file.path for day in days for file in day.files}


@pytest.mark.parametrize(
    ("part", "status", "after"),
    [
        ("/commit/", 429, False),
        ("/commit/", 503, False),
        ("/commit/", 500, True),  # the answer is lost, the commit is made
        ("/commit/", 0, True),
        ("/commit/", 0, False),
        ("/blob/", 500, False),
        ("/batch", 429, False),
        ("/preupload/", 503, False),
        ("/repos/create", 502, False),
    ],
)
async def test_a_fault_that_passes_leaves_one_commit(
    store: Store, publisher: Settings, hub: HubState, part: str, status: int, after: bool
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    hub.fail(part, status, after=after)
    assert await push(store, publisher) == ["2025-11-14"]
    assert hub.commits(REPOSITORY) == ["Windows of 2025-11-14"]
    assert await push(store, publisher) == []
    revisions = await store.pool.fetch("SELECT DISTINCT revision FROM babylon.published")
    assert [row[0] for row in revisions] == [hub.repositories[REPOSITORY].head]


async def test_a_stale_parent_is_read_again(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    real = hub_module.Hub.commit

    def late(self: hub_module.Hub, *arguments: object, **named: object) -> str:
        """Somebody else commits between our look and our commit."""
        monkeypatch.setattr(hub_module.Hub, "commit", real)
        repository = hub.repositories[REPOSITORY]
        repository.add("by hand", {**repository.files, "notes.md": ("file", b"x")})
        return real(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(hub_module.Hub, "commit", late)
    await push(store, publisher)
    assert hub.commits(REPOSITORY) == ["by hand", "Windows of 2025-11-14"]
    assert "notes.md" in hub.repositories[REPOSITORY].files


async def die_before_the_revision(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish, and die between the commit and its revision in the ledger."""
    real = publishing.record_published

    async def dies(store: Store, files: Sequence[PublishedFile]) -> None:
        if files[0].revision:
            raise KeyboardInterrupt
        await real(store, files)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(publishing, "record_published", dies)
        await push(store, settings)


async def test_a_take_down_withholds_the_name_while_another_run_publishes(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo")])
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    async with published.publishing(store):
        taking = asyncio.create_task(erase(store, home, publish, "agent", "ann", apply=True))
        async with asyncio.timeout(30):
            while "ann" not in (await read_withheld(store)).agents:
                await asyncio.sleep(0.01)
        assert not taking.done()
    assert (await taking).revision


async def test_a_hub_that_falls_silent_is_given_up(
    publisher: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SILENT_S", 0.2)
    monkeypatch.setattr(hub_module, "_ATTEMPTS", 1)
    close_session()  # the next one is made with that limit
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = publisher.replace(publish={"endpoint": address}).publish
        hub = Hub(settings, "owner/play")
        with pytest.raises(
            PublishError, match=r"owner/play: the connection failed \(ReadTimeout\)"
        ):
            await asyncio.to_thread(hub.head)
    close_session()


async def test_a_take_down_finds_a_commit_that_was_not_entered(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo")])
    await die_before_the_revision(store, publisher, monkeypatch)
    home, publish = publisher.home, publisher.publish
    assert not await list_published(store, REPOSITORY.removeprefix("datasets/"))
    assert len((await erase(store, home, publish, "agent", "ann")).files) == 2
    done = await erase(store, home, publish, "agent", "ann", apply=True, squash=True)
    assert done.revision and done.squashed
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]
    (local,) = (home.datasets / "trajectories").rglob("*.parquet")
    assert pl.read_parquet(local)["agent_id"].to_list() == ["bo"]
    await push(store, publisher)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]


async def test_a_take_down_forgets_a_commit_that_was_never_made(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo")])
    hub.fail("/commit/", 403, times=99)
    with pytest.raises(PublishError):
        await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    done = await erase(store, home, publish, "agent", "ann", apply=True)
    assert not done.revision
    (local,) = (home.datasets / "trajectories").rglob("*.parquet")
    assert pl.read_parquet(local)["agent_id"].to_list() == ["bo"]
    assert not (await erase(store, home, publish, "agent", "ann")).files


async def test_a_take_down_leaves_one_file_of_a_window_that_was_built_again(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo")])
    await push(store, publisher)
    await store.pool.execute("UPDATE babylon.scores SET scorer = 'ruler'")
    await build_windows(store, publisher.home, Selection())
    home = publisher.home
    await erase(store, home, publisher.publish, "agent", "ann", apply=True)
    (local,) = (home.datasets / "trajectories").rglob("*.parquet")
    assert pl.read_parquet(local)["agent_id"].to_list() == ["bo"]


async def test_a_policy_keeps_what_it_learnt_from_released_play(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    name = f"{WINDOW}-ann"
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, kind, uri, base_model, parent_version)"
        " VALUES (0, 'base', '/b', 'tiny', NULL), (1, 'lora', '/1', 'tiny', 0),"
        " (2, 'lora', '/2', 'tiny', 1)"
    )
    await store.pool.execute(
        "INSERT INTO babylon.releases (policy_version, author, reason) VALUES (1, 'a', 'b')"
    )
    await store.pool.execute("INSERT INTO babylon.released VALUES ($1, 1, $2)", name, WINDOW)
    assert await trained_into(store, 2, [name]) == {name}
    assert await trained_into(store, 0, [name]) == frozenset()
    found = await erase(store, publisher.home, publisher.publish, "trajectory", name)
    assert found.policies == {1: "released", 2: "descendant"}
    assert "Policy 1 learnt from it, was released and never serves again." in found.advice
    assert await was_trained(store, name) and not await was_trained(store, "another")


async def test_a_run_that_died_after_its_commit_is_taken_up(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    await die_before_the_revision(store, publisher, monkeypatch)
    assert await push(store, publisher) == ["2025-11-14"]
    assert hub.commits(REPOSITORY) == ["Windows of 2025-11-14"]
    # Rows that changed in between replace the file that was not entered.
    await store.pool.execute("DELETE FROM babylon.published")
    await store.pool.execute("UPDATE babylon.scores SET scorer = 'ruler'")
    await push(store, publisher)
    assert read(hub, "trajectories")["scorer"].to_list() == ["ruler"]


@pytest.mark.parametrize(
    ("change", "fault", "remedy"),
    [
        ({"token": "hf_wrong"}, None, "401: the token is not valid: set HF_TOKEN"),
        ({}, ("/commit/", 403), "403: the token may not write"),
        ({}, ("/batch", 402), "402: the account's storage is used up"),
    ],
)
async def test_what_does_not_pass_names_the_remedy_and_stores_nothing(
    store: Store,
    publisher: Settings,
    hub: HubState,
    change: dict[str, str],
    fault: tuple[str, int] | None,
    remedy: str,
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    if fault:
        hub.fail(*fault, times=99)
    other = publisher.replace(publish=change)
    with pytest.raises(PublishError, match=remedy) as failure:
        await push(store, other)
    assert "hf_" not in str(failure.value)
    assert not await list_published(store, REPOSITORY.removeprefix("datasets/"))
    hub.faults.clear()
    assert await push(store, publisher) == ["2025-11-14"]


async def test_nothing_is_sent_before_license_and_consent(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    for missing in ("repository", "license", "agents"):
        with pytest.raises(
            ConfigError, match=f"PUBLISH_{'TO' if missing[0] == 'r' else missing.upper()}"
        ):
            await push(store, publisher.replace(publish={missing: None}))
    assert hub.requests == []
    await push(store, publisher.replace(publish={"agents": "nobody, b*"}))
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]


async def test_an_unfinished_window_waits(store: Store, publisher: Settings, hub: HubState) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    await store.pool.execute("UPDATE babylon.windows SET state = 'trained'")
    assert await push(store, publisher) == [] and hub.requests == []


async def test_an_agent_is_taken_down_everywhere(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    with pytest.raises(NothingToEraseError, match=r"'eve'.*windows explain"):
        await erase(store, home, publish, "agent", "eve")
    report = await erase(store, home, publish, "agent", "ann")
    assert report.trajectories == 1 and len(report.files) == 2 and not report.revision
    assert "ann" in read(hub, "trajectories")["agent_id"].to_list()

    done = await erase(store, home, publish, "agent", "ann", apply=True, squash=True)
    assert done.revision and done.squashed
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]
    repository = hub.repositories[REPOSITORY]
    assert not any(
        b"ann: what now" in file[1] for _, _, files in repository.commits for file in files.values()
    )
    assert [path.name for path in (home.datasets / "trajectories").rglob("*.parquet")] == [
        Path(path).name for path in repository.files if path.startswith("trajectories/")
    ]
    await finish(store, publisher, NEXT_DAY, [played(NEXT_DAY, "ann"), played(NEXT_DAY, "bo")])
    await push(store, publisher)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo", "bo"]
    assert replace(done, applied=False).advice


def shared(window_id: str, agent: str) -> dict[str, object]:
    """Play of a market that ann and bo shared, whose prompts show what both wrote."""
    row = played(window_id, agent)
    market = '"agentPnL":0,"market":{"game":{"players":["ann","bo"]}}'
    return row | {"game_json": str(row["game_json"]).replace('"agentPnL":0', market)}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_reason_that_may_tell_of_an_absent_agent_is_not_published(
    store: Store, publisher: Settings, hub: HubState, when: str
) -> None:
    """A judge compares the plays of a scenario."""
    rows = [played(WINDOW, name) for name in ("ann", "bo", "cy")]
    rows[2]["scenario_id"] = "another"
    await finish(store, publisher, WINDOW, rows)
    await store.pool.execute("UPDATE babylon.scores SET reasons = ARRAY['ann lost all of it']")
    if when == "before":
        await push(store, publisher.replace(publish={"agents": "bo,cy"}))
    else:
        await push(store, publisher)
        assert read(hub, "trajectories")["score_reasons"].list.len().to_list() == [1, 1, 1]
        await erase(store, publisher.home, publisher.publish, "agent", "ann", apply=True)
    there = read(hub, "trajectories")
    assert dict(zip(there["agent_id"], there["score_reasons"].list.len(), strict=True)) == {
        "bo": 0,
        "cy": 1,
    }


@pytest.mark.parametrize("kind", ["agent", "trajectory"])
async def test_play_that_shows_what_a_taken_down_agent_wrote_goes_too(
    store: Store, publisher: Settings, hub: HubState, kind: Literal["agent", "trajectory"]
) -> None:
    rows = [shared(WINDOW, "ann"), shared(WINDOW, "bo"), played(WINDOW, "cy")]
    await finish(store, publisher, WINDOW, rows)
    await push(store, publisher)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["ann", "bo", "cy"]
    name = "ann" if kind == "agent" else f"{WINDOW}-ann"
    await erase(store, publisher.home, publisher.publish, kind, name, apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["cy"]
    table = next((publisher.home.datasets / "trajectories").rglob("*.parquet"))
    table.unlink()
    await build_windows(store, publisher.home, await selection_of(store, publisher.publish))
    table = next((publisher.home.datasets / "trajectories").rglob("*.parquet"))
    assert pl.read_parquet(table)["agent_id"].to_list() == ["cy"]  # built again


@pytest.mark.parametrize("published", [True, False])
async def test_play_that_saw_a_trajectory_goes_too_if_a_secret_kept_out_its_own_row(
    store: Store, publisher: Settings, hub: HubState, published: bool
) -> None:
    name = f"{WINDOW}-carol@example.com"
    rows = [shared(WINDOW, "ann"), shared(WINDOW, "bo"), played(WINDOW, "cy")]
    rows[0]["trajectory_id"] = name
    await finish(store, publisher, WINDOW, rows)
    if published:
        await push(store, publisher)
    else:
        await build_windows(store, publisher.home, await selection_of(store, publisher.publish))
    await erase(store, publisher.home, publisher.publish, "trajectory", name, apply=True)
    (table,) = (publisher.home.datasets / "trajectories").rglob("*.parquet")
    assert pl.read_parquet(table)["agent_id"].to_list() == ["cy"]
    assert not published or read(hub, "trajectories")["agent_id"].to_list() == ["cy"]


@pytest.mark.parametrize("published", [True, False])
async def test_play_that_saw_a_trajectory_goes_too_if_that_was_thinned_out(
    store: Store, publisher: Settings, hub: HubState, published: bool
) -> None:
    rows = [shared(WINDOW, "bo"), played(WINDOW, "cy")]
    await finish(store, publisher, WINDOW, rows, held_out=[shared(WINDOW, "ann")])
    if published:
        await push(store, publisher)
        assert read(hub, "trajectories")["agent_id"].to_list() == ["bo", "cy"]
    await erase(store, publisher.home, publisher.publish, "trajectory", f"{WINDOW}-ann", apply=True)
    assert not published or read(hub, "trajectories")["agent_id"].to_list() == ["cy"]
    await build_windows(store, publisher.home, await selection_of(store, publisher.publish))
    assert local_agents(publisher) == ["cy"]


async def test_play_that_shows_what_another_agent_wrote_needs_the_consent_of_both(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    rows = [shared(WINDOW, "ann"), shared(WINDOW, "bo"), played(WINDOW, "cy")]
    await finish(store, publisher, WINDOW, rows)
    await push(store, publisher.replace(publish={"agents": "bo,cy"}))
    assert read(hub, "trajectories")["agent_id"].to_list() == ["cy"]


async def test_a_take_down_brings_back_nothing_of_one_that_died_after_its_commit(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo", "cy")])
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish

    async def died(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("babylon.dataset.erase.record_published", died)
        await erase(store, home, publish, "agent", "ann", apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo", "cy"]
    await erase(store, home, publish, "agent", "bo", apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["cy"]


@pytest.mark.parametrize("kind", ["agent", "trajectory"])
async def test_a_take_down_names_the_repositories_that_another_publish_to_named(
    store: Store, publisher: Settings, hub: HubState, kind: Literal["agent", "trajectory"]
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await push(store, publisher)
    rmtree(publisher.home.datasets)
    home, publish = publisher.home, publisher.publish
    name = "ann" if kind == "agent" else f"{WINDOW}-ann"
    for repository in (None, "owner/other"):
        now = publish.model_copy(update={"repository": repository})
        found = await erase(store, home, now, kind, name, apply=True)
        assert not found.files and found.elsewhere == (publish.repository,)
        assert f"run this again with PUBLISH_TO={publish.repository}" in " ".join(found.advice)
    done = await erase(store, home, publish, kind, name, apply=True)
    assert done.files and not done.elsewhere
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]
    other = publish.model_copy(update={"repository": "owner/other"})
    assert not (await erase(store, home, other, kind, name)).elsewhere


async def test_files_that_were_never_published_lose_the_play_too(
    store: Store, publisher: Settings
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    home = publisher.home
    await build_windows(store, home, Selection())
    scenario = {
        "scenario_id": WINDOW, "window_id": WINDOW, "players": [], "agents": 2,
        "trajectory_ids": [f"{WINDOW}-ann", f"{WINDOW}-bo"],
        "mean_pnl_usd": 3.75, "best_pnl_usd": 4.5,
    }  # fmt: skip
    write_table(home, TableName("scenarios", WINDOW), [[scenario]])
    found = await erase(store, home, publisher.publish, "agent", "ann")
    assert [path.partition("/")[0] for path in found.unpublished] == ["trajectories", "scenarios"]
    assert "2 files hold it" in " ".join(found.advice)
    done = await erase(store, home, publisher.publish, "agent", "ann", apply=True)
    assert done.trajectories == 1 and not done.files and not done.revision
    (plays,) = (home.datasets / "trajectories").rglob("*.parquet")
    assert pl.read_parquet(plays)["agent_id"].to_list() == ["bo"]
    (market,) = (home.datasets / "scenarios").rglob("*.parquet")
    (row,) = pl.read_parquet(market).rows(named=True)
    assert row["trajectory_ids"] == [f"{WINDOW}-bo"] and row["mean_pnl_usd"] == 3.0
    assert plays.stem.endswith(sha256(plays.read_bytes()).hexdigest()[:8])


async def test_a_take_down_leaves_no_name_without_a_play_in_the_ledger_and_on_the_card(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    """Also of one that was taken down by its trajectory, or shared a market with it."""
    rows = [shared(WINDOW, "ann"), shared(WINDOW, "bo"), played(WINDOW, "cy")]
    await finish(store, publisher, WINDOW, rows)
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    await erase(store, home, publish, "trajectory", f"{WINDOW}-ann", apply=True)
    ledger = await list_published(store, publish.repository or "")
    assert {name for file in ledger for name in file.agents} == {"cy"}
    card = hub.repositories[REPOSITORY].files["README.md"][1].decode()
    assert "1 trajectories of 1 agents in 1 windows" in card


async def test_the_card_of_this_home_tells_what_a_take_down_left(
    store: Store, publisher: Settings
) -> None:
    """``load_dataset`` fails on a split that the card names and that has no rows."""
    other = "2025-11-14T10:00"
    assert split_of(WINDOW) != split_of(other)
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    await finish(store, publisher, other, [played(other, "bo")])
    home = publisher.home
    await build_windows(store, home, Selection())
    write_card(home, publishing.describe_local(home)[0], publisher.publish)
    assert f"- split: {split_of(other)}" in (home.datasets / "README.md").read_text()
    await erase(store, home, publisher.publish, "agent", "bo", apply=True)
    card = (home.datasets / "README.md").read_text()
    assert "1 trajectories of 1 agents" in card
    assert f"    path: trajectories/*/*-{split_of(other)}-" not in card


async def test_the_history_may_be_squashed_later_and_files_fetched_after_it(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, one) for one in ("ann", "bo", "cy")])
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    first = await erase(store, home, publish, "agent", "ann", apply=True)
    assert first.revision and not first.squashed and len(hub.commits(REPOSITORY)) == 2
    again = await erase(store, home, publish, "agent", "ann", apply=True, squash=True)
    assert again.squashed and len(hub.commits(REPOSITORY)) == 1
    rmtree(home.datasets)  # another machine: the ledger names revisions that are gone
    await erase(store, home, publish, "agent", "bo", apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["cy"]


async def test_a_take_down_finds_the_play_when_rows_and_files_are_gone(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    """The game's rows were retired, and the ledger is another machine's."""
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await push(store, publisher)
    await store.pool.execute("TRUNCATE trajectories CASCADE")
    rmtree(publisher.home.datasets)
    found = await erase(store, publisher.home, publisher.publish, "agent", "ann")
    assert found.trajectories == 1 and len(found.files) == 2
    await erase(store, publisher.home, publisher.publish, "agent", "ann", apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]


async def test_a_report_looks_at_the_head_once_however_many_files_it_fetches(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    for window in (WINDOW, NEXT_DAY):
        await finish(store, publisher, window, [played(window, "ann"), played(window, "bo")])
    await push(store, publisher)
    rmtree(publisher.home.datasets)
    hub.requests.clear()
    found = await erase(store, publisher.home, publisher.publish, "agent", "ann")
    assert found.trajectories == 2
    assert len([path for _, path in hub.requests if "/tree/" in path]) == 1


async def test_a_name_is_withheld_before_the_hub_or_a_file_is_read(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await push(store, publisher)
    home, publish = publisher.home, publisher.publish
    rmtree(home.datasets)

    def down(_: object) -> None:
        raise PublishError("the hub answered 503")

    with monkeypatch.context() as patch, pytest.raises(PublishError):
        patch.setattr("babylon.dataset.erase.Hub.head", down)
        await erase(store, home, publish, "agent", "ann", apply=True)
    assert (await read_withheld(store)).agents == {"ann"}


async def test_a_damaged_file_is_named_and_holds_up_no_other(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await push(store, publisher)
    await finish(store, publisher, NEXT_DAY, [played(NEXT_DAY, "ann"), played(NEXT_DAY, "bo")])
    home, publish = publisher.home, publisher.publish
    await build_windows(store, home, Selection())
    (sent, built) = sorted((home.datasets / "trajectories").rglob("*.parquet"))
    sent.write_bytes(b"PAR1")  # fetched from the hub
    no_table = built.with_name("2025-11-16T09-00-train-00000000.parquet")
    no_table.write_bytes(b"PAR1")
    no_text = built.with_name("2025-11-17T09-00-train-00000000.parquet")
    content = built.read_bytes()
    no_text.write_bytes(content.replace(b"\x28\xb5\x2f\xfd", bytes(4), 1))
    found = await erase(store, home, publish, "agent", "ann", apply=True)
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo"]
    assert not sent.exists() and not built.exists()
    assert all(
        path.name in file for path, file in zip((no_table, no_text), found.damaged, strict=True)
    )
    assert "cannot be read" in found.damaged[0] and "remove it" in " ".join(found.advice)


def test_the_profits_of_a_scenario_are_those_of_the_plays_that_stay() -> None:
    columns = {
        "players": [[], []], "trajectory_ids": [["a1", "b1"], ["c1"]], "agents": [2, 1],
        "mean_pnl_usd": [5.0, 3.0], "best_pnl_usd": [9.0, 3.0], "prices": ["exact", "exact"],
    }  # fmt: skip
    types = [pa.list_(pa.string())] * 2 + [pa.int64()] + [pa.float64()] * 2 + [pa.string()]
    schema = pa.schema([*zip(columns, types, strict=True)])
    table = pa.table(columns, schema=schema)
    plays = {"b1": ("bo", 1.0)}
    kept = erasing._kept("scenarios", {"ann"}, {"a1"}, plays, set(), table).to_pylist()
    assert kept[0] == {"players": [], "trajectory_ids": ["b1"], "agents": 1, "mean_pnl_usd": 1.0,
                       "best_pnl_usd": 1.0, "prices": "exact"}  # fmt: skip
    assert kept[1] == table.to_pylist()[1]
    (unknown, _) = erasing._kept("scenarios", {"ann"}, {"a1"}, {}, set(), table).to_pylist()
    assert unknown["mean_pnl_usd"] is None and unknown["agents"] is None


def test_a_scenario_that_shows_a_play_or_has_no_other_goes_with_it() -> None:
    """A live one is made of its agents' balances and of the prices that they looked at."""
    ids, prices = [["a1", "b1"], ["a1", "b1"], ["b1"], ["a1"]], ["seen", "interpolated"]
    columns = {
        "scenario_id": ["one", "two", "three", "four"], "players": [[], [], [], []],
        "trajectory_ids": ids, "prices": [*prices, "seen", "exact"], "agents": [2, 2, 1, 1],
        "mean_pnl_usd": [5.0] * 4, "best_pnl_usd": [9.0] * 4,
    }  # fmt: skip
    table = pa.table(columns, schema=pa.schema([SCHEMAS["scenarios"].field(n) for n in columns]))
    kept = erasing._kept("scenarios", {"ann"}, {"a1"}, {"b1": ("bo", 1.0)}, set(), table)
    assert kept["scenario_id"].to_pylist() == ["three"]


async def test_a_scenario_or_an_outcome_with_a_secret_that_stays_is_left_out(
    store: Store, publisher: Settings, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann")])
    (scored,) = await windows_of(store)
    monkeypatch.setattr(building, "found", lambda texts: {"EMAIL"} & {*texts, "EMAIL"})
    tables = await build_tables(store, publisher.home, scored, Selection())
    assert tables["outcomes"].rows == tables["model_performance"].rows == 0
    assert (
        "a row of outcomes of window 2025-11-14T09:00 is not published: rule EMAIL" in caplog.text
    )
    assert (await build_tables(store, publisher.home, scored, Selection(safe=False)))[
        "outcomes"
    ].rows == 1


async def test_ids_in_hex_still_join_the_tables(store: Store, publisher: Settings) -> None:
    """A digest is a usual id. In another column it may be a key."""
    digest = "0123456789abcdef0123456789abcdef01234567"
    rows = [{"window_id": WINDOW, "scenario_id": digest, "players": [digest], "note": digest}]
    assert building._safe("scenarios", rows, Selection()) == [
        {"window_id": WINDOW, "scenario_id": digest, "players": [digest], "note": "[HEX_KEY]"}
    ]
    rows = [{"window_id": WINDOW, "players": ["bob@example.com"]}]
    assert building._safe("scenarios", rows, Selection()) == [
        {"window_id": WINDOW, "players": ["[EMAIL]"]}
    ]


async def test_the_plays_of_a_recipe_are_of_its_window(store: Store, publisher: Settings) -> None:
    recipe = f"{WINDOW}+again"
    await finish(store, publisher, recipe, [played(WINDOW, "ann")])
    (scored,) = await windows_of(store)
    tables = await build_tables(store, publisher.home, scored, Selection())
    published = pl.read_parquet(publisher.home.resolve(tables["trajectories"].uri))
    assert published["window_id"].to_list() == [recipe]


async def test_a_state_of_any_game_is_published_and_replayed_only_if_it_can_be(
    store: Store, publisher: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Play over HTTP needs no state: only ``agentPnL`` is read, which the recorder adds."""
    states = {
        "ann": '{"agentPnL":0}',
        "bo": '{"agentPnL":0,"agentBalance":"three coins","market":7}',
        "cy": '{"agentPnL":0,"agentBalance":990.5}',
    }
    rows = []
    for agent, state in states.items():
        row = played(WINDOW, agent)
        game = str(row["game_json"]).replace('{"agentBalance":990.5,"agentPnL":0}', state)
        assert state in game
        rows.append(row | {"game_json": game})
    rows[1]["game_json"] = str(rows[1]["game_json"]).replace("1763110800000", '"noon"')
    await finish(store, publisher, WINDOW, rows)
    (scored,) = await windows_of(store)
    tables = await build_tables(store, publisher.home, scored, Selection())
    published = pl.read_parquet(publisher.home.resolve(tables["trajectories"].uri))
    steps = dict(zip(published["agent_id"], published["steps"], strict=True))
    assert {name: step[0]["balance_usd"] for name, step in steps.items()} == {
        "ann": None, "bo": None, "cy": 990.5,
    }  # fmt: skip
    assert [name for name, step in steps.items() if step[0]["at"] is None] == ["bo"]
    assert tables["scenarios"].rows == 0
    assert "3 rows or scenarios cannot be replayed, the first because: trajectory" in caplog.text


async def test_a_take_down_waits_for_a_commit_in_the_making(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger does not know the files yet, so a take-down beside it would miss them."""
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    await finish(store, publisher, NEXT_DAY, [played(NEXT_DAY, "ann"), played(NEXT_DAY, "bo")])
    await push(store, publisher, before=date(2025, 11, 15))
    real, begun = publishing._send, asyncio.Event()

    async def slow(*arguments: Any) -> publishing.PublishedDay:
        begun.set()
        await asyncio.sleep(0.5)
        return await real(*arguments)

    monkeypatch.setattr(publishing, "_send", slow)
    run = asyncio.create_task(push(store, publisher))
    await begun.wait()
    await erase(store, publisher.home, publisher.publish, "agent", "ann", apply=True)
    assert await run == ["2025-11-15"]
    assert read(hub, "trajectories")["agent_id"].to_list() == ["bo", "bo"]


async def test_a_take_down_waits_for_files_in_the_making(
    store: Store, publisher: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of before would write the play back, and exports read the local files."""
    await finish(store, publisher, WINDOW, [played(WINDOW, "ann"), played(WINDOW, "bo")])
    before = await selection_of(store, publisher.publish)
    await build_windows(store, publisher.home, before)
    real, begun = performance_rows, asyncio.Event()

    async def slow(*arguments: Any) -> Any:
        begun.set()
        await asyncio.sleep(0.5)
        return await real(*arguments)

    monkeypatch.setattr("babylon.dataset.build.performance_rows", slow)
    run = asyncio.create_task(build_windows(store, publisher.home, before))
    await begun.wait()
    await erase(store, publisher.home, publisher.publish, "agent", "ann", apply=True)
    assert local_agents(publisher) == ["bo"]
    await run
    await build_windows(store, publisher.home, before)  # made before the take-down
    assert local_agents(publisher) == ["bo"]


def local_agents(publisher: Settings) -> list[str]:
    (table,) = (publisher.home.datasets / "trajectories").rglob("*.parquet")
    return pl.read_parquet(table)["agent_id"].to_list()


async def test_a_damaged_window_holds_up_no_other(
    store: Store, publisher: Settings, hub: HubState
) -> None:
    await two_days(store, publisher)
    first = (await windows_of(store))[0]
    Path(publisher.home.resolve(first.artifact.uri)).unlink()
    assert await push(store, publisher) == ["2025-11-14", "2025-11-15"]
    assert WINDOW not in read(hub, "trajectories")["window_id"].to_list()


async def test_an_outcome_of_another_type_is_written_and_a_window_that_fits_no_table_costs_itself(
    store: Store, publisher: Settings, hub: HubState, caplog: pytest.LogCaptureFixture
) -> None:
    odd = played(WINDOW, "ann")
    told = ('"predictionMarketId":"m1"', '"outcome":"YES"')
    wrote = ('"predictionMarketId":7,"startPrice":"12 coins","endPrice":3', '"outcome":true')
    for of, to in zip(told, wrote, strict=True):
        odd["knowledge_json"] = str(odd["knowledge_json"]).replace(of, to)
    await finish(store, publisher, WINDOW, [odd])
    huge = played(NEXT_DAY, "bo")
    huge["game_json"] = str(huge["game_json"]).replace(':0,"timestamp', f':{2**40},"timestamp')
    await finish(store, publisher, NEXT_DAY, [huge])
    later = "2025-11-16T09:00"
    await finish(store, publisher, later, [played(later, "cy")])
    assert await push(store, publisher) == ["2025-11-14", "2025-11-16"]
    (first, _) = read(hub, "outcomes").rows(named=True)
    assert (first["market_id"], first["outcome"]) == ("7", "True")
    assert (first["start_price_usd"], first["end_price_usd"]) == (None, 3.0)
    assert f"the rows of window {NEXT_DAY} fit no table" in caplog.text
    assert str(2**40) not in caplog.text


def batch_digest(rows: list[TrainingRow]) -> str:
    """A digest of what the trainer computes on: every token, logprob and advantage."""
    trajectories, _ = scored_trajectories(tiny_tokenizer(), rows, context=512)
    window = compile_window(trajectories, TrainerConfig())
    return blake2b(repr((window.calls, window.advantages, window.groups)).encode()).hexdigest()


def loaded_rows(settings: Settings) -> list[TrainingRow]:
    names = ("trajectory_id", "agent_id", "scenario_id", "score")
    return [
        TrainingRow(**{name: row[name] for name in names}, calls=tuple(map(call_of, row["calls"])))
        for row in read_rows(settings.home.datasets)
    ]


async def test_an_unscrubbed_window_loads_back_as_the_same_batch(
    store: Store, settings: Settings
) -> None:
    rows = [played(WINDOW, name, f"mail {name}@example.com") for name in ("ann", "bo")]
    await finish(store, settings, WINDOW, rows, scores=[0.25, 0.75])
    (scored,) = await windows_of(store)
    recorded = training_rows(settings.home, scored.artifact)
    await build_tables(store, settings.home, scored, Selection(safe=False))
    loaded = loaded_rows(settings)
    assert loaded == recorded and batch_digest(loaded) == batch_digest(recorded)
    await build_tables(store, settings.home, scored, Selection())
    scrubbed = loaded_rows(settings)
    assert "example.com" not in str(scrubbed) and scrubbed[0].calls[0].retokenized
