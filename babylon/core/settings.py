"""Settings in groups: read once at the start of a process, then passed along group by group.

A value comes from the first of these places that has one:

1. an override (a command-line option, a Prefect block, a flow parameter),
2. the field's environment variable,
3. ``babylon.toml`` in the home, one table a group,
4. the field's default.

Nothing else reads the environment. ``docs/settings.md`` is generated from this module.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.windows import MAX_MINUTES, MIN_MINUTES, RECIPE_PATTERN, check_minutes

MAX_HOURS = 100 * 366 * 24  # a century: a larger number is a typing error
HOURS = "WINDOW_DURATION_HOURS"  # the original's name; it wins over WINDOW_MINUTES
Engine = Literal["embedded", "vllm"]
Trainer = Literal["torch", "serverless", "art-local"]
RecordingPolicy = Literal["lossless", "available"]
DeploymentStrategy = Literal["replace", "ab", "canary"]
Loss = Literal["ppo_clip", "cispo", "gspo", "dapo", "dr_grpo", "reinforce_is"]
LOSSES_WITH_NORMALISER = ("gspo", "dapo", "dr_grpo")
_LOOPBACK = ("localhost", "127.0.0.1")


def _env(default: Any, variable: str, description: str, **limits: Any) -> Any:
    """A field with its environment variable and its line in docs/settings.md."""
    return Field(
        default, description=description, json_schema_extra={"variable": variable}, **limits
    )


class Group(BaseModel):
    """Settings that are read together."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DatabaseSettings(Group):
    url: SecretStr | None = _env(None, "DATABASE_URL", "Postgres; by default an embedded server.")


class WindowSettings(Group):
    minutes: int = _env(
        60, "WINDOW_MINUTES", f"Length of a window. `{HOURS}` in the environment wins over it."
    )
    min_agents: int = _env(3, "MIN_AGENTS_PER_WINDOW", "Agents that a window needs.", ge=2)
    lookback_hours: int = _env(168, "LOOKBACK_HOURS", "Oldest window to train.", ge=1, le=MAX_HOURS)
    frequency: int = _env(1, "TRAINING_FREQUENCY_WINDOWS", "Train every N windows.", ge=1)
    grace_s: float = _env(60.0, "WINDOW_GRACE_SECONDS", "Wait for late rows.", ge=0)
    lease_s: float = _env(60.0, "LEASE_SECONDS", "Life of a claim without heartbeat.", gt=0)
    recipe: str = _env(
        "",
        "RECIPE",
        "Takes up finished windows for what was never trained.",
        pattern=f"^({RECIPE_PATTERN})?$",
    )
    include_late: bool = _env(False, "INCLUDE_LATE", "With a recipe: late trajectories too.")

    @field_validator("minutes")
    @classmethod
    def _minutes_divide_a_day(cls, minutes: int) -> int:
        _check_minutes(minutes)
        return minutes


class QualitySettings(Group):
    min_actions: int = _env(5, "MIN_ACTIONS_PER_TRAJECTORY", "Actions in a trajectory.", ge=1)
    reward_threshold: float | None = _env(None, "REWARD_THRESHOLD", "Reject what earned less.")
    target_trajectories: int = _env(1000, "TARGET_TRAJECTORIES", "Size after thinning.", ge=2)
    max_dropout: float = _env(0.3, "MAX_DROPOUT", "Largest share to thin out.", ge=0, lt=1)


class ScoringSettings(Group):
    scorer: str = _env(
        "heuristic",
        "SCORER",
        "`heuristic`, `ruler`, `preference`, `regression`, `art-ruler` or"
        " `package.module:function`.",
    )
    write_back: bool = _env(False, "JUDGE_WRITE_BACK", "Write judgments to the game too.")


class JudgeSettings(Group):
    """The judge: a model behind an OpenAI-compatible server, or a checkpoint directory."""

    model: str | None = _env(None, "JUDGE_MODEL", "Model name at the judge's server.")
    base_url: str = _env("https://api.openai.com/v1", "JUDGE_BASE_URL", "Judge's server.")
    api_key: SecretStr | None = _env(None, "OPENAI_API_KEY", "Key for the judge's server.")
    model_path: Path | None = _env(None, "JUDGE_MODEL_PATH", "Checkpoint that judges.")
    temperature: float | None = _env(None, "JUDGE_TEMPERATURE", "Default: server's.", ge=0, le=2)
    rubric: str = _env("trading-v1", "JUDGE_RUBRIC", "Rubric by name, or a path to a file.")
    context_tokens: int = _env(128_000, "JUDGE_CONTEXT_TOKENS", "Context of its model.", ge=1000)
    passes: float = _env(2.5, "JUDGE_PASSES", "Judgments of a trajectory, mean.", ge=1, le=20)
    concurrency: int = _env(8, "JUDGE_CONCURRENCY", "Requests at a time.", ge=1, le=256)
    timeout_s: float = _env(1800.0, "JUDGE_TIMEOUT_SECONDS", "Limit for a window.", gt=0)
    window_tokens: int | None = _env(None, "JUDGE_WINDOW_TOKENS", "Budget of a window.", ge=0)
    day_tokens: int | None = _env(None, "JUDGE_DAY_TOKENS", "Budget of a UTC day.", ge=0)
    window_usd: float | None = _env(None, "JUDGE_WINDOW_USD", "Budget of a window.", ge=0)
    day_usd: float | None = _env(None, "JUDGE_DAY_USD", "Budget of a UTC day.", ge=0)
    prompt_usd: float = _env(0.0, "JUDGE_PROMPT_USD_PER_MTOK", "Price of prompt tokens.", ge=0)
    completion_usd: float = _env(
        0.0, "JUDGE_COMPLETION_USD_PER_MTOK", "Price of a million completion tokens.", ge=0
    )
    cheaper_model: str | None = _env(None, "JUDGE_CHEAPER_MODEL", "Takes over near the budget.")
    cheaper_prompt_usd: float = _env(
        0.0, "JUDGE_CHEAPER_PROMPT_USD_PER_MTOK", "Its price of a million prompt tokens.", ge=0
    )
    cheaper_completion_usd: float = _env(
        0.0,
        "JUDGE_CHEAPER_COMPLETION_USD_PER_MTOK",
        "Its price of a million completion tokens.",
        ge=0,
    )
    heuristic_fallback: bool = _env(True, "JUDGE_HEURISTIC_FALLBACK", "Heuristic past the budget.")


class ModelSettings(Group):
    base: str | None = _env(None, "BASE_MODEL", "Path or hub id; default: a tiny one made here.")
    name: str = _env("babylon", "MODEL_NAME", "Model name that agents ask for.")


class TrainingSettings(Group):
    trainer: Trainer = _env("torch", "TRAINER", "Backend that computes the update.")
    tuning: Literal["lora", "full"] = _env("lora", "TUNING", "LoRA adapter, or all weights.")
    transfer_layers: Literal["all", "attention", "ffn"] = _env(
        "all", "TRANSFER_LAYERS", "Layers that are tuned."
    )
    loss: Loss = _env("ppo_clip", "LOSS", "Loss function.")
    advantage: Literal["leave_one_out", "group_std", "batch_std"] = _env(
        "leave_one_out", "ADVANTAGE", "Baseline and scale of advantages."
    )
    call_weight: Literal["trajectory", "token", "trajectory_tokens", "call", "constant"] = _env(
        "trajectory",
        "CALL_WEIGHT",
        "Unit of equal mass in a train step. Losses with their own normaliser allow only the"
        " default.",
    )
    learning_rate: float | None = _env(None, "LEARNING_RATE", "Default: 1e-5, full 1e-6.", gt=0)
    warmup_steps: int = _env(10, "WARMUP_STEPS", "Warm-up of an optimiser.", ge=0)
    iterations: int = _env(10, "ITERATIONS", "Passes over a window.", ge=1)
    batch_size: int = _env(4, "BATCH_SIZE", "Trajectories a micro-batch.", ge=1)
    accumulation: int = _env(2, "GRADIENT_ACCUMULATION_STEPS", "Micro-batches a train step.", ge=1)
    max_tokens: int | None = _env(
        None,
        "MAX_TOKENS",
        "Tokens computed at once. It decides memory, never the result, and is halved when memory"
        " is short.",
        ge=1,
    )
    kl_penalty: float = _env(0.0, "KL_PENALTY", "KL to the reference; LoRA only.", ge=0)
    max_missing_logprobs: float = _env(
        1.0,
        "MAX_MISSING_LOGPROBS",
        "Largest share of calls without logged logprobs; the trainer recomputes them.",
        ge=0,
        le=1,
    )
    max_staleness: int = _env(
        1,
        "MAX_STALENESS",
        "Updates that a call's policy may lie behind. No importance weight corrects for more than"
        " two.",
        ge=0,
        le=2,
    )

    @model_validator(mode="after")
    def _the_loss_takes_the_call_weight(self) -> Self:
        if self.loss in LOSSES_WITH_NORMALISER and self.call_weight != "trajectory":
            raise ValueError(
                f"CALL_WEIGHT={self.call_weight!r} with LOSS={self.loss!r}, which is defined with a"
                " normaliser of its own: unset CALL_WEIGHT, or take LOSS=ppo_clip"
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
    def effective_learning_rate(self) -> float:
        """The original's defaults: 1e-6 for full fine-tuning, 1e-5 for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-6 if self.tuning == "full" else 1e-5


class EvaluationSettings(Group):
    """Validation of a checkpoint on unseen scenarios."""

    scenarios: int = _env(2048, "ARENA_SCENARIOS", "Largest gate; it stops when clear.", ge=32)
    rules: Literal["starter", "hour"] = _env("starter", "ARENA_RULES", "Game that the fleet plays.")


class ServingSettings(Group):
    endpoint: str = _env("http://localhost:8000", "LOCAL_ENDPOINT", "Gateway, on loopback.")
    engine_port: int = _env(8001, "ENGINE_PORT", "Port of the engine.", ge=1, le=65535)
    admin_port: int = _env(8002, "ADMIN_PORT", "Port of the admin API.", ge=1, le=65535)
    engine: Engine = _env("embedded", "ENGINE", "Engine that `babylon up` starts.")
    vllm_python: str | None = _env(None, "VLLM_PYTHON", "Python that has vLLM.")
    vllm_args: str = _env("", "VLLM_ARGS", "Further arguments of vLLM servers.")
    engine_url: str | None = _env(
        None,
        "ENGINE_URL",
        "A running vLLM server to use instead of starting one.",
        pattern=r"^https?://[^/]+/?$",
    )
    recording: RecordingPolicy = _env(
        "lossless",
        "RECORDING",
        "When the disk is full: withhold answers (`lossless`) or serve them unrecorded"
        " (`available`).",
    )
    max_concurrency: int = _env(256, "MAX_CONCURRENCY", "Calls of a policy at a time.", ge=1)
    max_queue: int = _env(1024, "MAX_QUEUE", "Calls that may wait for a place.", ge=0)

    @field_validator("endpoint")
    @classmethod
    def _endpoint_has_no_path(cls, endpoint: str) -> str:
        url = urlsplit(endpoint)
        if url.scheme == "http" and url.path.strip("/"):
            address = f"{url.scheme}://{url.netloc}"
            raise ValueError(f"the gateway's address has no path: set LOCAL_ENDPOINT={address}")
        return endpoint

    @property
    def endpoint_port(self) -> int:
        """The port that the gateway listens on.

        Raises:
            ConfigError: The endpoint is not an http address on this machine's loopback.
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


class DeploymentSettings(Group):
    strategy: DeploymentStrategy = _env(
        "replace",
        "DEPLOYMENT_STRATEGY",
        "A checkpoint that passed serves all agents (`replace`), half of them (`ab`), or 5 %, then"
        " 25 %, then 50 % of them (`canary`).",
    )
    max_serving_kl: float = _env(
        # An hour of the demo moves a policy by 0.003 to 0.03, its twelve hours together by 0.17.
        0.5,
        "MAX_SERVING_KL",
        "Largest KL from the champion, in nats a token, that may serve.",
        gt=0,
    )
    keep_checkpoints: int = _env(
        3,
        "KEEP_CHECKPOINTS",
        "Checkpoints kept of each kind: rollback targets, newest, best. The kinds overlap.",
        ge=1,
    )


class ExperimentSettings(Group):
    """An experiment between two policies on live agents (`ab`, `canary`)."""

    min_agents: int = _env(40, "AB_MIN_AGENTS", "Agents before a decision.", ge=4)
    min_hours: float = _env(3.0, "AB_MIN_HOURS", "Age before a decision.", ge=0)
    max_hours: float = _env(168.0, "AB_MAX_HOURS", "The champion stays then.", gt=0, le=MAX_HOURS)
    tolerated_loss_usd: float = _env(
        0.0,
        "AB_TOLERATED_LOSS_USD",
        "Loss a play that a challenger may surely cause without a rollback.",
        ge=0,
    )

    @model_validator(mode="after")
    def _can_be_decided_before_it_ends(self) -> Self:
        if self.min_hours >= self.max_hours:
            raise ValueError(
                f"AB_MIN_HOURS={self.min_hours:g} is not below AB_MAX_HOURS={self.max_hours:g}:"
                " no decision could be made in between"
            )
        return self


class TrackingSettings(Group):
    """Weights & Biases."""

    project: str | None = _env(None, "WANDB_PROJECT", "Without one, nothing is reported.")
    mode: Literal["offline", "online", "disabled"] = _env(
        "offline", "WANDB_MODE", "Offline runs are files to sync by hand."
    )


class PrefectSettings(Group):
    port: int = _env(4200, "PREFECT_SERVER_API_PORT", "Port of its server.", ge=1, le=65535)
    gpu_timeout_s: float = _env(3 * 3600.0, "GPU_TIMEOUT_SECONDS", "Limit for GPU stages.", gt=0)


class Settings(BaseModel):
    """All settings of a process, in groups."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Annotated[Home, BeforeValidator(Home.at)] = _env(
        ".babylon", "BABYLON_HOME", "Directory of everything mutable.", validate_default=True
    )
    seed: int = _env(0, "BABYLON_SEED", "Seed of thinning, training and simulated play.")
    database: DatabaseSettings = DatabaseSettings()
    windows: WindowSettings = WindowSettings()
    quality: QualitySettings = QualitySettings()
    scoring: ScoringSettings = ScoringSettings()
    judge: JudgeSettings = JudgeSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    serving: ServingSettings = ServingSettings()
    deployment: DeploymentSettings = DeploymentSettings()
    experiment: ExperimentSettings = ExperimentSettings()
    tracking: TrackingSettings = TrackingSettings()
    prefect: PrefectSettings = PrefectSettings()

    def replace(self, **overrides: Any) -> Self:
        """A validated copy: ``settings.replace(seed=1, windows={"minutes": 15})``."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in overrides.items():
            group = isinstance(value, Mapping) and isinstance(values.get(name), Group)
            values[name] = {**dict(values[name]), **value} if group else value
        return type(self).model_validate(values)

    def environment(self) -> dict[str, str]:
        """The environment variables from which another process reads the same settings.

        ``None`` is an empty variable, so that an exported one does not take its place.
        """
        environment = {HOURS: ""}
        for group, name, field in fields():
            value = getattr(getattr(self, group) if group else self, name)
            if isinstance(value, SecretStr):
                value = value.get_secret_value()
            elif isinstance(value, Home):
                value = value.root
            environment[variable_of(field)] = "" if value is None else str(value)
        return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Settings, and the place that each value comes from.

    ``sources`` maps ``"windows.minutes"`` to ``"option"``, ``"environment"`` or the path of the
    file; a name that is absent has its default.
    """

    settings: Settings
    sources: Mapping[str, str]


def load_settings(**overrides: Any) -> Settings:
    """Load settings; ``overrides`` by group: ``load_settings(seed=1, windows={"minutes": 15})``.

    An override of ``None`` counts: ``database={"url": None}`` is the embedded database even when
    ``DATABASE_URL`` is set.

    Raises:
        ConfigError: Names each bad variable, its value and the allowed ones.
    """
    return load_with_sources(**overrides).settings


def load_with_sources(**overrides: Any) -> LoadedSettings:
    """Like ``load_settings``, with the source of each value."""
    given = _flatten(overrides, "an override")
    environment = _from_environment()
    home = Home.at(given.get("home", environment.get("home", ".babylon")))
    in_file = _from_file(home.settings_file)
    sources = {
        **dict.fromkeys(in_file, str(home.settings_file)),
        **dict.fromkeys(environment, "environment"),
        **dict.fromkeys(given, "option"),
    }
    values: dict[str, Any] = {}
    for path, value in {**in_file, **environment, **given}.items():
        group, _, name = path.rpartition(".")
        (values.setdefault(group, {}) if group else values)[name] = value
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise ConfigError(f"bad setting: {problems}") from error
    return LoadedSettings(settings=settings, sources=sources)


def merge_overrides(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge overrides group by group; later layers win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            group = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **value} if group else value
    return merged


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Group (empty for a top-level field), name and field of every setting, in order."""
    for name, field in Settings.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, Group):
            for inner, inner_field in group.model_fields.items():
                yield name, inner, inner_field
        else:
            yield "", name, field


def variable_of(field: FieldInfo) -> str:
    """The environment variable of a setting."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["variable"])


def _paths() -> dict[str, FieldInfo]:
    return {f"{group}.{name}" if group else name: field for group, name, field in fields()}


def _flatten(nested: Mapping[str, Any], place: str) -> dict[str, Any]:
    """``{"windows": {"minutes": 15}}`` as ``{"windows.minutes": 15}``."""
    known = _paths()
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and name not in known:
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    if unknown := sorted(set(flat) - set(known)):
        raise ConfigError(f"unknown setting {', '.join(unknown)} in {place}: see docs/settings.md")
    return flat


def _from_environment() -> dict[str, Any]:
    """The variables that are set and not empty."""
    values: dict[str, Any] = {
        path: value
        for path, field in _paths().items()
        if (value := os.environ.get(variable_of(field)))
    }
    if hours := os.environ.get(HOURS):
        values["windows.minutes"] = _minutes_of(hours)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}): make it readable") from error
    try:
        nested = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML ({error}): correct it") from error
    if "home" in nested:
        raise ConfigError(f"{path} sets home: a home does not name itself, set BABYLON_HOME")
    return _flatten(nested, str(path))


def _problem(problem: ErrorDetails) -> str:
    """One problem as ``VARIABLE='value': reason``; one between several variables names them."""
    reason = problem["msg"].removeprefix("Value error, ")
    path = ".".join(map(str, problem["loc"]))
    field = _paths().get(path)
    if field is None:
        return reason if path in Settings.model_fields else f"{path}: {reason}"
    return f"{variable_of(field)}={problem['input']!r}: {reason}"


def _minutes_of(hours: str) -> int:
    try:
        number = float(hours)
        if not MIN_MINUTES / 60 <= number <= MAX_MINUTES / 60:
            raise ValueError(
                f"give hours greater than or equal to {MIN_MINUTES / 60:g} and less than or equal"
                f" to {MAX_MINUTES / 60:g}"
            )
        minutes = round(number * 60)
        check_minutes(minutes)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"bad setting: {HOURS}={hours!r}: {error}") from error
    return minutes


def _check_minutes(minutes: int) -> None:
    """Raise ``ValueError``, to which pydantic adds the variable."""
    try:
        check_minutes(minutes)
    except ConfigError as error:
        raise ValueError(str(error)) from error
