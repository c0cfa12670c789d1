"""Manifests that the stages pass on: small, frozen and JSON-safe. The data itself is in artifacts.

Each stage takes the manifest of the stage before it and returns its own:
``collect → validate → dropout → score → train → validate checkpoint → deploy → publish``.
All records are plain dataclasses: ``dataclasses.asdict`` gives JSON, and ``msgspec.convert`` or
pydantic (Prefect) reads it back.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1
Metric = float | int | str | bool | None
Metrics = dict[str, Metric]
Ruling = Literal["promote", "reject", "insufficient"]
Arm = Literal["champion", "challenger"]
CANARY = "live canary"  # ``Verdict.evidence``


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to write to one window, until the lease ends or a higher epoch exists."""

    window_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A content-addressed Parquet file, one row a trajectory (see ``babylon.core.artifacts``)."""

    uri: str
    sha256: str
    rows: int
    window_id: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Manifest of ``collect``: every row as the game wrote it, with the calls of the gateway.

    ``outcomes``, here and in the next manifests: number of the window's market outcomes. Without
    any, the window is judged without ground truth. ``None``: the task has no markets.
    """

    claim: Claim
    artifact: Artifact
    outcomes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A trajectory that is not trained on.

    ``reason`` is a short name to count by; ``detail`` names the path and the value.
    """

    trajectory_id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Manifest of ``validate``: the accepted trajectories, and the number rejected by reason."""

    claim: Claim
    artifact: Artifact
    agents: int
    rejected: dict[str, int]
    outcomes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """Manifest of ``dropout``: the trajectories to score, and the ones left out (``held_out``).

    ``saved_judge_tokens``: estimated prompt tokens that a judge would have read for the latter.
    """

    claim: Claim
    artifact: Artifact
    agents: int
    dropped: int
    held_out: Artifact | None = None
    saved_judge_tokens: int = 0
    outcomes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Manifest of ``score``: the trajectories with one score each.

    ``eligible``: number of trajectories before dropout. ``metrics``: the scorer's own; a judge
    reports its tokens, cost, requests and level. ``fingerprint``: the settings that decided the
    scores (``babylon.stages.fingerprint``).
    """

    claim: Claim
    artifact: Artifact
    eligible: int
    agents: int
    scorer: str
    avg_reward: float
    metrics: dict[str, float | int | str] = field(default_factory=dict)
    held_out: Artifact | None = None
    fingerprint: str = ""
    outcomes: int | None = None  # None: also if scored before outcomes were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingOrder:
    """One member of a population to train on a window, before stage ``train``."""

    scored: Scored
    member: int

    @property
    def claim(self) -> Claim:
        return self.scored.claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Manifest of ``train``: a candidate policy, its checkpoint and the metrics of its update."""

    claim: Claim
    batch_id: str
    policy_version: int
    parent_version: int
    checkpoint_uri: str
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """Off-policy estimate of the challenger on recorded play that it was not trained on.

    ``difference``: P&L in simulator dollars a trajectory above the mean of its scenario, compared
    with the policies that played, with a 99 % interval from ``low`` to ``high``. ``ess``:
    effective sample size, in trajectories. ``problem``: the reason for a missing estimate.
    ``gain``: betting on a gain earned 40 times its capital, so the estimate may promote.
    """

    trajectories: int = 0
    ess: float = 0.0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    problem: str | None = None
    gain: bool = False

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
class Frozen:
    """A challenger's play of the frozen suite, beside the best policy that served before.

    Mean P&L in dollars over the same ``scenarios``, with the 95 % interval of the paired
    difference. ``problem``: the reason against a promotion, if there is one.
    """

    suite_digest: str
    scenarios: int
    pnl: float
    malformed: float  # share of the replies
    best_version: int
    best_pnl: float
    difference_low: float
    difference_high: float
    problem: str | None = None

    def __str__(self) -> str:
        return (
            f"{self.pnl:.1f} on {self.scenarios} worlds, policy {self.best_version}"
            f" {self.best_pnl:.1f}, difference [{self.difference_low:+.1f},"
            f" {self.difference_high:+.1f}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Manifest of ``validate checkpoint``: may the challenger replace the champion, and the reason.

    ``evidence`` decided: the worlds that were played, by source; the frozen suite; a task; recorded
    play; or the live canary, which has yet to decide. P&L is in dollars (of a task: score in its
    unit), the mean over the ``scenarios`` that both policies played, of the suite with digest
    ``suite_digest``. The bounds of the difference are those of a 95 % confidence sequence. A
    checkpoint that its own training rules out plays no scenario, and all measures stay empty.
    ``off_policy`` is estimated for a challenger that the worlds promote, or if there are none;
    ``frozen`` is measured for one that both promote.
    """

    claim: Claim
    policy_version: int
    route_version: int  # the route in force; its champion is the policy compared with
    promote: bool
    reason: str
    insufficient: bool = False  # the evidence decided neither for nor against
    evidence: str = "the update's own figures"
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
    yardsticks: dict[str, float] = field(default_factory=dict)  # mean P&L of other players
    siblings: dict[str, float] = field(default_factory=dict)  # fitness of a population's members
    off_policy: OffPolicy | None = None
    frozen: Frozen | None = None
    report: str | None = None  # directory with report.json and its pictures

    @property
    def in_dollars(self) -> bool:
        """True unless the P&L is a task's score, which has no drawdown."""
        return self.pnl_after is None or self.drawdown_after is not None

    @property
    def ruling(self) -> Ruling:
        if self.promote:
            return "promote"
        return "insufficient" if self.insufficient else "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A completed change of the route, and the duration of each phase.

    ``policy_version`` serves since. In an experiment, ``challenger_version`` serves ``share`` of
    the agents, and ``salt`` is the experiment's id. ``checks``: results of the checks before
    deployment, by name; None when nothing was checked.

    ``prepare_s``: until the gateways had loaded the policy. ``check_s``: its checks.
    ``commit_s``: from the commit until the gateways served the new route. ``drain_s``: until the
    last call of a policy that serves no more had ended. ``unfinished``: number of such calls that
    still ran when the wait timed out.
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
    """Manifest of ``deploy``: is the checkpoint deployed, and the route in force after the window.

    A ``deployed`` checkpoint serves as champion or, in an experiment, as challenger (``arm``).
    Otherwise ``policy_version`` is the champion. ``checks``: results of the checks of the
    checkpoint. ``review``: the decision about the running experiment. ``changes``: the changes of
    the route that this run made.
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
    """Manifest of ``publish``: the window's file of the dataset."""

    window_id: str
    uri: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """Result of one window's training; ``status`` is a ``WindowState`` value.

    ``changed`` is False when an earlier run had finished the window and this one did nothing.
    """

    window_id: str
    status: str
    reason: str = ""
    changed: bool = True
    metrics: Metrics = field(default_factory=dict)
