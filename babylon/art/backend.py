"""Our trainer, checkpoints and engine as a backend of ART (openpipe-art's ``art.Backend``).

A script that was written for ART's own ``LocalBackend`` registers its model here instead, and runs
on a CPU. Checkpoints lie where that backend puts them, ``<path>/<project>/models/<name>/
checkpoints/<step>``; step 0 is the base model, or the adapter found there.

Answers of ``model.openai_client()`` carry token ids and logprobs, so replies are trained on exactly
as they were sampled; ART's convention, and so the assumption here, is temperature 1. Options of
ART's own trainers that ours does not have are refused, not ignored.
"""

import asyncio
import itertools
import logging
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from babylon.art.client import TrainResult
from babylon.core.errors import ConfigError, WindowNotReadyError
from babylon.core.trajectories import TrainingRow
from babylon.policies.base_name import local_directory
from babylon.serving.engine.embedded import EmbeddedEngine
from babylon.training.backends.art_chats import calls_of
from babylon.training.backends.art_metrics import GRADIENT_STEPS, TRAINABLE_GROUPS, to_art
from babylon.training.grpo.config import TrainerConfig
from babylon.training.sft import Imitated, fine_tune
from babylon.training.trainable import Tuning
from babylon.training.update import update_checkpoint

logger = logging.getLogger(__name__)
SFT_BATCH = 2  # ART's default, trajectories
_pinned: ContextVar[dict[str, int] | None] = ContextVar("babylon_pinned_steps", default=None)


class Backend:
    """An ``art.Backend``.

    Args:
        path: where models and their checkpoints lie.
        config: how our trainer trains; ``learning_rate`` yields to that of ``train``.
    """

    def __init__(
        self,
        path: Path | str = ".art",
        *,
        tuning: Tuning = "lora",
        config: TrainerConfig | None = None,
    ) -> None:
        self._path = Path(path).absolute()
        self._tuning = tuning
        self._config = config or TrainerConfig()
        self._engine = EmbeddedEngine()
        self._training = asyncio.Lock()

    async def register(self, model: Any) -> None:
        """ART's logs of the model go beside its checkpoints."""
        model.base_path = str(self._path)
        self._directory(model).mkdir(parents=True, exist_ok=True)

    async def _prepare_backend_for_training(
        self, model: Any, config: Any = None
    ) -> tuple[str, str]:
        """Serve the model's newest checkpoint → (base URL, API key).

        Raises:
            ConfigError: options for a vLLM server, which this is not.
            ModelError: the checkpoint does not load.
        """
        if config:
            raise ConfigError(f"server options {dict(config)}: the embedded engine has none")
        url = await self._engine.start()
        await self._serve(model, self._newest(model))
        return url, "embedded"

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        """``name@step``; the newest step unless one is given or leased."""
        if not model.trainable:
            return str(model.inference_model_name or model.name)
        if step is None:
            step = (_pinned.get() or {}).get(model.name)
        return f"{model.name}@{self._newest(model) if step is None else step}"

    async def train(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        *,
        learning_rate: float | None = None,
        verbose: bool = False,
        **unsupported: Any,
    ) -> Any:
        """One update → the new step and its metrics; the new checkpoint is served from then on.

        Groups whose rewards do not differ teach nothing: without any other the step stays.

        Raises:
            ConfigError: an option of another backend's trainer.
            TrainingError: the update diverged; the model stays at its step.
        """
        if unsupported:
            raise ConfigError(
                f"train({', '.join(sorted(unsupported))}=...): not an option of this trainer; pass"
                " Backend(config=TrainerConfig(...)) instead"
            )
        config = self._config
        if learning_rate is not None:
            config = replace(config, learning_rate=learning_rate)
        async with self._training:
            step = self._newest(model)
            await self._serve(model, step)
            rows = [
                self._row(model, step, f"{group}.{member}", f"{group}", trajectory)
                for group, trajectories in enumerate(trajectory_groups)
                for member, trajectory in enumerate(trajectories)
            ]
            try:
                update = await asyncio.to_thread(
                    update_checkpoint,
                    self._source(model, step),
                    rows,
                    self._checkpoint(model, step + 1),
                    tuning=self._tuning,
                    config=config,
                )
            except WindowNotReadyError as error:
                logger.warning("%s stays at step %d: %s", model.name, step, error)
                return TrainResult(step=step, metrics={TRAINABLE_GROUPS: 0.0})
            await self._serve(model, step + 1)
        return TrainResult(step=step + 1, metrics=to_art(update.report))

    async def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Any,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """Imitate the assistant's messages; yields one record an optimiser step."""
        async with self._training:
            step = self._newest(model)
            await self._serve(model, step)
            rows = [
                self._row(model, step, str(index), "", trajectory, every_reply=True)
                for index, trajectory in enumerate(trajectories)
            ]
            rates = config.learning_rate
            steps = await asyncio.to_thread(
                fine_tune,
                self._source(model, step),
                rows,
                self._checkpoint(model, step + 1),
                tuning=self._tuning,
                learning_rates=iter(rates) if isinstance(rates, list) else itertools.repeat(rates),
                batch_size=SFT_BATCH if config.batch_size == "auto" else config.batch_size,
            )
            await self._serve(model, step + 1)
        for record in _sft_metrics(steps, len(rows)):
            yield record

    async def _get_step(self, model: Any) -> int:
        return self._newest(model)

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        """Delete every other step, and stop serving it."""
        for step in set(self._steps(model)) - set(steps_to_keep):
            self._engine.unload(f"{model.name}@{step}")
            await asyncio.to_thread(shutil.rmtree, self._checkpoint(model, step))

    @asynccontextmanager
    async def adapter_lease(self, model: Any, step: int) -> AsyncIterator[None]:
        """Inside the block the model's inference name stays that of ``step``."""
        await self._serve(model, step)
        token = _pinned.set({**(_pinned.get() or {}), model.name: step})
        try:
            yield
        finally:
            _pinned.reset(token)

    async def close(self) -> None:
        """Stop serving."""
        await self._engine.close()

    async def _serve(self, model: Any, step: int) -> None:
        await self._engine.load(f"{model.name}@{step}", self._source(model, step), step)

    def _row(
        self,
        model: Any,
        step: int,
        trajectory_id: str,
        group: str,
        trajectory: Any,
        *,
        every_reply: bool = False,
    ) -> TrainingRow:
        policy = self._engine.policy(f"{model.name}@{step}")
        return TrainingRow(
            trajectory_id=trajectory_id,
            agent_id="",
            scenario_id=group,
            score=trajectory.reward,
            calls=tuple(calls_of(trajectory, policy.prompt, every_reply=every_reply)),
        )

    def _source(self, model: Any, step: int) -> str:
        """The checkpoint of a step; step 0 is the base model unless an adapter lies there."""
        checkpoint = self._checkpoint(model, step)
        if step == 0 and not checkpoint.exists():
            local = local_directory(model.base_model)
            return str(local.resolve() if local else model.base_model)
        return str(checkpoint)

    def _newest(self, model: Any) -> int:
        return max(self._steps(model), default=0)

    def _steps(self, model: Any) -> list[int]:
        found = (self._directory(model) / "checkpoints").glob("[0-9]*")
        return [int(path.name) for path in found if path.name.isdigit()]

    def _checkpoint(self, model: Any, step: int) -> Path:
        return self._directory(model) / "checkpoints" / f"{step:04d}"

    def _directory(self, model: Any) -> Path:
        return self._path / str(model.project) / "models" / str(model.name)


def _sft_metrics(steps: list[Imitated], trajectories: int) -> Iterator[dict[str, float]]:
    for step in steps:
        yield {
            "loss/train": step.loss,
            "loss/grad_norm": step.grad_norm,
            "loss/learning_rate": step.learning_rate,
            "data/step_num_trajectories": float(trajectories),
            "data/step_trainer_tokens": float(sum(each.tokens for each in steps)),
            GRADIENT_STEPS: float(len(steps)),
        }
