"""Prometheus metrics of training: windows, freshness of play, health of the data, last update."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from babylon.core.windows import WindowState
from babylon.quality.health import WATCHED
from babylon.store.flow_state import FlowState

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_STORED = [state for state in WindowState if state not in (WindowState.OPEN, WindowState.CLOSING)]

# Without PUBLISH_TO here, publishing was stopped, or another host or a block names the repository.
# The alert on publications that fail there ends this long after the last one.
_PUBLISHED_ELSEWHERE = timedelta(days=7)


def flow_metrics(flow: FlowState, *, publishes: bool) -> bytes:
    """Return the metrics in Prometheus' text format 0.0.4. All are gauges, read from Postgres.

    ``publishes``: ``PUBLISH_TO`` is set here.
    """
    registry = CollectorRegistry()

    def gauge(name: str, documentation: str, value: float) -> None:
        Gauge(f"babylon_{name}", documentation, registry=registry).set(value)

    def family(name: str, documentation: str, label: str, values: Mapping[str, float]) -> None:
        one = Gauge(f"babylon_{name}", documentation, [label], registry=registry)
        for key, value in values.items():
            one.labels(key).set(value)

    states = {str(state): float(flow.windows.get(state, 0)) for state in _STORED}
    family("windows", "Claimed windows by state.", "state", states)
    gauge("windows_leased", "Windows that a worker holds now.", flow.leased)
    gauge("windows_lost", "Windows whose worker died.", flow.lost)
    gauge("gateways_quarantined", "Gateways that changes do not wait for.", flow.quarantined)
    gauge("judge_day_usd", "Cost of the judge in this UTC day.", flow.judge_usd)
    gauge("windows_without_truth", "Windows judged without market outcomes.", flow.without_truth)
    if flow.newest_play:
        gauge(
            "newest_play_timestamp_seconds",
            "Start of the newest trajectory.",
            flow.newest_play.timestamp(),
        )
    if flow.finished_at:
        gauge(
            "window_finished_timestamp_seconds",
            "End of the work on the newest finished window.",
            flow.finished_at.timestamp(),
        )
    newest = flow.published_at
    if newest and (publishes or datetime.now(UTC) - newest < _PUBLISHED_ELSEWHERE):
        gauge(
            "published_timestamp_seconds",
            "When a window was last entered in the ledger of the dataset.",
            newest.timestamp(),
        )
    family("window_metric", "Metrics of the newest finished window.", "metric", flow.metrics)
    if health := flow.health:
        family("window_figure", "Data of the newest validated window.", "figure", health.figures)
        alarmed = {alarm.figure for alarm in health.alarms}
        alarms = {figure: float(figure in alarmed) for figure in WATCHED}
        family("window_alarm", "1: the figure is outside its usual range.", "figure", alarms)
    return generate_latest(registry)
