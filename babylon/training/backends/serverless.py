"""``TRAINER=serverless``: a window is trained by W&B, through ART's client of its training API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai

from babylon.core.errors import ConfigError, TrainingError
from babylon.policies.adopt import decoder
from babylon.training.backends.art_local import load_art
from babylon.training.backends.art_metrics import from_art
from babylon.training.backends.art_window import ArtWindow, art_window, known_secrets, limits_of
from babylon.training.backends.serverless_job import Run, parents_job, reason_of
from babylon.training.backends.trainer_requirements import require_serverless
from babylon.training.backends.updater import TrainInput
from babylon.training.backends.wandb_account import SERVERLESS_MODELS, WandbAccount

if TYPE_CHECKING:
    from babylon.training.update import Update


async def update_serverless(work: TrainInput) -> "Update":
    """One window at W&B; ``work.target`` gets the adapter.

    Raises:
        ConfigError: the service cannot train this policy with these settings, as far as that is
            known here; nothing was sent. Or it refuses the key, or the model is not ours.
        WindowNotReadyError: nothing in the window can be trained; no job was submitted.
        TrainingError: the job failed, is overdue, or the service cannot be reached.
    """
    from babylon.training.update import Excluded, Update

    account = require_serverless(work.settings, work.parent.base_model)
    await parents_job(work)

    async def choose() -> ArtWindow:
        limits = limits_of(
            work,
            context=SERVERLESS_MODELS[work.parent.base_model],
            secrets=known_secrets(work.settings) | {account.key},
            decode=await asyncio.to_thread(decoder, work.parent.uri),
        )
        return await asyncio.to_thread(art_window, work.rows, limits)

    async with _provider(work, account) as (backend, model):
        job = await Run(work, backend, model, choose).checkpoint()
    return Update(
        report=from_art(job.metrics, job.counts),
        excluded=Excluded(**job.excluded),
        trajectory_ids=tuple(job.trajectory_ids),
    )


@asynccontextmanager
async def _provider(work: TrainInput, account: WandbAccount) -> AsyncIterator[tuple[Any, Any]]:
    """(backend, registered model); its errors are told as ours."""
    art = await load_art()
    backend = art.Serverless(
        api_key=account.key, base_url=account.training_url, progress=work.progress
    )
    model = art.Model(
        name=work.settings.model.name,
        project=work.settings.tracking.project or work.settings.model.name,
        entity=account.entity,
        base_model=work.parent.base_model,
    )
    try:
        await model.register(backend)
        yield backend, model
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise ConfigError(f"W&B refuses WANDB_API_KEY ({reason_of(error)})") from error
    except openai.APIError as error:
        raise TrainingError(
            f"W&B's training API, window {work.claim.window_id}: {reason_of(error)}; the next run"
            " of the window goes on where this one stopped"
        ) from error
    finally:
        await backend.close()
