"""Records that stages hand on: small, frozen, JSON-safe. Data itself stays in artifacts.

Every stage takes the manifest of the stage before and returns its own, so a flow reads as
``collect → validate → dropout → score → train → validate checkpoint → deploy → publish``.
All records are plain dataclasses: ``dataclasses.asdict`` gives JSON, and Prefect (pydantic)
parses them back when a stage runs as a deployment of its own.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1
Metrics = dict[str, float | int | str | bool | None]
Ruling = Literal["promote", "reject", "insufficient"]
Arm = Literal["champion", "challenger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to write to one window, until the lease runs out or a higher epoch exists."""

    window_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A content-addressed Parquet file: one row a trajectory (see ``babylon.core.artifacts``)."""

    uri: str
    sha256: str
    rows: int
    window_id: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """``collect``: every row of the window as the game wrote it, with the gateway's calls."""

    claim: Claim
    artifact: Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """``validate``: the accepted trajectories, and how many were rejected for which reason."""

    claim: Claim
    artifact: Artifact
    agents: int
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """``dropout``: the trajectories that go to the judge; those that do not are ``held_out``, and
    would have taken about so many tokens of its prompts."""

    claim: Claim
    artifact: Artifact
    agents: int
    dropped: int
    held_out: Artifact | None = None
    saved_judge_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """``score``: the same trajectories with one score each, of ``eligible`` before dropout.

    ``metrics``: what the scorer tells of itself; a judge its tokens, cost, requests and level.
    """

    claim: Claim
    artifact: Artifact
    eligible: int
    agents: int
    scorer: str
    avg_reward: float
    metrics: dict[str, float | int | str] = field(default_factory=dict)
    held_out: Artifact | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``train``: a candidate policy, its checkpoint and how the update went."""

    claim: Claim
    batch_id: str
    policy_version: int
    parent_version: int
    checkpoint_uri: str
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """What recorded play that the challenger never saw says of it, against whoever played it.

    P&L in simulator dollars a trajectory, above its scenario's mean, with a 99 % interval.
    ``ess`` of ``trajectories``: how many the weighted ones are worth. ``problem``: why there is no
    estimate.
    """

    trajectories: int = 0
    ess: float = 0.0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    problem: str | None = None

    @property
    def veto(self) -> bool:
        return self.high is not None and self.high < 0

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        return (
            f"P&L difference {self.difference:+.1f} [{self.low:+.1f}, {self.high:+.1f}] (ESS"
            f" {self.ess:.0f} of {self.trajectories} trajectories)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``validate checkpoint``: may the challenger replace the champion, and why (not)?

    P&L in simulator dollars, a mean over the ``scenarios`` that both policies played, of the
    suite with that digest; the ends of the difference are those of a 95 % confidence sequence.
    A checkpoint whose training rules it out plays none, and nothing is measured. ``off_policy`` is
    asked only of a challenger that the arena would promote.
    """

    claim: Claim
    policy_version: int
    route_version: int  # the route that was in force: the verdict is about its champion
    promote: bool
    reason: str
    insufficient: bool = False  # not promoted for want of evidence, rather than for a reason
    scenarios: int = 0
    suite_digest: str | None = None
    pnl_before: float | None = None
    pnl_after: float | None = None
    pnl_difference_low: float | None = None
    pnl_difference_high: float | None = None
    win_rate_before: float | None = None
    win_rate_after: float | None = None
    malformed_before: float | None = None
    malformed_after: float | None = None
    drawdown_before: float | None = None
    drawdown_after: float | None = None
    yardsticks: dict[str, float] = field(default_factory=dict)  # mean P&L of scripted agents
    off_policy: OffPolicy | None = None
    report: str | None = None  # directory with report.json and its pictures

    @property
    def ruling(self) -> Ruling:
        if self.promote:
            return "promote"
        return "insufficient" if self.insufficient else "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the route that is over: who serves since, and how long each phase took.

    ``challenger_version`` with ``share`` of the agents in an experiment, whose id is ``salt``.
    ``checks``: what was checked before, by name; ``None`` where nothing was to be checked.
    Seconds: until every gateway had loaded the policy, of its checks, from the commit until every
    gateway served the route, and until nobody was answered by the policy that serves no more;
    ``unfinished`` calls still were when that was not waited for any longer.
    """

    route_version: int
    policy_version: int
    mode: str = "replace"
    challenger_version: int | None = None
    share: float | None = None
    salt: str | None = None
    reason: str = ""
    acknowledged_by: tuple[str, ...] = ()
    checks: dict[str, Any] | None = None
    prepare_s: float = 0.0
    check_s: float = 0.0
    commit_s: float = 0.0
    drain_s: float = 0.0
    unfinished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """``deploy``: what became of the checkpoint, and the route in force after this window.

    A checkpoint that is ``deployed`` serves as champion or, in an experiment, as challenger
    (``arm``); otherwise ``policy_version`` is the champion. What this run did: ``checks`` of the
    checkpoint, passed or not; the ``review`` of the experiment that ran; ``changes`` of the route.
    """

    claim: Claim
    policy_version: int
    deployed: bool
    route_version: int
    reason: str = ""
    arm: Arm | None = None
    acknowledged_by: tuple[str, ...] = ()
    checks: dict[str, Any] | None = None
    review: dict[str, Any] | None = None
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``publish``: where the window's dataset file lies."""

    window_id: str
    uri: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What one window's training came to; ``status`` is a ``WindowState`` value.

    ``changed`` is False when an earlier run had finished the window and this one did nothing.
    """

    window_id: str
    status: str
    reason: str = ""
    changed: bool = True
    metrics: Metrics = field(default_factory=dict)
