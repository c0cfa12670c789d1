"""Prometheus metrics of one gateway, labelled by arm and version, never by agent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from babylon.serving.gateway.exchange import Exchange

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MOST_POLICIES = 32  # a policy's series are 30 KB, and every window may bring a policy
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Series:
    """Metrics of one arm and version; ``calls`` by outcome. Looking up labels costs twice as much
    as counting, so it is done once."""

    prompt_tokens: Counter
    completion_tokens: Counter
    duration: Histogram
    first_token: Histogram
    calls: dict[str, Counter] = field(default_factory=dict)


class _ReadCounter(Collector):
    """A counter that is read at each scrape, which ``Counter`` cannot be."""

    def __init__(self, name: str, documentation: str, read: Callable[[], int]) -> None:
        self._name, self._documentation, self._read = name, documentation, read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._read())


class GatewayMetrics:
    """Counters and durations since the start, in a registry of this gateway's own.

    Those of policies are kept for the ``MOST_POLICIES`` that were called last.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._refused = Counter(
            "babylon_refused", "Requests answered with an error.", ["status"], registry=registry
        )
        self._calls = Counter(
            "babylon_calls",
            'Calls sent to a policy; the outcome is an HTTP status, or "left".',
            ["arm", "version", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "babylon_tokens",
            "Tokens of prompts and completions.",
            ["arm", "version", "kind"],
            registry=registry,
        )
        histogram = partial(
            Histogram, labelnames=["arm", "version"], buckets=BUCKETS_S, registry=registry
        )
        self._duration = histogram(
            "babylon_call_duration_seconds", "Time from a request to the last byte of its answer."
        )
        self._first_token = histogram(
            "babylon_first_token_seconds",
            "Time from a streamed request to the first chunk of its answer.",
        )
        self._series: dict[tuple[str, int], _Series] = {}  # the one called last is last

    def add_gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Export as ``babylon_<name>`` the value that ``read`` returns at each scrape."""
        Gauge(f"babylon_{name}", documentation, registry=self._registry).set_function(read)

    def add_counter(self, name: str, documentation: str, read: Callable[[], int]) -> None:
        """Export as ``babylon_<name>_total`` the count that ``read`` returns at each scrape."""
        self._registry.register(_ReadCounter(f"babylon_{name}", documentation, read))

    def add_states(
        self, name: str, documentation: str, states: Iterable[str], read: Callable[[], str]
    ) -> None:
        """Export as ``babylon_<name>`` 1 for the state that ``read`` returns, and 0 for others."""
        gauge = Gauge(f"babylon_{name}", documentation, ["state"], registry=self._registry)
        for state in states:
            gauge.labels(state).set_function(lambda state=state: float(read() == state))  # type: ignore[misc]

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(status).inc()

    def called(self, exchange: Exchange, outcome: str) -> None:
        """Count a call to a policy; ``outcome`` is an HTTP status, or "left"."""
        policy = exchange.assigned.arm, exchange.assigned.target.policy_version
        series = self._series.pop(policy, None) or self._new_series(*policy)
        self._series[policy] = series
        calls = series.calls.get(outcome)
        if calls is None:
            calls = series.calls[outcome] = self._calls.labels(*policy, outcome)
        begun, now = exchange.started_at, datetime.now(UTC)
        calls.inc()
        prompts, answers = exchange.used
        series.prompt_tokens.inc(prompts)
        series.completion_tokens.inc(answers)
        series.duration.observe((now - begun).total_seconds())
        if exchange.request.stream and exchange.first_at:
            series.first_token.observe((exchange.first_at - begun).total_seconds())

    def _new_series(self, arm: str, version: int) -> _Series:
        if len(self._series) == MOST_POLICIES:
            self._forget(*next(iter(self._series)))
        return _Series(
            prompt_tokens=self._tokens.labels(arm, version, "prompt"),
            completion_tokens=self._tokens.labels(arm, version, "completion"),
            duration=self._duration.labels(arm, version),
            first_token=self._first_token.labels(arm, version),
        )

    def _forget(self, arm: str, version: int) -> None:
        for outcome in self._series.pop((arm, version)).calls:
            self._calls.remove(arm, version, outcome)
        for kind in ("prompt", "completion"):
            self._tokens.remove(arm, version, kind)
        for durations in (self._duration, self._first_token):
            durations.remove(arm, version)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)
