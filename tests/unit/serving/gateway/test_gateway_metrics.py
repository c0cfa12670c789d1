from datetime import timedelta

from babylon.serving.gateway.gateway_metrics import BUCKETS_S, Histogram, Metrics
from tests.unit.serving.gateway.test_exchange import answer, exchange


def test_calls_are_counted_by_arm_and_version_and_agents_are_not_named() -> None:
    metrics, call = Metrics(), exchange(user="agent-secret")
    call.take(answer())
    call.started_at -= timedelta(seconds=3)
    metrics.called(call, "200")
    metrics.called(call, "200")
    metrics.refused(401)
    lines = metrics.text({"babylon_ready": 1.0}).decode().splitlines()
    whose = 'arm="champion",version="3"'
    for line in (
        f'babylon_calls_total{{{whose},outcome="200"}} 2',
        f'babylon_tokens_total{{{whose},kind="prompt"}} 6',
        f'babylon_tokens_total{{{whose},kind="completion"}} 4',
        f'babylon_call_duration_seconds_bucket{{{whose},le="2.5"}} 0',
        f'babylon_call_duration_seconds_bucket{{{whose},le="5"}} 2',
        f'babylon_call_duration_seconds_bucket{{{whose},le="+Inf"}} 2',
        f"babylon_call_duration_seconds_count{{{whose}}} 2",
        'babylon_refused_total{status="401"} 1',
        "babylon_ready 1",
    ):
        assert line in lines
    assert not any("agent" in line for line in lines)


def test_a_duration_on_the_edge_of_a_bucket_is_inside_it() -> None:
    histogram = Histogram()
    histogram.observe(BUCKETS_S[0])
    histogram.observe(BUCKETS_S[-1] + 1)
    assert histogram.counts[0] == histogram.counts[-1] == 1
