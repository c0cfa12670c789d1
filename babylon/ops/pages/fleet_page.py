"""The fleet and the last hours as pages in Markdown."""

from collections import Counter
from collections.abc import Iterator, Sequence

from babylon.core.types import Metric, Metrics
from babylon.ops.pages.fleet_facts import FleetWindow, Night
from babylon.ops.pages.markdown import picture, span, table
from babylon.ops.pages.pictures import pnl_picture, update_picture
from babylon.ops.pages.window_facts import gate_measure
from babylon.store.attempts import Attempt
from babylon.store.routes import Route


def fleet_markdown(windows: Sequence[FleetWindow]) -> str:
    """Return the page of the newest windows. Blocking: it draws pictures."""
    # Pictures run forward in time, and the table has the newest window on top, as lists of news do.
    named = [(one.row.window_id, one.row.metrics) for one in windows]
    rows = [
        (
            one.row.window_id,
            one.row.state,
            _number(one.row.metrics.get("trajectories"), "d"),
            *(_gate(one.row.metrics, when) for when in ("pnl_before", "pnl_after")),
            one.row.metrics.get("policy_version") if one.row.metrics.get("arm") else None,
            _number(one.staleness, ".2f"),
            f"{one.usd:.4f}",
        )
        for one in reversed(windows)
    ]
    states = Counter(str(one.row.state) for one in windows)
    columns = ("window", "<state", "plays", "P&L before, $", "P&L after, $", "went live")
    return "\n".join(
        [
            f"# The fleet, its newest {len(windows)} windows",
            "",
            ", ".join(f"{count} {state}" for state, count in states.most_common()),
            "",
            *picture("P&L of champion and challenger by window", pnl_picture(named)),
            *picture("Loss and KL by window", update_picture(named)),
            *table((*columns, "staleness", "judge, $"), rows),
            "Staleness is the mean number of updates between the policy that played and the one"
            " that was trained.",
        ]
    )


def night_markdown(night: Night) -> str:
    """Return the page of what happened since a moment."""
    ended = [one for one in night.attempts if one.ended_at]
    running = [one for one in night.attempts if not one.ended_at]
    counts = Counter(one.ending or "" for one in ended)
    told = ", ".join(f"{count} {ending}" for ending, count in counts.most_common())
    lines = [f"# Since {night.since:%Y-%m-%d %H:%M} UTC: {told or 'no window ended'}", ""]
    lines += [f"The judge cost ${night.usd:.4f}.", ""]
    if night.routes:
        lines += ["## What went live", "", *_routes(night.routes)]
    if ended:
        lines += ["## Windows", "", *_attempts(ended)]
    if running:
        columns = ("window", "<worker", "<since")
        rows = [(r.window_id, span(r.owner), f"{r.began_at:%H:%M}") for r in running]
        lines += ["## Without an end yet", "", *table(columns, rows)]
    return "\n".join(lines)


def _routes(routes: Sequence[Route]) -> Iterator[str]:
    columns = ("route", "<at (UTC)", "<serves", "<by", "<because")
    yield from table(columns, [(*_route(one), span(one.reason)) for one in routes])


def _route(one: Route) -> tuple[object, ...]:
    serves = f"policy {one.policy_version}"
    if one.split:
        serves += f", {one.split.share:.0%} policy {one.split.challenger_version} ({one.mode})"
    return one.route_version, f"{one.created_at:%m-%d %H:%M}", serves, span(one.author)


def _attempts(attempts: Sequence[Attempt]) -> list[str]:
    columns = ("window", "<ended (UTC)", "<end", "<because")
    return table(
        columns,
        [
            (one.window_id, f"{one.ended_at:%m-%d %H:%M}", one.ending, span(one.reason or ""))
            for one in reversed(attempts)
        ],
    )


def _gate(metrics: Metrics, name: str) -> str | None:
    if gate_measure(metrics) == "mean score":
        score = _number(metrics.get(name), ".4g")
        return score and f"score {score}"
    return _number(metrics.get(name), ".1f")


def _number(value: Metric, form: str) -> str | None:
    return f"{value:{form}}" if isinstance(value, int | float) else None
