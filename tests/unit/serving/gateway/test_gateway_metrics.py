from dataclasses import replace
from datetime import timedelta

from prometheus_client.parser import text_string_to_metric_families

from babylon.serving.gateway.gateway_metrics import MOST_POLICIES, GatewayMetrics
from tests.unit.serving.gateway.test_exchange import V3, answer, exchange


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of label names) → value."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_calls_are_counted_by_arm_and_version_and_agents_are_not_named() -> None:
    metrics, call = GatewayMetrics(), exchange(user="agent-secret")
    call.note(answer())
    call.started_at -= timedelta(seconds=3)
    metrics.called(call, "200")
    metrics.called(call, "200")
    metrics.refused(401)
    metrics.add_gauge("ready", "1 if calls are served.", lambda: 1)
    found = samples(metrics)
    assert (
        found.items()
        >= {
            ("babylon_calls_total", "champion", "200", "3"): 2,
            ("babylon_tokens_total", "champion", "prompt", "3"): 6,
            ("babylon_tokens_total", "champion", "completion", "3"): 4,
            ("babylon_call_duration_seconds_bucket", "champion", "2.5", "3"): 0,
            ("babylon_call_duration_seconds_bucket", "champion", "5.0", "3"): 2,
            ("babylon_call_duration_seconds_bucket", "champion", "+Inf", "3"): 2,
            ("babylon_call_duration_seconds_count", "champion", "3"): 2,
            ("babylon_refused_total", "401"): 1,
            ("babylon_ready",): 1,
        }.items()
    )
    assert not any("agent" in part or "_created" in part for key in found for part in key)


def test_only_the_policies_that_were_called_last_are_kept() -> None:
    metrics, call = GatewayMetrics(), exchange()
    champion = call.assigned
    for version in range(4, 4 + 2 * MOST_POLICIES):
        call.assigned = champion
        metrics.called(call, "200")
        call.assigned = replace(champion, target=replace(V3, policy_version=version))
        metrics.called(call, "200")
        metrics.called(call, "left")
    found = samples(metrics)
    assert {key[-1] for key in found if key[0] == "babylon_calls_total"} == {
        "3",
        *(str(version) for version in range(5 + MOST_POLICIES, 4 + 2 * MOST_POLICIES)),
    }
    assert found["babylon_calls_total", "champion", "200", "3"] == 2 * MOST_POLICIES
    assert len({key[-1] for key in found if key[0] == "babylon_tokens_total"}) == MOST_POLICIES
    seconds = "babylon_call_duration_seconds_count", "babylon_first_token_seconds_count"
    assert all(sum(key[0] == name for key in found) == MOST_POLICIES for name in seconds)


def test_each_gateway_counts_its_own_calls() -> None:
    one, other = GatewayMetrics(), GatewayMetrics()
    one.refused(503)
    assert samples(one) == {("babylon_refused_total", "503"): 1}
    assert samples(other) == {}
