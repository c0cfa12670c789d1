"""The dashboard and the alerts of deploy/ beside what gateway and admin API really export."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from babylon.core.settings import Settings
from babylon.core.windows import WindowState
from babylon.deployment.admin.flow_metrics import flow_metrics
from babylon.store import Store
from babylon.store.flow_state import FlowState, read_flow_state
from babylon.store.window_health import WindowHealth
from tests.integration.canned_gateway import HELLO, canned_gateway
from tests.integration.test_serving_poisoned import Poisoned

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "babylon.json"
PROMTOOL = shutil.which("promtool")
PROMETHEUS_ADDS = {"job", "instance"}
Metrics = dict[str, dict[str, set[str]]]


def test_the_key_that_prometheus_reads_is_not_committed_with_a_checkout() -> None:
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    key = configuration["scrape_configs"][0]["authorization"]["credentials_file"]
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert any(fnmatch(key, pattern) for pattern in ignored)


def alerts() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def queries() -> list[str]:
    return [rule["expr"] for rule in alerts()] + dashboard_queries()


def exported(*texts: str) -> Metrics:
    """Metric → label → values."""
    found: Metrics = {"up": {}}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.setdefault(sample.name, defaultdict(set))
                for name, value in sample.labels.items():
                    labels[name].add(value)
    return found


async def scrape(store: Store, settings: Settings) -> Metrics:
    """Metrics of both after a call, a failed one, a refused one and a finished window."""
    async with canned_gateway(store, settings, Poisoned()) as gateway:
        async with gateway.client() as client:
            asked: dict[str, Any] = {"model": "babylon", "messages": HELLO}
            async for _ in await client.chat.completions.create(**asked, stream=True):
                pass
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(**asked, user="cut")
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            assert (await http.get("/metrics")).status_code == 401
            of_gateway = (await http.get("/metrics", headers=headers)).text
    flow, now = await read_flow_state(store), datetime.now(UTC)
    names = ("avg_reward", "training_loss", "kl_divergence", "pnl_before", "pnl_after")
    busy = FlowState(
        **{name: getattr(flow, name) for name in ("leased", "lost", "without_truth", "judge_usd")},
        quarantined=flow.quarantined,
        windows={str(state): 1 for state in WindowState},
        newest_play=now,
        finished_at=now,
        published_at=now,
        metrics=dict.fromkeys([*names, "duration_minutes"], 0.0),
        health=WindowHealth(window_id="w", minutes=60, figures={"agents": 3.0}),
    )
    return exported(of_gateway, flow_metrics(busy, publishes=True).decode())


async def test_a_publication_is_told_for_a_week_once_publish_to_is_unset(store: Store) -> None:
    """After that, the alert NoPublishing would tell for ever of what somebody stopped."""
    flow = await read_flow_state(store)
    name = "babylon_published_timestamp_seconds"
    for days, told in ((3, True), (8, False)):
        old = replace(flow, published_at=datetime.now(UTC) - timedelta(days=days))
        assert name in exported(flow_metrics(old, publishes=True).decode())
        assert (name in exported(flow_metrics(old, publishes=False).decode())) is told


async def test_every_metric_label_and_state_of_dashboard_and_alerts_is_exported(
    store: Store, settings: Settings
) -> None:
    found = await scrape(store, settings)
    for query in queries():
        names = re.findall(r"\b(?:babylon_\w+|up)\b", query)
        assert names, query
        known = {*PROMETHEUS_ADDS, "le"}
        for name in names:
            assert name in found, f"{name} of {query}"
            known |= found[name].keys()
        for label in re.findall(r"\bby \(([^)]*)\)", query):
            assert {*label.split(", ")} <= known, query
        for name, selectors in re.findall(r"\b(babylon_\w+|up)\{([^}]*)\}", query):
            for label, operator, value in re.findall(r'(\w+)(=~|!~|=)"([^"]*)"', selectors):
                if label in PROMETHEUS_ADDS:
                    continue
                given = found[name][label]
                wanted = [value] if operator == "=" else value.split("|")
                for one in wanted:
                    assert operator == "!~" or any(re.fullmatch(one, real) for real in given), query


async def test_texts_of_alerts_and_legends_name_labels_that_their_queries_keep() -> None:
    texts = [(rule["expr"], str(rule["annotations"]), r"\$labels\.(\w+)") for rule in alerts()]
    texts += [
        (target["expr"], target["legendFormat"], r"\{\{(\w+)\}\}")
        for panel in panels()
        for target in panel.get("targets", ())
    ]
    for query, text, pattern in texts:
        for label in re.findall(pattern, text):
            grouped = re.search(r"\bby \(([^)]*)\)", query)
            kept = grouped[1].split(", ") if grouped else [label]
            assert label in kept, f"{label} of {query}"


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 39 and board["uid"] == "babylon"
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${source}"
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "remedy"}


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load((ALERTS.parent / "alerts_test.yaml").read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    fires = {check["alertname"] for check in checks if check["exp_alerts"]}
    assert fires == {rule["alert"] for rule in alerts()}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_accepts_the_queries_and_the_alerts_do_as_they_say(tmp_path: Path) -> None:
    assert PROMTOOL
    values = (("$gateway", ".*"), ("$__rate_interval", "5m"))
    rules = []
    for number, query in enumerate(dashboard_queries()):
        for variable, value in values:
            query = query.replace(variable, value)
        rules.append({"record": f"query_{number}", "expr": query})
    (tmp_path / "queries.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    shutil.copytree(ALERTS.parent, tmp_path / "prometheus")
    (tmp_path / "prometheus" / "babylon.key").touch()
    for command in (
        "check rules queries.yaml",
        "check config prometheus/prometheus.yaml",
        "test rules prometheus/alerts_test.yaml",
    ):
        subprocess.run([PROMTOOL, *command.split()], cwd=tmp_path, check=True)
