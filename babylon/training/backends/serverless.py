"""``TRAINER=serverless``: a window trained by W&B, through ART's client of its training API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from babylon.core.errors import ConfigError, TrainingError
from babylon.policies.tokenizer import decoder
from babylon.training.backends.art_local import load_art
from babylon.training.backends.art_metrics import from_art
from babylon.training.backends.art_window import (
    ArtWindow,
    art_limits,
    art_window,
    known_secrets,
)
from babylon.training.backends.serverless_job import ServerlessRun, parents_job, reason_of
from babylon.training.backends.train_input import TrainInput
from babylon.training.backends.trainer_requirements import (
    SERVERLESS_MODELS,
    WandbAccount,
    require_serverless,
)
from babylon.training.update_result import Excluded, Update


async def update_serverless(work: TrainInput) -> Update:
    """Train one window at W&B, and write the adapter to ``work.target``.

    Raises:
        ConfigError: the service does not support this policy or these settings, rejects the API
            key, or holds checkpoints of the model that this home did not train.
        WindowNotReadyError: nothing in the window can be trained; no job was submitted.
        TrainingError: the job failed or is overdue, or the service cannot be reached.
    """
    account = require_serverless(work.settings.training, work.parent.base_model)
    await parents_job(work)

    async def choose() -> ArtWindow:
        limits = art_limits(
            work,
            context=SERVERLESS_MODELS[work.parent.base_model],
            secrets=known_secrets(work.settings.database) | {account.api_key.get_secret_value()},
            decode=await asyncio.to_thread(decoder, work.parent.uri),
        )
        return await asyncio.to_thread(art_window, work.rows, limits)

    async with _provider(work, account) as (backend, model):
        job = await ServerlessRun(work, backend, model, choose).checkpoint()
    return Update(
        report=from_art(job.metrics, job.counts),
        excluded=Excluded(**job.excluded),
        trajectory_ids=tuple(job.trajectory_ids),
    )


@asynccontextmanager
async def _provider(work: TrainInput, account: WandbAccount) -> AsyncIterator[tuple[Any, Any]]:
    """(backend, registered model). Errors of the API become ours."""
    art = await load_art()
    backend = art.Serverless(
        api_key=account.api_key.get_secret_value(),
        base_url=account.training_url,
        progress=work.progress,
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
        raise ConfigError(f"W&B rejects WANDB_API_KEY ({reason_of(error)})") from error
    except openai.APIError as error:
        raise TrainingError(
            f"W&B's training API, window {work.claim.window_id}: {reason_of(error)}; the window's"
            " next run continues from here"
        ) from error
    finally:
        await backend.close()
