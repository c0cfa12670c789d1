"""Our trainer, checkpoints and engine as a backend of ART (openpipe-art's ``art.Backend``).

A script written for ART's ``LocalBackend`` can register its model with this backend instead, and
then also runs on a CPU. Checkpoints have the same paths as that backend's:
``<path>/<project>/models/<name>/checkpoints/<step>``. Step 0 is the base model, or the adapter in
that directory.

Answers of ``model.openai_client()`` carry token ids and logprobs, so replies are trained exactly as
they were sampled, tool calls too. As in ART, the sampling temperature is assumed to be 1. Replies
that a grammar constrained (a forced tool, JSON) are not trained. Options of ART's own trainers that
ours does not have raise an error.
"""

import asyncio
import itertools
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol, cast

from openai.types.chat.chat_completion import Choice

from babylon.core.errors import ConfigError, TrainingError, WindowNotReadyError
from babylon.core.llm_calls import JsonObject, Message
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.checkpoint_files import local_directory
from babylon.serving.engine.embedded import EmbeddedEngine
from babylon.training.backends.art_client import TrainResult
from babylon.training.grpo.config import TrainerConfig
from babylon.training.sft import SftStep, fine_tune
from babylon.training.trainable import Tuning
from babylon.training.update import update_checkpoint
from babylon.training.update_result import GRADIENT_STEPS, TRAINABLE_GROUPS, to_art

MessageDict = Mapping[str, object]


class ArtModel(Protocol):
    """An ``art.Model`` or ``art.TrainableModel``."""

    name: str
    project: str
    base_model: str
    base_path: str
    trainable: bool
    inference_model_name: str | None


class ArtHistory(Protocol):
    """An ``art.History``: a chat, in which each choice is a reply of the policy."""

    messages_and_choices: Sequence[MessageDict | Choice]
    tools: Sequence[JsonObject] | None


class ArtTrajectory(ArtHistory, Protocol):
    """An ``art.Trajectory``: a history, further histories, and their reward."""

    additional_histories: Sequence[ArtHistory]
    reward: float


class SftConfig(Protocol):
    """An ``art.TrainSFTConfig``."""

    learning_rate: float | list[float]  # of all steps, or of each
    batch_size: int | Literal["auto"]


Prompt = Callable[[list[Message], list[JsonObject]], list[int]]
"""Messages and tools → prompt tokens."""

logger = logging.getLogger(__name__)
SFT_BATCH = 2  # ART's default, trajectories
_pinned: ContextVar[dict[str, int] | None] = ContextVar("babylon_pinned_steps", default=None)


class Backend:
    """An ``art.Backend``.

    Args:
        path: directory of models and their checkpoints.
        config: options of our trainer. A ``learning_rate`` given to ``train`` overrides this one.
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
        self._leases: Counter[str] = Counter()  # of served names

    async def register(self, model: ArtModel) -> None:
        """Make the model's directory, and let ART write its logs there."""
        model.base_path = str(self._path)
        self._directory(model).mkdir(parents=True, exist_ok=True)

    async def _prepare_backend_for_training(
        self, model: ArtModel, config: Mapping[str, object] | None = None
    ) -> tuple[str, str]:
        """Serve the model's newest checkpoint, and return (base URL, API key).

        Raises:
            ConfigError: ``config`` has options of a vLLM server, which this engine does not have.
            ModelError: the checkpoint does not load.
        """
        if config:
            raise ConfigError(f"server options {dict(config)}: the embedded engine has none")
        url = await self._engine.start()
        await self._serve(model, self._newest(model))
        return url, "embedded"

    def _model_inference_name(self, model: ArtModel, step: int | None = None) -> str:
        """``name@step``. The default step is the leased one, else the newest."""
        if not model.trainable:
            return str(model.inference_model_name or model.name)
        if step is None:
            step = (_pinned.get() or {}).get(model.name)
        return f"{model.name}@{self._newest(model) if step is None else step}"

    async def train(
        self,
        model: ArtModel,
        trajectory_groups: Iterable[Iterable[ArtTrajectory]],
        *,
        learning_rate: float | None = None,
        verbose: bool = False,
        **unsupported: object,
    ) -> TrainResult:
        """Run one update, serve the new checkpoint, and return the new step and its metrics.

        Groups whose rewards do not differ are dropped. If no other group is left, the step does not
        change.

        Raises:
            ConfigError: an option of another backend's trainer.
            TrainingError: the update diverged; the step does not change.
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
            # The served policy renders the prompts, so that trainer and engine see the same tokens.
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
            await self._serve_next(model, step + 1)
        return TrainResult(step=step + 1, metrics=to_art(update.report))

    async def _train_sft(
        self,
        model: ArtModel,
        trajectories: Iterable[ArtTrajectory],
        config: SftConfig,
        dev_config: object,
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
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
            await self._serve_next(model, step + 1)
        for record in _sft_metrics(steps, len(rows)):
            yield record

    async def _get_step(self, model: ArtModel) -> int:
        return self._newest(model)

    async def _delete_checkpoint_files(self, model: ArtModel, steps_to_keep: list[int]) -> None:
        for step in set(self._steps(model)) - set(steps_to_keep):
            self._engine.unload(f"{model.name}@{step}")
            await asyncio.to_thread(shutil.rmtree, self._checkpoint(model, step))

    @asynccontextmanager
    async def adapter_lease(self, model: ArtModel, step: int) -> AsyncIterator[None]:
        """Context in which the model's inference name is that of ``step``."""
        name = f"{model.name}@{step}"
        self._leases[name] += 1  # before it is loaded, for no update to unload it
        token = _pinned.set({**(_pinned.get() or {}), model.name: step})
        try:
            await self._serve(model, step)
            yield
        finally:
            _pinned.reset(token)
            self._leases[name] -= 1

    async def close(self) -> None:
        """Stop serving."""
        await self._engine.close()

    async def _serve(self, model: ArtModel, step: int) -> None:
        await self._engine.load(f"{model.name}@{step}", self._source(model, step), step)

    async def _serve_next(self, model: ArtModel, step: int) -> None:
        """Serve a new step. Earlier ones that nobody leased leave memory."""
        await self._serve(model, step)
        for earlier in {0, *self._steps(model)} - {step}:
            if not self._leases[name := f"{model.name}@{earlier}"]:
                self._engine.unload(name)

    def _row(
        self,
        model: ArtModel,
        step: int,
        trajectory_id: str,
        group: str,
        trajectory: ArtTrajectory,
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

    def _source(self, model: ArtModel, step: int) -> str:
        """The checkpoint of a step. Step 0 is the base model, unless it has a directory."""
        checkpoint = self._checkpoint(model, step)
        if step == 0 and not checkpoint.exists():
            local = local_directory(model.base_model)
            return str(local.resolve() if local else model.base_model)
        return str(checkpoint)

    def _newest(self, model: ArtModel) -> int:
        return max(self._steps(model), default=0)

    def _steps(self, model: ArtModel) -> list[int]:
        found = (self._directory(model) / "checkpoints").glob("[0-9]*")
        return [int(path.name) for path in found if path.name.isdigit()]

    def _checkpoint(self, model: ArtModel, step: int) -> Path:
        return self._directory(model) / "checkpoints" / f"{step:04d}"

    def _directory(self, model: ArtModel) -> Path:
        return self._path / str(model.project) / "models" / str(model.name)


def _sft_metrics(steps: list[SftStep], trajectories: int) -> Iterator[dict[str, float]]:
    for step in steps:
        yield {
            "loss/train": step.loss,
            "loss/grad_norm": step.grad_norm,
            "loss/learning_rate": step.learning_rate,
            "data/step_num_trajectories": float(trajectories),
            "data/step_trainer_tokens": float(sum(each.tokens for each in steps)),
            GRADIENT_STEPS: float(len(steps)),
        }


def calls_of(trajectory: ArtTrajectory, prompt: Prompt, *, every_reply: bool) -> Iterator[Call]:
    """The calls of a trajectory and of its additional histories.

    A choice with token ids and logprobs becomes a call with exact tokens. Any other choice becomes
    text, which the trainer tokenises if no tools are involved. Assistant messages that are not
    choices were not sampled from the policy; they become calls only with ``every_reply``, for
    supervised fine-tuning.

    Raises:
        TrainingError: a message is not text, a history has tool calls but no tools, or
            ``every_reply`` meets tools.
    """
    for step, history in enumerate(chain([trajectory], trajectory.additional_histories)):
        tools = list(history.tools or ())
        messages: list[Message] = []
        for item in history.messages_and_choices:
            message = item.message.to_dict() if isinstance(item, Choice) else item
            called = message.get("tool_calls") or ()
            if every_reply and (tools or called):
                raise TrainingError(
                    "a trajectory with tools: fine-tuning takes plain chats; train() takes tools"
                )
            if called and not tools:  # the prompt would lack them
                raise TrainingError("a trajectory with tool calls and no tools: give it its tools")
            plain = _plain(message)
            if plain["role"] == "assistant" and (every_reply or isinstance(item, Choice)):
                exact = _exact_tokens(item) if isinstance(item, Choice) else None
                token_ids, logprobs = exact if exact else (None, None)
                yield Call(
                    step=step,
                    messages=tuple(messages),
                    response=str(plain["content"]),
                    tools=tuple(tools),
                    tool_calls=tuple(cast(list[JsonObject], called)),
                    prompt_token_ids=tuple(prompt(messages, tools)) if exact else None,
                    completion_token_ids=token_ids,
                    logprobs=logprobs,
                    untrainable=_constraint(item),
                )
            # Sampled or not, the message is in the prompts of the calls after it.
            messages.append(plain)


def _plain(message: MessageDict) -> Message:
    kept = {
        name: message[name] for name in ("tool_calls", "tool_call_id", "name") if name in message
    }
    return {"role": str(message["role"]), "content": _text(message), **kept}


def _constraint(item: MessageDict | Choice) -> str | None:
    """Return the engine's reason why a reply was not sampled from the policy alone."""
    constrained = isinstance(item, Choice) and (item.model_extra or {}).get("constrained")
    return "a grammar constrained it" if constrained else None


def _text(message: MessageDict) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        other = next(p for p, text in zip(parts, texts, strict=True) if not isinstance(text, str))
        kind = other.get("type") if isinstance(other, dict) else type(other).__name__
        raise TrainingError(f"{message['role']} message with a part of type {kind}: text is needed")
    return "".join(found)


def _exact_tokens(choice: Choice) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """(token ids, logprobs ``[T]``) as sampled, or None if either is unknown.

    Ids stand in ``token_ids`` beside the logprobs, or as vLLM's ``token_id:N`` in place of texts.
    """
    scored = choice.logprobs.content if choice.logprobs else None
    if not scored:
        return None
    token_ids: Sequence[int] | None = (choice.model_extra or {}).get("token_ids")
    if token_ids is None and all(token.token.startswith("token_id:") for token in scored):
        token_ids = [int(token.token.removeprefix("token_id:")) for token in scored]
    if token_ids is None or len(token_ids) != len(scored):
        return None
    return tuple(token_ids), tuple(token.logprob for token in scored)
