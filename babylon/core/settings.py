"""Settings: one frozen object, read once from the environment, then passed along.

The environment names of the original system keep working (``DATABASE_URL``, ``BASE_MODEL``, …).
Command-line options override by ``model_copy(update=...)``; nothing else reads the environment.
"""

import os
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from babylon.core.errors import ConfigError
from babylon.core.windows import MAX_MINUTES, MIN_MINUTES, RECIPE_PATTERN, check_minutes

MAX_HOURS = 100 * 366 * 24  # a century: what lies further back is a typing error
Engine = Literal["embedded", "vllm"]
Trainer = Literal["torch", "serverless", "art-local"]
RecordingPolicy = Literal["lossless", "available"]
DeploymentStrategy = Literal["replace", "ab", "canary"]
Loss = Literal["ppo_clip", "cispo", "gspo", "dapo", "dr_grpo", "reinforce_is"]
LOSSES_WITH_NORMALISER = ("gspo", "dapo", "dr_grpo")
_LOOPBACK = ("localhost", "127.0.0.1")


class Settings(BaseSettings):
    """Every knob of the system, its unit and its default.

    Everything mutable lies under ``home``; two homes are two independent systems.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        allow_inf_nan=False,
        extra="ignore",
        populate_by_name=True,  # and so also BABYLON_<FIELD>: without a prefix it were HOME, SEED
        env_prefix="BABYLON_",
        env_ignore_empty=True,
    )

    home: Path = Field(Path(".babylon"), validation_alias="BABYLON_HOME")
    database_url: SecretStr | None = Field(None, validation_alias="DATABASE_URL")
    seed: int = Field(0, validation_alias="BABYLON_SEED")

    # windows and data quality
    window_minutes: int = Field(60, validation_alias="WINDOW_MINUTES")
    window_hours: float | None = Field(
        None, ge=MIN_MINUTES / 60, le=MAX_MINUTES / 60, validation_alias="WINDOW_DURATION_HOURS"
    )
    min_agents: int = Field(3, ge=2, validation_alias="MIN_AGENTS_PER_WINDOW")
    min_actions: int = Field(5, ge=1, validation_alias="MIN_ACTIONS_PER_TRAJECTORY")
    reward_threshold: float | None = Field(None, validation_alias="REWARD_THRESHOLD")
    target_trajectories: int = Field(1000, ge=2, validation_alias="TARGET_TRAJECTORIES")
    max_dropout: float = Field(0.3, ge=0, lt=1, validation_alias="MAX_DROPOUT")
    lookback_hours: int = Field(168, ge=1, le=MAX_HOURS, validation_alias="LOOKBACK_HOURS")
    frequency: int = Field(1, ge=1, validation_alias="TRAINING_FREQUENCY_WINDOWS")
    grace_s: float = Field(60.0, ge=0, validation_alias="WINDOW_GRACE_SECONDS")
    # a name under which windows that are done are taken up for what was never trained in them
    recipe: str = Field("", pattern=f"^({RECIPE_PATTERN})?$", validation_alias="RECIPE")
    include_late: bool = Field(False, validation_alias="INCLUDE_LATE")  # with a recipe
    lease_s: float = Field(60.0, gt=0, validation_alias="LEASE_SECONDS")
    gpu_timeout_s: float = Field(3 * 3600.0, gt=0, validation_alias="GPU_TIMEOUT_SECONDS")

    # scoring
    scorer: str = Field("heuristic", validation_alias="SCORER")

    # the judge: a model behind an OpenAI-compatible server, or a checkpoint directory
    judge_model: str | None = Field(None, validation_alias="JUDGE_MODEL")
    judge_base_url: str = Field("https://api.openai.com/v1", validation_alias="JUDGE_BASE_URL")
    openai_api_key: SecretStr | None = Field(None, validation_alias="OPENAI_API_KEY")
    judge_model_path: Path | None = Field(None, validation_alias="JUDGE_MODEL_PATH")
    judge_temperature: float | None = Field(None, ge=0, le=2, validation_alias="JUDGE_TEMPERATURE")
    judge_rubric: str = Field("trading-v1", validation_alias="JUDGE_RUBRIC")
    judge_context_tokens: int = Field(128_000, ge=1000, validation_alias="JUDGE_CONTEXT_TOKENS")
    judge_passes: float = Field(2.5, ge=1, le=20, validation_alias="JUDGE_PASSES")
    judge_concurrency: int = Field(8, ge=1, le=256, validation_alias="JUDGE_CONCURRENCY")
    judge_timeout_s: float = Field(1800.0, gt=0, validation_alias="JUDGE_TIMEOUT_SECONDS")

    # what judging may cost (None: any amount), and what a budget that runs out leads to
    judge_window_tokens: int | None = Field(None, ge=0, validation_alias="JUDGE_WINDOW_TOKENS")
    judge_day_tokens: int | None = Field(None, ge=0, validation_alias="JUDGE_DAY_TOKENS")
    judge_window_usd: float | None = Field(None, ge=0, validation_alias="JUDGE_WINDOW_USD")
    judge_day_usd: float | None = Field(None, ge=0, validation_alias="JUDGE_DAY_USD")
    judge_prompt_usd: float = Field(0.0, ge=0, validation_alias="JUDGE_PROMPT_USD_PER_MTOK")
    judge_completion_usd: float = Field(0.0, ge=0, validation_alias="JUDGE_COMPLETION_USD_PER_MTOK")
    judge_cheaper_model: str | None = Field(None, validation_alias="JUDGE_CHEAPER_MODEL")
    judge_cheaper_prompt_usd: float = Field(
        0.0, ge=0, validation_alias="JUDGE_CHEAPER_PROMPT_USD_PER_MTOK"
    )
    judge_cheaper_completion_usd: float = Field(
        0.0, ge=0, validation_alias="JUDGE_CHEAPER_COMPLETION_USD_PER_MTOK"
    )
    judge_heuristic: bool = Field(True, validation_alias="JUDGE_HEURISTIC_FALLBACK")
    judge_write_back: bool = Field(False, validation_alias="JUDGE_WRITE_BACK")

    # training
    trainer: Trainer = Field("torch", validation_alias="TRAINER")
    base_model: str | None = Field(None, validation_alias="BASE_MODEL")
    model_name: str = Field("babylon", validation_alias="MODEL_NAME")
    tuning: Literal["lora", "full"] = Field("lora", validation_alias="TUNING")
    # which layers are tuned, also in a model that was pretrained on something else
    transfer_layers: Literal["all", "attention", "ffn"] = Field(
        "all", validation_alias="TRANSFER_LAYERS"
    )
    loss: Loss = Field("ppo_clip", validation_alias="LOSS")
    advantage: Literal["leave_one_out", "group_std", "batch_std"] = Field(
        "leave_one_out", validation_alias="ADVANTAGE"
    )
    # what has equal mass in a train step; a loss that is defined by its own refuses another
    call_weight: Literal["trajectory", "token", "trajectory_tokens", "call", "constant"] = Field(
        "trajectory", validation_alias="CALL_WEIGHT"
    )
    learning_rate: float | None = Field(None, gt=0, validation_alias="LEARNING_RATE")
    warmup_steps: int = Field(10, ge=0, validation_alias="WARMUP_STEPS")  # of an optimiser's life
    iterations: int = Field(10, ge=1, validation_alias="ITERATIONS")
    batch_size: int = Field(4, ge=1, validation_alias="BATCH_SIZE")
    accumulation: int = Field(2, ge=1, validation_alias="GRADIENT_ACCUMULATION_STEPS")
    # tokens computed at once: decides memory, never the result; halved when memory is short
    max_tokens: int | None = Field(None, ge=1, validation_alias="MAX_TOKENS")
    kl_penalty: float = Field(0.0, ge=0, validation_alias="KL_PENALTY")
    max_missing_logprobs: float = Field(1.0, ge=0, le=1, validation_alias="MAX_MISSING_LOGPROBS")
    # updates that a call's policy may lie behind; beyond two no importance weight corrects for it
    max_staleness: int = Field(1, ge=0, le=2, validation_alias="MAX_STALENESS")
    # so many to roll back to, as many of the newest and as many of the best: most are the same
    keep_checkpoints: int = Field(3, ge=1, validation_alias="KEEP_CHECKPOINTS")

    # Weights & Biases gets every window once a project is named; offline: files to sync by hand
    wandb_project: str | None = Field(None, validation_alias="WANDB_PROJECT")
    wandb_mode: Literal["offline", "online", "disabled"] = Field(
        "offline", validation_alias="WANDB_MODE"
    )

    # validation of a checkpoint: unseen scenarios at most; fewer where it is clear before
    arena_scenarios: int = Field(2048, ge=32, validation_alias="ARENA_SCENARIOS")
    # the game of these scenarios: that which the fleet plays (`babylon agents spawn --rules`)
    arena_rules: Literal["starter", "hour"] = Field("starter", validation_alias="ARENA_RULES")

    # a checkpoint that answers further from the champion than that never serves, nats a token; an
    # hour's update of the demo moves it by 0.003 to 0.03, its twelve hours together by 0.17
    max_serving_kl: float = Field(0.5, gt=0, validation_alias="MAX_SERVING_KL")

    # serving
    endpoint: str = Field("http://localhost:8000", validation_alias="LOCAL_ENDPOINT")
    engine_port: int = Field(8001, ge=1, le=65535, validation_alias="ENGINE_PORT")
    engine: Engine = Field("embedded", validation_alias="ENGINE")
    # of vLLM: the python of its environment and what its servers get besides, or a running server
    vllm_python: str | None = Field(None, validation_alias="VLLM_PYTHON")
    vllm_args: str = Field("", validation_alias="VLLM_ARGS")
    engine_url: str | None = Field(
        None, pattern=r"^https?://[^/]+/?$", validation_alias="ENGINE_URL"
    )
    # what a full disk does: withhold answers that cannot be recorded, or serve them unrecorded
    recording_policy: RecordingPolicy = Field("lossless", validation_alias="RECORDING")
    # calls of one policy version at a time, and calls that may wait for a place
    max_concurrency: int = Field(256, ge=1, validation_alias="MAX_CONCURRENCY")
    max_queue: int = Field(1024, ge=0, validation_alias="MAX_QUEUE")
    prefect_port: int = Field(4200, ge=1, le=65535, validation_alias="PREFECT_SERVER_API_PORT")
    # an experiment between two policies: finished play of so many agents, and an age, before it is
    # decided by P&L; the age at which the champion stays for want of a decision; and how much less
    # (USD a play) a challenger may surely earn without being rolled back for it
    ab_min_agents: int = Field(40, ge=4, validation_alias="AB_MIN_AGENTS")
    ab_min_hours: float = Field(3.0, ge=0, validation_alias="AB_MIN_HOURS")
    ab_max_hours: float = Field(168.0, gt=0, le=MAX_HOURS, validation_alias="AB_MAX_HOURS")
    ab_tolerated_loss_usd: float = Field(0.0, ge=0, validation_alias="AB_TOLERATED_LOSS_USD")
    # what becomes of a checkpoint that passed: it serves all agents, or is compared on live ones
    # with the champion: at half of them, or at 5 % that later windows make 25 % and 50 %
    deployment_strategy: DeploymentStrategy = Field(
        "replace", validation_alias="DEPLOYMENT_STRATEGY"
    )
    # the admin API: changes of the route over HTTP
    admin_port: int = Field(8002, ge=1, le=65535, validation_alias="ADMIN_PORT")

    @field_validator("window_minutes")
    @classmethod
    def _minutes_tile_a_day(cls, minutes: int) -> int:
        _refuse_minutes(minutes)
        return minutes

    @field_validator("window_hours")
    @classmethod
    def _hours_tile_a_day(cls, hours: float | None) -> float | None:
        if hours is not None:
            _refuse_minutes(_in_minutes(hours))
        return hours

    @field_validator("endpoint")
    @classmethod
    def _endpoint_has_no_path(cls, endpoint: str) -> str:
        url = urlsplit(endpoint)
        if url.scheme == "http" and url.path.strip("/"):
            address = f"{url.scheme}://{url.netloc}"
            raise ValueError(f"the gateway's address has no path: set LOCAL_ENDPOINT={address}")
        return endpoint

    @model_validator(mode="after")
    def _the_loss_takes_the_call_weight(self) -> Self:
        if self.loss in LOSSES_WITH_NORMALISER and self.call_weight != "trajectory":
            raise ValueError(
                f"CALL_WEIGHT={self.call_weight!r} with LOSS={self.loss!r}, which is defined with a"
                " normaliser of its own: unset CALL_WEIGHT, or take LOSS=ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def _an_experiment_can_be_decided_before_it_ends(self) -> Self:
        if self.ab_min_hours >= self.ab_max_hours:
            raise ValueError(
                f"AB_MIN_HOURS={self.ab_min_hours:g} is not below"
                f" AB_MAX_HOURS={self.ab_max_hours:g}: nothing could be promoted in between"
            )
        return self

    @model_validator(mode="after")
    def _a_kl_penalty_has_a_reference(self) -> Self:
        if self.kl_penalty and self.tuning == "full":
            raise ValueError(
                f"KL_PENALTY={self.kl_penalty:g} with TUNING='full', which keeps no copy of the"
                " weights it starts from: set TUNING=lora, or unset KL_PENALTY"
            )
        return self

    @property
    def minutes(self) -> int:
        """Length of a window; in the environment ``WINDOW_DURATION_HOURS`` (the original's name)
        wins over ``WINDOW_MINUTES``."""
        hours = self.window_hours
        return self.window_minutes if hours is None else _in_minutes(hours)

    @property
    def endpoint_port(self) -> int:
        """The port the gateway listens on.

        Raises:
            ConfigError: the endpoint is no http address on this machine's loopback.
        """
        url = urlsplit(self.endpoint)
        try:
            port = url.port or 80
        except ValueError:
            port = 0
        if url.scheme != "http" or url.hostname not in _LOOPBACK or not port:
            raise ConfigError(
                f"LOCAL_ENDPOINT={self.endpoint!r}: the gateway listens on loopback only,"
                " for example http://localhost:8000"
            )
        return port

    def environment(self) -> dict[str, str]:
        """The environment variables from which another process reads the same settings.

        ``None`` is an empty variable, under both names: one that is exported must not stand in.
        """
        environment = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            plain = value.get_secret_value() if isinstance(value, SecretStr) else value
            if plain is None:
                environment[f"BABYLON_{name.upper()}"] = ""
            environment[str(field.validation_alias)] = "" if plain is None else str(plain)
        return environment

    @property
    def artifacts(self) -> Path:
        return self.home / "artifacts"

    @property
    def arena(self) -> Path:
        return self.home / "arena"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def progress(self) -> Path:
        return self.checkpoints / "progress"

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def datasets(self) -> Path:
        return self.home / "datasets"

    @property
    def recording(self) -> Path:
        return self.home / "recording"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def effective_learning_rate(self) -> float:
        """The original's defaults: 1e-6 for full fine-tuning, 1e-5 for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-6 if self.tuning == "full" else 1e-5


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, then ``overrides``; a ``None`` among them counts too:
    ``database_url=None`` is the embedded database whatever the environment says. Window minutes
    that are given here win over ``WINDOW_DURATION_HOURS`` too.

    Raises:
        ConfigError: names each bad variable, its value and what is allowed.
    """
    if unknown := sorted(set(overrides) - set(Settings.model_fields)):
        raise ConfigError(f"unknown setting {', '.join(unknown)}: see babylon/core/settings.py")
    if "window_minutes" in overrides:
        overrides = {"window_hours": None, **overrides}
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        problems = "; ".join(map(_told, error.errors()))
        raise ConfigError(f"bad setting: {problems}") from error
    return settings.model_copy(update={"home": Path(os.path.abspath(settings.home))})


def _told(problem: ErrorDetails) -> str:
    """A problem of one variable starts with it; one of several names them itself."""
    reason = problem["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, problem["loc"]))
    return f"{name}={problem['input']!r}: {reason}" if name else reason


def _in_minutes(hours: float) -> int:
    return round(hours * 60)


def _refuse_minutes(minutes: int) -> None:
    """As a ``ValueError``, to which pydantic adds the variable."""
    try:
        check_minutes(minutes)
    except ConfigError as error:
        raise ValueError(str(error)) from error
