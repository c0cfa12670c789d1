"""Stage ``validate``: keep the valid trajectories of a window, and reject the rest with a reason.

Ground truth (the row's game knowledge, the window's market outcomes) leaves this stage in a column
of its own, ``knowledge_json``, which only a judge reads.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

import msgspec
import pyarrow as pa

from babylon.core.artifacts import ArtifactWriter, Columns, iter_batches
from babylon.core.errors import WindowNotReadyError
from babylon.core.game_rows import GAME_SCHEMA, GameRow
from babylon.core.home import Home
from babylon.core.settings import QualitySettings, Settings
from babylon.core.trajectories import TRAJECTORY_SCHEMA, trajectory_row
from babylon.core.types import Artifact, Collected, Rejection, Validated
from babylon.core.windows import Window, parse_window_id
from babylon.quality.decode import garbage_collection_paused
from babylon.quality.health import PlayTally
from babylon.quality.row_checks import Accepted, check_row
from babylon.stages.watch import measure_play
from babylon.store import Store
from babylon.store.rejections import replace_rejections


async def validate_window(store: Store, settings: Settings, collected: Collected) -> Validated:
    """Check every collected row and store the rejections.

    Raises:
        WindowNotReadyError: too few agents are left; the rejections are stored anyway.
    """
    window = parse_window_id(collected.claim.window_id, settings.windows.minutes)
    artifact, tally, rejections = await asyncio.to_thread(
        check_artifact, collected.artifact, window, settings.home, settings.quality
    )
    await replace_rejections(store, collected.claim, rejections)
    await measure_play(store, collected.claim, window, tally, collected.outcomes)
    agents = tally.eligible_agents
    rejected = count_reasons(rejections)
    if len(agents) < (minimum := settings.windows.min_agents):
        raise WindowNotReadyError(too_few_agents(window.key, len(agents), minimum, rejected))
    return Validated(
        claim=collected.claim,
        artifact=artifact,
        agents=len(agents),
        rejected=rejected,
        outcomes=collected.outcomes,
    )


def check_artifact(
    raw: Artifact, window: Window, home: Home, quality: QualitySettings
) -> tuple[Artifact, PlayTally, list[Rejection]]:
    """Return the accepted rows as an artifact, a tally, and the rejections. Blocking."""
    tally = PlayTally()
    rejections: list[Rejection] = []
    with ArtifactWriter(home, TRAJECTORY_SCHEMA, stage="validated", window_id=window.key) as writer:
        for batch in iter_batches(home, raw, list(GAME_SCHEMA)):
            sound, accepted = [], []
            with garbage_collection_paused():
                collected = batch.to_pydict()
                for values in zip(*collected.values(), strict=True):
                    row = GameRow(**dict(zip(collected, values, strict=True)))
                    verdict = check_row(row, window, quality)
                    sound.append(isinstance(verdict, Accepted))
                    if isinstance(verdict, Rejection):
                        rejections.append(verdict)
                        tally.reject(row)
                    else:
                        tally.accept(verdict.trajectory, row.steps_json)
                        accepted.append(_row(row, verdict))
            columns: Columns = {name: [row[name] for row in accepted] for name in TRAJECTORY_SCHEMA}
            # copied in Arrow, without a detour through Python strings
            columns["game_json"] = batch.column("steps_json").filter(pa.array(sound, pa.bool_()))
            writer.write(columns)
    return writer.artifact, tally, rejections


def count_reasons(rejections: Iterable[Rejection]) -> dict[str, int]:
    """Return the number of rejections by reason, the most frequent first."""
    return dict(Counter(str(rejection.reason) for rejection in rejections).most_common())


def too_few_agents(window_id: str, agents: int, minimum: int, rejected: dict[str, int]) -> str:
    """Return the line that tells an operator why a window cannot be trained."""
    because = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
    return (
        f"window {window_id} has {agents} eligible agents, minimum is {minimum}"
        + (f" (rejected trajectories: {because})" if because else "")
        + ": let more agents play, or lower --min-agents or --min-actions"
    )


def _row(row: GameRow, accepted: Accepted) -> dict[str, object]:
    game_knowledge = msgspec.json.encode(accepted.game_knowledge).decode()
    return trajectory_row(
        accepted.trajectory,
        game_json=row.steps_json,
        knowledge_json=(
            f'{{"game_knowledge":{game_knowledge},"market_outcomes":{row.outcomes_json}}}'
        ),
        step_rewards_json=msgspec.json.encode(accepted.step_rewards).decode(),
    )
