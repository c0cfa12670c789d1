"""openpipe-art: the only module that imports ``art``, which takes 8 s and must not be on a hot path.

ART 0.5.18 patches transformers with a function of an older signature, after which every forward
pass raises a TypeError; the original is put back here, whoever imported ``art`` first.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm fetches one at import

import art
from art.serverless.client import TrainingJob
from art.transformers import patches
from openai.types.chat.chat_completion import Choice

from babylon.trajectories import Call, TrainingRow

patches.masking_utils._preprocess_mask_arguments = patches._preprocess_mask_arguments

TrainResult = art.TrainResult
GRADIENT_STEPS = "data/step_num_gradient_steps"  # ART's name for how many there will be


class Model(art.TrainableModel):  # type: ignore[misc]
    """ART's model without its W&B run: the pipeline logs a window's metrics itself."""

    def _get_wandb_run(self) -> None:
        return None


class Serverless(art.ServerlessBackend):  # type: ignore[misc]
    """W&B's training service; a job is made known before anybody waits for it.

    Args:
        job_id: a job that was submitted before: ``train`` waits for it and submits nothing.
        submitted: awaited with the id of a new job, before the first look at its events.
        progress: gradient steps done, and how many there will be.
    """

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str | None,
        job_id: str | None,
        submitted: Callable[[str], Awaitable[None]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(api_key=api_key, base_url=base_url)
        self._progress = progress
        jobs = self._client.training_jobs
        submit = jobs.create

        async def submit_once(**fields: Any) -> Any:
            if job_id is not None:
                return TrainingJob(id=job_id)
            job = await submit(**fields)
            await submitted(job.id)
            return job

        jobs.create = submit_once

    async def checkpoints(self, model: Any) -> dict[int, dict[str, float]]:
        """Step → metrics of every checkpoint that the service keeps of a model."""
        listed = self._client.models.checkpoints.list(model_id=model.id, order="asc")
        return {checkpoint.step: checkpoint.metrics async for checkpoint in listed}

    async def pull(self, model: Any, step: int, directory: Path) -> None:
        """Download a checkpoint's adapter from W&B's artifacts, in a thread."""
        await asyncio.to_thread(
            asyncio.run,
            self._experimental_pull_model_checkpoint(model, step=step, local_path=str(directory)),
        )

    async def _train_model(self, *arguments: Any) -> AsyncIterator[dict[str, float]]:
        done = 0
        async for metrics in super()._train_model(*arguments):
            done += 1
            if self._progress is not None:
                self._progress(done, int(metrics[GRADIENT_STEPS]))
            yield metrics


def local_backend(path: Path) -> Any:
    """ART's trainer on this machine's GPU (unsloth and vLLM); models lie under ``path``."""
    from art.local import LocalBackend

    return LocalBackend(path=str(path))


def trajectory_groups(rows: Sequence[TrainingRow]) -> list[Any]:
    """One group a scenario, one history a call; every call must carry tokens and logprobs.

    Only messages, tokens and scores are told: who played, and where, is nobody's business.
    """
    scenarios: dict[str, list[Any]] = {}
    for row in rows:
        first, *others = (_history(call) for call in row.calls)
        trajectory = art.Trajectory(
            messages_and_choices=first,
            additional_histories=[{"messages_and_choices": history} for history in others],
            reward=row.score,
        )
        scenarios.setdefault(row.scenario_id, []).append(trajectory)
    return [art.TrajectoryGroup(trajectories) for trajectories in scenarios.values()]


def _history(call: Call) -> list[Any]:
    """The messages as they were sent, and the reply as vLLM would have returned it."""
    assert call.completion_token_ids is not None and call.logprobs is not None
    choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": call.response},
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                    for token, logprob in zip(call.completion_token_ids, call.logprobs, strict=True)
                ]
            },
        }
    )
    messages = [{"role": message.role, "content": message.content} for message in call.messages]
    return [*messages, choice]
