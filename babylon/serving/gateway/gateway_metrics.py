"""Counters in Prometheus' text format, by arm and version; agents are never a label.

Format: https://prometheus.io/docs/instrumenting/exposition_formats (version 0.0.4).
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate

from babylon.serving.gateway.exchange import Exchange

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Durations in seconds; ``counts`` has one more entry than ``BUCKETS_S``."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class Metrics:
    """What a gateway has done since it started."""

    def __init__(self) -> None:
        self._refused: Counter[Labels] = Counter()
        self._calls: Counter[Labels] = Counter()
        self._tokens: Counter[Labels] = Counter()
        self._duration: defaultdict[Labels, Histogram] = defaultdict(Histogram)
        self._first: defaultdict[Labels, Histogram] = defaultdict(Histogram)

    def refused(self, status: int) -> None:
        """A request that was answered with an error."""
        self._refused[(("status", str(status)),)] += 1

    def called(self, exchange: Exchange, outcome: str) -> None:
        """A call that a policy was asked for; ``outcome`` is an HTTP status, or "left"."""
        whose = (("arm", exchange.arm), ("version", str(exchange.target.policy_version)))
        begun, now = exchange.started_at, datetime.now(UTC)
        self._calls[(*whose, ("outcome", outcome))] += 1
        self._tokens[(*whose, ("kind", "prompt"))] += len(exchange.prompt_token_ids)
        self._tokens[(*whose, ("kind", "completion"))] += len(exchange.token_ids)
        self._duration[whose].observe((now - begun).total_seconds())
        if exchange.chat.stream and exchange.first_at:
            self._first[whose].observe((exchange.first_at - begun).total_seconds())

    def text(self, gauges: Mapping[str, float]) -> bytes:
        """The exposition; ``gauges`` are what others know at this moment."""
        lines = [
            *_counter("babylon_refused_total", self._refused),
            *_counter("babylon_calls_total", self._calls),
            *_counter("babylon_tokens_total", self._tokens),
            *_histogram("babylon_call_duration_seconds", self._duration),
            *_histogram("babylon_first_token_seconds", self._first),
        ]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        return ("\n".join(lines) + "\n").encode()


def _counter(name: str, values: Mapping[Labels, int]) -> Iterator[str]:
    yield f"# TYPE {name} counter"
    for labels, value in values.items():
        yield f"{name}{_braces(labels)} {value}"


def _histogram(name: str, values: Mapping[Labels, Histogram]) -> Iterator[str]:
    yield f"# TYPE {name} histogram"
    for labels, histogram in values.items():
        bounds = (*map("{:g}".format, BUCKETS_S), "+Inf")
        sums = list(accumulate(histogram.counts))
        for bound, count in zip(bounds, sums, strict=True):
            yield f"{name}_bucket{_braces((*labels, ('le', bound)))} {count}"
        yield f"{name}_sum{_braces(labels)} {histogram.total_s:g}"
        yield f"{name}_count{_braces(labels)} {sums[-1]}"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
