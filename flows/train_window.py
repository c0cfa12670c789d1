"""One window from recorded play to a served policy: the eight stages."""

import time
from collections.abc import Sequence

from prefect import flow
from prefect.runtime import flow_run

from babylon.blocks.load import Overrides, settings_with
from babylon.core.errors import AlreadyTrainedError, WindowNotReadyError
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.gpu_stage import GpuStages, Placement
from babylon.scoring.registry import require_scorer
from babylon.stages.claim import claimed, resume
from babylon.stages.finish import earlier_result, finish_window
from babylon.stages.pending import window_to_train
from babylon.store import open_store
from babylon.tasks.collect import collect
from babylon.tasks.deploy import deploy
from babylon.tasks.dropout import dropout
from babylon.tasks.publish import publish
from babylon.tasks.retire import retire
from babylon.tasks.score import score
from babylon.tasks.stage import run_after
from babylon.tasks.track import track
from babylon.tasks.validate import validate


@flow(name="train-window", flow_run_name=lambda: flow_run.parameters["window_id"] or "newest")
async def train_window(
    window_id: str | None = None,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
    placement: Placement = "inline",
) -> WindowResult:
    """Train one closed window: ``window_id``, else a half-finished one, else the newest ready one.

    Each stage commits its result, and a run that died is resumed after ``score`` or ``train``.

    Args:
        overrides: Settings by group: ``{"windows": {"min_agents": 5}}``.
        blocks: Names of blocks to take settings from (``"babylon-database/live"``).
        placement: Run training and checkpoint validation here, or on the ``gpu`` work pool.

    Raises:
        WindowNotReadyError: The named window is still being played.
        BabylonError: A stage failed; the window's row keeps the reason.
    """
    settings = await settings_with(overrides, blocks)
    require_scorer(settings.scoring.scorer, settings.judge)
    gpu = GpuStages(settings, overrides, blocks, placement)
    async with open_store(settings) as store:
        window = await window_to_train(store, settings, window_id)
        try:
            async with claimed(store, settings.windows, window) as claim:
                started = time.monotonic()
                scored, trained = await resume(store, settings, claim)
                if scored is None:
                    collected = await collect(settings, claim, window)
                    validated = await validate(settings, collected)
                    thinned = await dropout(settings, validated)
                    scored = await score(settings, thinned)
                trained = trained or await gpu.train(scored)
                verdict = await gpu.validate_checkpoint(trained)
                deployed = await deploy(settings, verdict)
                await publish(settings, scored)
                result = await finish_window(
                    store, window, scored, trained, verdict, deployed, started=started
                )
        except AlreadyTrainedError as error:
            return await earlier_result(store, window, str(error))
        except WindowNotReadyError as error:
            return WindowResult(window_id=window.key, status=WindowState.SKIPPED, reason=str(error))
    await run_after(window.key, track, settings, result.metrics)
    await run_after(window.key, retire, settings)
    return result
