"""One window as a page in Markdown: play, rejections, update, verdict, and what went live."""

from collections.abc import Iterator, Sequence

from babylon.core.windows import IN_WORK
from babylon.ops.pages.markdown import picture, span, table
from babylon.ops.pages.pictures import gate_pictures, score_picture
from babylon.ops.pages.window_facts import Played, WindowFacts, gate_measure
from babylon.training.update_health import figure, warnings

SHOWN = 3  # best and worst trajectories
MOST_AGENTS = 12
_UPDATE = ("training_loss", "kl_divergence", "ess", "train_steps", "trained_trajectories")


def window_markdown(facts: WindowFacts) -> str:
    """Return the page. Blocking: it draws pictures."""
    row = facts.row
    lines = [f"# Window {row.window_id}: {row.state}", "", span(row.reason or ""), ""]
    if row.state in IN_WORK and not row.leased:
        lines += [f"**Lost:** no worker renews its lease; it stopped as {row.state}.", ""]
    for heading, body in (
        ("Who played", _players(facts)),
        ("What was rejected, and why", _rejections(facts)),
        ("Best and worst", _extremes(facts.played)),
        ("What judging cost", _judging(facts)),
        ("The update", _update(facts)),
        ("The gate", _gate(facts)),
        ("What went live", _live(facts)),
    ):
        if found := list(body):
            lines += [f"## {heading}", "", *found]
    return "\n".join(lines)


def _players(facts: WindowFacts) -> Iterator[str]:
    agents = facts.agents
    rows: list[tuple[object, ...]] = [
        (span(a.agent_id), a.trajectories, f"{a.pnl_usd:+.2f}", f"{a.score:.3f}") for a in agents
    ]
    if (left := len(rows) - MOST_AGENTS) > 0:  # who lost most is asked as often as who won most
        half = MOST_AGENTS // 2
        rows = [*rows[:half], (f"… {left} agents between", "", "", ""), *rows[-half:]]
    yield from table(("agent", "trajectories", "mean P&L, $", "mean score"), rows)
    points = [(play.pnl_usd, play.score.score) for play in facts.played]
    yield from picture("Score against P&L, one point a trajectory", score_picture(points))


def _rejections(facts: WindowFacts) -> Iterator[str]:
    rows = [
        (one.reason, one.count, span(one.samples[0].trajectory_id), span(one.samples[0].detail))
        for one in facts.rejections
    ]
    yield from table(("reason", "rejected", "<for example", "<detail"), rows)
    if facts.health:
        for alarm in facts.health.alarms:
            yield from (f"**Alarm:** {span(alarm.reason)}", "")


def _extremes(played: Sequence[Played]) -> Iterator[str]:
    best, worst = played[:SHOWN], played[max(SHOWN, len(played) - SHOWN) :]
    rows = [
        (
            span(one.agent_id),
            f"{one.score.score:.3f}",
            f"{one.pnl_usd:+.2f}",
            span(one.score.because),
        )
        for one in (*best, *worst)
    ]
    yield from table(("agent", "score", "P&L, $", "<because"), rows)


def _judging(facts: WindowFacts) -> Iterator[str]:
    rows = [
        (one.day, span(one.judge), one.requests, one.tokens, f"{one.usd:.4f}")
        for one in facts.judging
    ]
    yield from table(("day", "judge", "requests", "tokens", "$"), rows)
    for day, usd in sorted(facts.days_usd.items()):
        yield from (f"All windows together cost ${usd:.4f} on {day}.", "")


def _update(facts: WindowFacts) -> Iterator[str]:
    if facts.policy is None:
        return
    metrics = facts.policy.metrics
    yield f"Policy {facts.policy.parent_version} became policy {facts.policy.policy_version}."
    yield ""
    yield from table(
        ("figure", "value"), [(n, figure(metrics[n])) for n in _UPDATE if n in metrics]
    )
    for warning in warnings(metrics):
        yield from (f"- ⚠ {span(warning)}", "")


def _gate(facts: WindowFacts) -> Iterator[str]:
    verdict = facts.policy.verdict if facts.policy else None
    if not verdict:
        return
    yield from (f"{'Passed' if verdict['promote'] else 'Did not pass'}: {verdict['reason']}", "")
    if not verdict.get("scenarios"):  # a canary decides, or the update's figures
        return
    rows = [
        (name, figure(verdict.get(f"{key}_before")), figure(verdict.get(f"{key}_after")))
        for name, key in ((gate_measure(verdict), "pnl"), ("win rate", "win_rate"))
    ]
    yield from table(("", "champion", "challenger"), rows)
    sequence = gate_pictures(facts.report).get("sequence")
    yield from picture("Confidence sequence of the difference in P&L", sequence)


def _live(facts: WindowFacts) -> Iterator[str]:
    metrics = facts.row.metrics
    if "deployment" not in metrics:
        return
    arm, route = metrics.get("arm"), metrics.get("route_version")
    # The champion may have changed: the fleet's play, or an experiment, decided against it.
    served = (
        f"serves as {arm}, on route {route}"
        if arm
        else f"does not serve. Route {route} is in force"
    )
    yield f"Policy {metrics.get('policy_version')} {served}: {metrics['deployment']}"
