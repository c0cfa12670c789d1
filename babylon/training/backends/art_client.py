"""The client of openpipe-art. No other module imports ``art``, because the import takes 8 s.

ART 0.5.18 replaces a function of transformers by one with an older signature, after which every
forward pass raises a TypeError. This module restores the original.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download at litellm's import
os.environ.setdefault("PYTHON_DOTENV_DISABLED", "1")  # ignore .env files above site-packages

import art
import wandb
from art.rewards import ruler_score_group
from art.serverless.client import TrainingJob
from art.transformers import patches
from openai.types.chat.chat_completion import Choice

from babylon.core.errors import TrainingError, reason_of
from babylon.core.trajectories import Call, TrainingRow
from babylon.training.update_result import GRADIENT_STEPS

patches.masking_utils._preprocess_mask_arguments = patches._preprocess_mask_arguments

TrainResult = art.TrainResult


class Model(art.TrainableModel):  # type: ignore[misc]
    """ART's model without its W&B run, because the pipeline logs the metrics itself."""

    def _get_wandb_run(self) -> None:
        return None


class Serverless(art.ServerlessBackend):  # type: ignore[misc]
    """W&B's training service, with access to a job's id before its end.

    ``progress`` is called after each gradient step with (steps done, all steps).
    """

    def __init__(
        self, *, api_key: str, base_url: str | None, progress: Callable[[int, int], None] | None
    ) -> None:
        super().__init__(api_key=api_key, base_url=base_url)
        self._progress = progress

    async def train_job(
        self,
        model: Any,
        groups: Sequence[Any],
        *,
        job_id: str | None,
        submitted: Callable[[str], Awaitable[None]],
        **options: Any,
    ) -> Any:
        """ART's ``train``. With a ``job_id`` it waits for that job and submits nothing.

        ``submitted`` is awaited with the id of a new job before the job's events are read.
        """
        jobs = self._client.training_jobs
        submit = type(jobs).create

        async def submit_once(**fields: Any) -> Any:
            if job_id is not None:
                return TrainingJob(id=job_id)
            job = await submit(jobs, **fields)
            await submitted(job.id)
            return job

        jobs.create = submit_once
        return await self.train(model, groups, **options)

    async def checkpoints(self, model: Any) -> dict[int, dict[str, float]]:
        """Step → metrics, of the model's checkpoints at the service."""
        listed = self._client.models.checkpoints.list(model_id=model.id, order="asc")
        return {checkpoint.step: checkpoint.metrics async for checkpoint in listed}

    async def pull(self, model: Any, step: int, directory: Path) -> None:
        """Download a checkpoint's adapter from W&B's artifacts.

        Raises:
            TrainingError: the download failed.
        """
        try:
            await asyncio.to_thread(self._download, model, step, directory)
        except (wandb.Error, ValueError, OSError) as error:
            raise TrainingError(
                f"W&B does not deliver checkpoint {step} of model {model.name}"
                f" ({reason_of(error)}): run the window again, which downloads it without a new job"
            ) from error

    def _download(self, model: Any, step: int, directory: Path) -> None:
        name = self._model_inference_name(model, step).removeprefix("wandb-artifact:///")
        artifact = wandb.Api(api_key=self._client.api_key).artifact(name, type="lora")
        artifact.download(root=str(directory), skip_cache=True)  # nothing would empty the cache

    async def _train_model(self, *arguments: Any) -> AsyncIterator[dict[str, float]]:
        done = 0
        async for metrics in super()._train_model(*arguments):
            done += 1
            if self._progress is not None:
                self._progress(done, int(metrics[GRADIENT_STEPS]))
            yield metrics


def local_backend(path: Path) -> Any:
    """ART's trainer on this machine's GPU (unsloth and vLLM), with its models under ``path``."""
    from art.local import LocalBackend

    return LocalBackend(path=str(path))


def trajectory_groups(rows: Sequence[TrainingRow]) -> list[Any]:
    """One group a scenario, one history a call. Every call must have tokens and logprobs.

    Groups hold messages, tokens and scores, but no names of agents or scenarios.
    """
    scenarios: dict[str, list[Any]] = {}
    for row in rows:
        first, *others = (_history(call) for call in row.calls)
        trajectory = art.Trajectory(**first, additional_histories=others, reward=row.score)
        scenarios.setdefault(row.scenario_id, []).append(trajectory)
    return [art.TrajectoryGroup(trajectories) for trajectories in scenarios.values()]


def _history(call: Call) -> dict[str, Any]:
    assert call.completion_token_ids is not None and call.logprobs is not None
    choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": call.answer,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                    for token, logprob in zip(call.completion_token_ids, call.logprobs, strict=True)
                ]
            },
        }
    )
    return {"messages_and_choices": [*call.messages, choice], "tools": list(call.tools) or None}


async def ruler_rewards(
    chats: Sequence[list[dict[str, str]]], *, model: str, base_url: str, api_key: str, rubric: str
) -> list[float]:
    """Rewards of ART's own RULER for the chats of one group."""
    group = art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=chat, reward=0.0) for chat in chats]
    )
    scored = await ruler_score_group(
        group,
        f"openai/{model}",
        extra_litellm_params={"api_base": base_url, "api_key": api_key},
        rubric=rubric,
        swallow_exceptions=False,
    )
    return [float(trajectory.reward) for trajectory in scored.trajectories]
