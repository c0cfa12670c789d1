"""The eight stages that take one window from recorded play to a served policy."""

import time
from collections.abc import Awaitable, Callable

from babylon.core.errors import AlreadyTrainedError, ExperimentRunningError, WindowNotReadyError
from babylon.core.types import WindowResult
from babylon.core.windows import Window, WindowState
from babylon.flows.gpu_stage import GpuStages
from babylon.stages.claim import claimed, resume
from babylon.stages.fingerprint import scoring_fingerprint
from babylon.stages.finish import earlier_result, finish_window
from babylon.stages.turn import experiment_runs, wait_for_turn
from babylon.store import Store
from babylon.tasks.approval import approval
from babylon.tasks.collect import collect
from babylon.tasks.deploy import deploy
from babylon.tasks.dropout import dropout
from babylon.tasks.experiment import experiment
from babylon.tasks.promise import promise_kept
from babylon.tasks.publish import publish
from babylon.tasks.publish_policy import publish_policy
from babylon.tasks.retire import retire
from babylon.tasks.score import score
from babylon.tasks.stage import run_after
from babylon.tasks.track import track
from babylon.tasks.validate import validate


async def eight_stages(
    store: Store, gpu: GpuStages, window: Window, finish: Callable[[Window], Awaitable[object]]
) -> WindowResult:
    """Train one window. Each stage commits its result, and a later run resumes after it.

    ``finish``: what to do with half-finished windows, which go first (``stages.turn``).

    Raises:
        SupersededError: another policy leads by now. The window is scored again.
        BabylonError: a stage failed; the window's row keeps the reason.
    """
    settings = gpu.settings
    arena = (store, settings.seed, settings.model.name)
    try:
        async with claimed(store, settings.windows, window) as claim, promise_kept(*arena, claim):
            started = time.monotonic()
            scored, trained = await resume(store, scoring_fingerprint(settings), claim)
            if scored is None:
                collected = await collect(settings, claim, window)
                validated = await validate(settings, collected)
                thinned = await dropout(settings, validated)
                scored = await score(settings, thinned)
            # Windows are scored side by side, and trained one after the other (decision 22).
            await wait_for_turn(store, settings.windows, claim, finish)
            if trained is None:
                if await experiment_runs(store):
                    await experiment(settings, claim)
                trained = await gpu.train(scored)
            verdict = await gpu.validate_checkpoint(trained)
            if verdict.promote and settings.deployment.approval_hours:
                verdict = await approval(store, settings.deployment, verdict)
            deployed = await deploy(settings, verdict)
            result = await finish_window(
                store, window, scored, trained, verdict, deployed, started=started
            )
    except AlreadyTrainedError as error:
        return await earlier_result(store, window, str(error))
    except WindowNotReadyError as error:
        return WindowResult(window_id=window.key, status=WindowState.SKIPPED, reason=str(error))
    except ExperimentRunningError as error:
        return WindowResult(
            window_id=window.key, status=WindowState.SCORED, reason=str(error), changed=False
        )
    places = (settings.home, settings.model, settings.tracking)
    await run_after(window.key, publish, settings, scored)
    promoted = trained.checkpoint_uri if deployed.deployed else None
    await run_after(window.key, track, *places, result.metrics, promoted)
    await run_after(window.key, publish_policy, store, settings.publish)
    await run_after(window.key, retire, settings)
    return result
