"""Settings in groups: read once at the start of a process, then passed along group by group.

A value comes from the first of these places that has one:

1. an override (a command-line option, a Prefect block, a flow parameter),
2. the field's environment variable,
3. ``babylon.toml`` in the home, one table a group,
4. the field's default.

Nothing else reads the environment. ``docs/settings.md`` is generated from this module.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.learning_settings import PopulationSettings, PreferenceSettings, TrainingSettings
from babylon.core.settings_group import Group
from babylon.core.settings_group import env as _env
from babylon.core.windows import RECIPE_PATTERN, check_minutes

MAX_HOURS = 100 * 366 * 24  # a century: a larger number is a typing error
HOURS = "WINDOW_DURATION_HOURS"  # the original's name; it wins over WINDOW_MINUTES
COMPLETE = "BABYLON_SETTINGS"  # set where the environment holds all settings: no file is read
VLLM_LORA_RANK = 16  # largest of an adapter on the servers that ENGINE=vllm starts
Engine = Literal["embedded", "vllm", "remote"]
RecordingPolicy = Literal["lossless", "available"]
DeploymentStrategy = Literal["replace", "ab", "canary"]
_LOOPBACK = ("localhost", "127.0.0.1")


class DatabaseSettings(Group):
    url: SecretStr | None = _env(None, "DATABASE_URL")
    """Address of a Postgres database. Without one, an embedded server runs in the home."""
    game_url: SecretStr | None = _env(None, "GAME_DATABASE_URL")
    """Address from which the game's tables are read: a replica, or another database. The same
    database by default."""


class WindowSettings(Group):
    minutes: int = _env(60, "WINDOW_MINUTES")
    """Length of a window in minutes. `WINDOW_DURATION_HOURS` in the environment wins over it."""
    min_agents: int = _env(3, "MIN_AGENTS_PER_WINDOW", ge=2)
    """Smallest number of eligible agents with which a window is trained."""
    lookback_hours: int = _env(168, "LOOKBACK_HOURS", ge=1, le=MAX_HOURS)
    """Hours from now back to the oldest window that is searched for work."""
    frequency: int = _env(1, "TRAINING_FREQUENCY_WINDOWS", ge=1, le=MAX_HOURS)
    """Number of windows that close before `train --mode continuous` looks for work again."""
    grace_s: float = _env(60.0, "WINDOW_GRACE_SECONDS", ge=0, le=MAX_HOURS)
    """Seconds to wait for late rows after the end of a window."""
    # Longer than an hourly job of the game needs, shorter than a window: play that is trained later
    # than in the next window is staler than MAX_STALENESS allows.
    outcomes_wait_s: float = _env(1800.0, "OUTCOMES_WAIT_SECONDS", ge=0, le=MAX_HOURS)
    """Longest wait in seconds for market outcomes after a window's end; at most its own length."""
    freshness_hours: float = _env(2.0, "FRESHNESS_HOURS", gt=0, le=MAX_HOURS)
    """Hours without play after which an alarm is raised; at least two windows."""
    lease_s: float = _env(60.0, "LEASE_SECONDS", gt=0, le=MAX_HOURS)
    """Seconds after which another run may take over a window whose run shows no sign of life."""
    retention_days: int = _env(30, "RETENTION_DAYS", ge=0, le=MAX_HOURS // 24)
    """Days after which play that is not in use is removed. 0 keeps it."""
    recipe: str = _env("", "RECIPE", pattern=f"^({RECIPE_PATTERN})?$")
    """Name of a recipe. It takes up finished windows, and trains what they never trained."""
    include_late: bool = _env(False, "INCLUDE_LATE")
    """With a recipe, late trajectories are trained too."""

    @field_validator("minutes")
    @classmethod
    def _minutes_divide_a_day(cls, minutes: int) -> int:
        _check_minutes(minutes)
        return minutes


class QualitySettings(Group):
    min_actions: int = _env(5, "MIN_ACTIONS_PER_TRAJECTORY", ge=1)
    """Number of steps that a trajectory needs."""
    reward_threshold: float | None = _env(None, "REWARD_THRESHOLD")
    """Trajectories whose rewards sum to less are rejected. Unset: none is."""
    target_trajectories: int = _env(1000, "TARGET_TRAJECTORIES", ge=2)
    """Number of trajectories to which a larger window is thinned before it is scored."""
    max_dropout: float = _env(0.3, "MAX_DROPOUT", ge=0, lt=1)
    """Largest share of a window's trajectories that thinning may remove."""


class ScoringSettings(Group):
    scorer: str = _env("heuristic", "SCORER")
    """Scorer of trajectories: a name below, or a function as `package.module:function`.
    Names: `heuristic`, `ruler`, `art-ruler`, `feedback`.
    """
    hold_on_hacking: bool = _env(True, "HOLD_ON_HACKING")
    """Training is held when a window looks like reward hacking."""
    write_back: bool = _env(False, "JUDGE_WRITE_BACK")
    """Scores and reasons are also written to the game's tables, if Babylon made them."""


class JudgeSettings(Group):
    """The judge: a model behind an OpenAI-compatible server, or a checkpoint directory."""

    model: str | None = _env(None, "JUDGE_MODEL")
    """Name of the judge's model at its server."""
    base_url: str = _env("https://api.openai.com/v1", "JUDGE_BASE_URL")
    """Address of the judge's OpenAI-compatible server."""
    api_key: SecretStr | None = _env(None, "OPENAI_API_KEY")
    """API key for the judge's server."""
    model_path: Path | None = _env(None, "JUDGE_MODEL_PATH")
    """Checkpoint directory that judges on this machine, instead of a server."""
    panel: str = _env("", "JUDGE_PANEL")
    """Other judges beside this one, separated by commas: models of the same server, `MODEL@URL` of
    another server, or directories of checkpoints. A model's prices may follow, in US dollars per
    million prompt and completion tokens: `gpt-5-nano=0.05/0.4`.
    """
    panel_api_key: SecretStr | None = _env(None, "JUDGE_PANEL_API_KEY")
    """API key for the servers of the panel's other judges."""
    temperature: float | None = _env(None, "JUDGE_TEMPERATURE", ge=0, le=2)
    """Sampling temperature of the judge. Unset: the server's own default."""
    rubric: str = _env("trading-v1", "JUDGE_RUBRIC")
    """Name of a built-in rubric, or path of a rubric file."""
    context_tokens: int = _env(128_000, "JUDGE_CONTEXT_TOKENS", ge=1000)
    """Context length of the judge's model in tokens."""
    passes: float = _env(5.0, "JUDGE_PASSES", ge=1, le=20)
    """How often the judge reads a trajectory at most, on average over a window."""
    evidence: float = _env(20.0, "JUDGE_EVIDENCE", ge=0)
    """Evidence (an e-value) that a judge needs before its scores train. 0: no proof is asked."""
    concurrency: int = _env(8, "JUDGE_CONCURRENCY", ge=1, le=256)
    """Number of requests that are sent to the judge at a time."""
    timeout_s: float = _env(1800.0, "JUDGE_TIMEOUT_SECONDS", gt=0)
    """Seconds within which each judge must judge a window."""
    request_timeout_s: float = _env(120.0, "JUDGE_REQUEST_TIMEOUT_SECONDS", gt=0)
    """Seconds within which the judge must answer one request."""
    retries: int = _env(6, "JUDGE_RETRIES", ge=0, le=100)
    """Number of times that a request is sent again after a failure that may pass."""
    requests_per_minute: int | None = _env(None, "JUDGE_REQUESTS_PER_MINUTE", ge=1)
    """The provider's limit of requests in a minute. Unset: no limit."""
    tokens_per_minute: int | None = _env(None, "JUDGE_TOKENS_PER_MINUTE", ge=1)
    """The provider's limit of prompt tokens in a minute. Unset: no limit."""
    reasoning_tokens: int = _env(0, "JUDGE_REASONING_TOKENS", ge=0)
    """Tokens that a reasoning model may think in each reply, beside the answer itself."""
    window_tokens: int | None = _env(None, "JUDGE_WINDOW_TOKENS", ge=0)
    """Tokens that the judge may use for a window. Unset: no limit."""
    day_tokens: int | None = _env(None, "JUDGE_DAY_TOKENS", ge=0)
    """Tokens that the judge may use in a UTC day. Unset: no limit."""
    window_usd: float | None = _env(None, "JUDGE_WINDOW_USD", ge=0)
    """US dollars that the judge may cost for a window. Unset: no limit."""
    day_usd: float | None = _env(None, "JUDGE_DAY_USD", ge=0)
    """US dollars that the judge may cost in a UTC day. Unset: no limit."""
    prompt_usd: float = _env(0.0, "JUDGE_PROMPT_USD_PER_MTOK", ge=0)
    """Price of a million prompt tokens of the judge in US dollars."""
    completion_usd: float = _env(0.0, "JUDGE_COMPLETION_USD_PER_MTOK", ge=0)
    """Price of a million completion tokens of the judge in US dollars."""
    cheaper_model: str | None = _env(None, "JUDGE_CHEAPER_MODEL")
    """Model at the judge's server that judges in one pass when the budget is too small."""
    cheaper_prompt_usd: float = _env(0.0, "JUDGE_CHEAPER_PROMPT_USD_PER_MTOK", ge=0)
    """Price of a million prompt tokens of the cheaper model in US dollars."""
    cheaper_completion_usd: float = _env(0.0, "JUDGE_CHEAPER_COMPLETION_USD_PER_MTOK", ge=0)
    """Price of a million completion tokens of the cheaper model in US dollars."""
    heuristic_fallback: bool = _env(True, "JUDGE_HEURISTIC_FALLBACK")
    """The heuristic scores a window for which the judge's budget is spent."""


class ModelSettings(Group):
    base: str | None = _env(None, "BASE_MODEL")
    """Path or Hugging Face id of the model to start from. Unset: a tiny model made here, which
    knows the small game; `embedded:hour` makes one that knows the full hour.
    """
    name: str = _env("babylon", "MODEL_NAME")
    """Model name that agents send in their requests."""


class EvaluationSettings(Group):
    """Validation of a checkpoint on unseen scenarios."""

    scenarios: int = _env(2048, "ARENA_SCENARIOS", ge=32)
    """Number of games after which validation ends. It ends earlier once the result is clear."""
    rules: Literal["fleet", "starter", "hour"] = _env("fleet", "ARENA_RULES")
    """Worlds of validation: those that the fleet plays, as its rows show them, or a preset's."""
    evaluator: str | None = _env(None, "EVALUATOR", pattern=r"^[\w.]+:\w+$")
    """A task of your own that validation plays instead, as `package.module:name`."""


class ServingSettings(Group):
    endpoint: str = _env("http://localhost:8000", "LOCAL_ENDPOINT")
    """Address of the gateway, on this machine's loopback."""
    listen: str | None = _env(None, "GATEWAY_LISTEN", pattern=r"^https?://[^/:@]+:\d+/?$")
    """Address for other machines: `https://0.0.0.0:8443`, `http://` behind a proxy. Unset: none."""
    public_url: str | None = _env(None, "GATEWAY_PUBLIC_URL", pattern=r"^https?://[^/?#]+/?$")
    """Address by which agents on other machines reach the gateway, such as that of a proxy. It is
    told to people and in `/openapi.json`; this machine's programs use `LOCAL_ENDPOINT`."""
    tls_certificate: Path | None = _env(None, "TLS_CERTIFICATE")
    """PEM file with the certificate (and its chain) of an `https` address in `GATEWAY_LISTEN`."""
    tls_key: Path | None = _env(None, "TLS_KEY")
    """PEM file with the private key of that certificate."""
    workers: int = _env(1, "GATEWAY_WORKERS", ge=1, le=64)
    """Number of gateway processes, which share the gateway's addresses (on Linux)."""
    engine_port: int = _env(8001, "ENGINE_PORT", ge=1, le=65535)
    """Port of the engine on loopback."""
    admin_port: int = _env(8002, "ADMIN_PORT", ge=1, le=65535)
    """Port of the admin API on loopback."""
    engine: Engine = _env("embedded", "ENGINE")
    """Engine that `babylon serve` and `babylon up` start."""
    vllm_python: str | None = _env(None, "VLLM_PYTHON")
    """Path of the Python that has vLLM installed."""
    vllm_args: str = _env("", "VLLM_ARGS")
    """Further command-line arguments of the vLLM server."""
    vllm_turns: bool = _env(False, "VLLM_TURNS")
    """Full models of one shape take turns on one vLLM server, in the memory of one model."""
    engine_url: str | None = _env(
        None, "ENGINE_URL", pattern=r"^https?://[^/,]+/?(,https?://[^/,]+/?)*$"
    )
    """Address of a running vLLM server, which is used instead of starting one. With
    `ENGINE=remote`: addresses of running engines (`ENGINE_LISTEN`), separated by commas."""
    engine_listen: str | None = _env(None, "ENGINE_LISTEN", pattern=r"^http://[^/:@]+:\d+/?$")
    """Address at which `babylon engine` serves gateways on other machines, in a private network:
    `http://0.0.0.0:8001`, instead of `ENGINE_PORT`. All of them need the `engine.key` of its home.
    Unset: loopback."""
    address: str | None = _env(None, "GATEWAY_ADDRESS", pattern=r"^https?://[^/?#]+/?$")
    """Address of this one gateway, and no proxy, for other machines. Unset: `GATEWAY_LISTEN`'s."""
    recording: RecordingPolicy = _env("lossless", "RECORDING")
    """On a full disk, `lossless` withholds answers and `available` sends them unrecorded."""
    max_concurrency: int = _env(256, "MAX_CONCURRENCY", ge=1)
    """Number of calls to one policy that run at a time, in each gateway process. One of `n`
    answers counts `n` times."""
    max_queue: int = _env(1024, "MAX_QUEUE", ge=0)
    """Number of calls that may wait for their turn, in each gateway process. Further ones are
    refused."""
    recognise_sessions: bool = _env(True, "RECOGNISE_SESSIONS")
    """Chat calls that name no trajectory belong together if their messages continue each other."""
    otlp_endpoint: str | None = _env(
        None, "OTEL_EXPORTER_OTLP_ENDPOINT", pattern=r"^https?://[^/]+(/.*)?$"
    )
    """Address of an OTLP/HTTP collector, which gets a span of each call. Unset: no spans."""
    otlp_content: bool = _env(False, "OTLP_CONTENT")
    """Spans of calls also hold messages, answers and tools, after the recording rules."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint_has_no_path(cls, endpoint: str) -> str:
        url = urlsplit(endpoint)
        if url.scheme == "http" and url.path.strip("/"):
            address = f"{url.scheme}://{url.netloc}"
            raise ValueError(f"the gateway's address has no path: set LOCAL_ENDPOINT={address}")
        return endpoint

    @property
    def gateways_engines(self) -> str:
        """The addresses of the gateway's engines, separated by commas.

        Raises:
            ConfigError: ``ENGINE=remote`` without ``ENGINE_URL``.
        """
        if self.engine != "remote":
            return "http://{}:{}".format(*self.engine_here)
        if not self.engine_url:
            raise ConfigError("ENGINE=remote needs ENGINE_URL, the addresses of running engines")
        return ",".join(url.rstrip("/") for url in self.engine_url.split(","))

    @property
    def engine_here(self) -> tuple[str, int]:
        """Host and port at which this machine reaches the engine that it starts."""
        if not self.engine_listen or self.engine == "vllm":
            return "127.0.0.1", self.engine_port
        url = urlsplit(self.engine_listen)
        host = "127.0.0.1" if url.hostname == "0.0.0.0" else str(url.hostname)
        return host, url.port or self.engine_port

    @property
    def agents_url(self) -> str:
        """The address for agents: the public one, if there is one."""
        return (self.public_url or self.endpoint).rstrip("/")

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
    strategy: DeploymentStrategy = _env("replace", "DEPLOYMENT_STRATEGY")
    """A checkpoint that passed serves all agents (`replace`), half of them (`ab`), or 5 %, then
    25 %, then 50 % of them (`canary`).
    """
    approval_hours: float | None = _env(None, "APPROVAL_HOURS", gt=0, le=MAX_HOURS)
    """Hours that a person has to approve a checkpoint that passed; without a yes it is not
    deployed. Unset: no approval is needed.
    """
    # An hour of the demo moves a policy by 0.003 to 0.04.
    max_serving_kl: float = _env(0.5, "MAX_SERVING_KL", gt=0)
    """Largest KL divergence from the champion, in nats a token, at which a checkpoint may serve."""
    keep_checkpoints: int = _env(3, "KEEP_CHECKPOINTS", ge=1)
    """Number of checkpoints kept of each kind: rollback targets, newest, best. Kinds overlap."""


class ExperimentSettings(Group):
    """An experiment between two policies on live agents (`ab`, `canary`)."""

    min_agents: int = _env(40, "AB_MIN_AGENTS", ge=4)
    """Number of agents with finished play before P&L decides an experiment."""
    min_hours: float = _env(3.0, "AB_MIN_HOURS", ge=0)
    """Hours before which a challenger is not promoted."""
    max_hours: float = _env(168.0, "AB_MAX_HOURS", gt=0, le=MAX_HOURS)
    """Hours after which an undecided experiment ends with the champion."""
    tolerated_loss_usd: float = _env(0.0, "AB_TOLERATED_LOSS_USD", ge=0)
    """US dollars a play. A challenger that surely loses more than this is rolled back."""

    @model_validator(mode="after")
    def _can_be_decided_before_it_ends(self) -> Self:
        if self.min_hours >= self.max_hours:
            raise ValueError(
                f"AB_MIN_HOURS={self.min_hours:g} is not below AB_MAX_HOURS={self.max_hours:g}:"
                " no decision could be made in between"
            )
        return self


class TrackingSettings(Group):
    """Weights & Biases, and a catalogue of data that takes OpenLineage events."""

    project: str | None = _env(None, "WANDB_PROJECT")
    """W&B project that gets the metrics. Unset: nothing is reported."""
    mode: Literal["offline", "online", "disabled"] = _env("offline", "WANDB_MODE")
    """With `offline`, runs are files that you sync by hand; `online` sends them at once."""
    models: bool = _env(False, "WANDB_MODELS")
    """Each promoted policy becomes an artifact of type `model`."""
    lineage_url: str | None = _env(None, "OPENLINEAGE_URL", pattern=r"^https?://\S+$")
    """Address of an OpenLineage receiver, such as Marquez. Unset: none."""

    # Its client takes no other address, and the supervisor would end with all services.
    @field_validator("lineage_url")
    @classmethod
    def _has_a_host(cls, url: str | None) -> str | None:
        if url:
            parts = urlsplit(url)
            _ = parts.port  # its ValueError becomes the setting's
            if not parts.hostname:
                raise ValueError("it names no host: write http://HOST:PORT")
        return url

    lineage_key: SecretStr | None = _env(None, "OPENLINEAGE_API_KEY")
    """Key of that receiver, sent as a bearer token."""
    lineage_namespace: str = _env("babylon", "OPENLINEAGE_NAMESPACE", min_length=1)
    """Namespace of the job and of the policies in the catalogue."""


class PublishSettings(Group):
    """The repositories of dataset and models on the Hugging Face Hub. Off by default."""

    repository: str | None = _env(None, "PUBLISH_TO", pattern=r"^[\w.-]+/[\w.-]+$")
    """Dataset repository that finished windows are published to: `owner/name`. Unset: none."""
    models: str | None = _env(None, "PUBLISH_MODELS_TO", pattern=r"^[\w.-]+/[\w.-]+$")
    """Model repository that promoted policies are published to: `owner/name`. Unset: none."""
    models_as: Literal["merged", "adapter"] = _env("merged", "PUBLISH_MODELS_AS")
    """Published weights: `merged` into the base model, or the `adapter` alone."""
    private: bool = _env(True, "PUBLISH_PRIVATE")
    """A repository that is made here is private."""
    license: str | None = _env(None, "PUBLISH_LICENSE", pattern=r"^[a-z0-9.-]+$")
    """License of what is published, as the hub writes it: `cc-by-4.0`. Needed to publish."""
    agents: str | None = _env(None, "PUBLISH_AGENTS")
    """Agents that agreed to be published: `fleet-*,carol`, `*` for all. Needed to publish."""
    token: SecretStr | None = _env(None, "HF_TOKEN")
    """Access token of the hub."""
    endpoint: str | None = _env(None, "HF_ENDPOINT", pattern=r"^https?://[^/]+$")
    """Address of another hub than Hugging Face's own."""


class PrefectSettings(Group):
    port: int = _env(4200, "PREFECT_SERVER_API_PORT", ge=1, le=65535)
    """Port on loopback of the Prefect server that `babylon up` starts, and of its UI."""
    api_url: str | None = _env(None, "PREFECT_API_URL", pattern=r"^https?://\S+/api(/\S*)?$")
    """Address of the API of your own Prefect server, or of Prefect Cloud. `babylon up` then starts
    no server. Unset: it does.
    """

    @field_validator("api_url")
    @classmethod
    def _has_a_port(cls, url: str | None) -> str | None:
        if url:
            _ = urlsplit(url).port  # its ValueError becomes the setting's
        return url

    api_key: SecretStr | None = _env(None, "PREFECT_API_KEY")
    """Key of Prefect Cloud."""
    auth: SecretStr | None = _env(None, "PREFECT_API_AUTH_STRING")
    """`user:password` of Prefect's API. Unset: `babylon up` makes `prefect.key` in the home."""
    alerts: str | None = _env(None, "ALERT_BLOCK", pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")
    """Prefect's notification block that alerts go to: `slack-webhook/oncall`. Unset: nowhere."""
    stage_timeout_s: float = _env(3 * 3600.0, "STAGE_TIMEOUT_SECONDS", gt=0)
    """Seconds after which a stage is given up. The next run begins it again."""
    job_variables: str = _env("{}", "GPU_JOB_VARIABLES", pattern=r"^\{.*\}$")
    """Prefect's job variables of GPU stages: `{"gpus": 4, "env": {"TRAIN_NODES": "2"}}`."""

    # aiohttp sends no request with both, and the supervisor would end with all services.
    @model_validator(mode="after")
    def _has_one_password(self) -> Self:
        in_url = self.api_url and "@" in urlsplit(self.api_url).netloc
        if in_url and (self.auth or self.api_key):
            raise ValueError(
                "PREFECT_API_URL names a user, and PREFECT_API_AUTH_STRING or PREFECT_API_KEY is"
                " set too: write USER:PASSWORD in one place only, best into"
                " PREFECT_API_AUTH_STRING"
            )
        return self


class Settings(BaseModel):
    """All settings of a process, in groups."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    artifact_store: str | None = _env(
        None, "ARTIFACT_STORE", pattern=r"^(file:///|(s3|gs|az)://[^/?#\s]+)[^?#\s]*$"
    )
    """URI that holds artifacts and checkpoints for several machines: `s3://bucket/prefix`, `gs://`,
    `az://`, `file:///mounted`. Credentials come from the provider's own variables (`AWS_*`). Unset:
    the home holds them alone."""
    artifact_cache_gb: float = _env(100.0, "ARTIFACT_CACHE_GB", ge=0)
    """Gigabytes of copies of stored files that the home keeps."""
    home: Annotated[Home, BeforeValidator(Home.at)] = _env(
        ".babylon", "BABYLON_HOME", validate_default=True
    )
    """Directory of everything that changes: database, artifacts, checkpoints, logs, keys."""
    seed: int = _env(0, "BABYLON_SEED")
    """Seed of thinning, training and simulated play."""
    database: DatabaseSettings = DatabaseSettings()
    windows: WindowSettings = WindowSettings()
    quality: QualitySettings = QualitySettings()
    scoring: ScoringSettings = ScoringSettings()
    judge: JudgeSettings = JudgeSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    preferences: PreferenceSettings = PreferenceSettings()
    population: PopulationSettings = PopulationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    serving: ServingSettings = ServingSettings()
    deployment: DeploymentSettings = DeploymentSettings()
    experiment: ExperimentSettings = ExperimentSettings()
    tracking: TrackingSettings = TrackingSettings()
    publish: PublishSettings = PublishSettings()
    prefect: PrefectSettings = PrefectSettings()

    @model_validator(mode="after")
    def _adapters_can_be_used(self) -> Self:
        population, training, engine = self.population, self.training, self.serving.engine
        if population.size > 1 and (training.trainer, training.tuning) != ("torch", "lora"):
            raise ValueError(
                f"POPULATION={population.size} with TRAINER={training.trainer} and"
                f" TUNING={training.tuning}: siblings are adapters of TRAINER=torch, on one base"
                " (TUNING=lora)"
            )
        large = training.lora_rank > VLLM_LORA_RANK
        large |= population.size > 1 and "rank" in population.genes
        # A server at ENGINE_URL was started by somebody else, with a limit of its own.
        ours = engine == "vllm" and not self.serving.engine_url
        flagged = "--max-lora-rank" in self.serving.vllm_args
        if training.tuning == "lora" and large and ours and not flagged:
            raise ValueError(
                f"LORA_RANK={training.lora_rank} and POPULATION_GENES={population.genes!r}:"
                f" ENGINE=vllm serves ranks up to {VLLM_LORA_RANK}; add '--max-lora-rank 64' to"
                " VLLM_ARGS"
            )
        if (training.tuning, training.lora_variant, engine) == ("lora", "dora", "vllm"):
            raise ValueError("LORA_VARIANT=dora: ENGINE=vllm serves none, set LORA_VARIANT=rslora")
        return self

    @field_validator("home")
    @classmethod
    def _home_knows_its_store(cls, home: Home, info: ValidationInfo) -> Home:
        store, cache_gb = info.data.get("artifact_store"), info.data.get("artifact_cache_gb")
        return Home(home.root, store=store or "", cache_gb=cache_gb or 0.0)

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


def _check_minutes(minutes: int) -> None:
    """Raise ``ValueError``, to which pydantic adds the variable."""
    try:
        check_minutes(minutes)
    except ConfigError as error:
        raise ValueError(str(error)) from error
