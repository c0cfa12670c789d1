"""``/metrics`` of a gateway with several processes: each process answers with those of all."""

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from babylon.serving.gateway.asgi import Receive, Response, Scope, Send
from babylon.serving.gateway.dialects.translation import Application
from babylon.serving.gateway.gateway_metrics import CONTENT_TYPE
from babylon.serving.gateway.workers import Worker

_SCRAPE_S = 2.0
_KEYS = (b"authorization", b"x-api-key")


class SharedMetrics:
    """ASGI around the gateway. At its control address, a process returns its own metrics alone."""

    def __init__(self, app: Application, worker: Worker) -> None:
        self._app, self._worker = app, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (scope["method"], scope["path"]) == ("GET", "/metrics")
        if not asked or scope["server"][1] == self._worker.port:
            await self._app(scope, receive, send)
            return
        headers = [(n.decode(), v.decode("latin-1")) for n, v in scope["headers"] if n in _KEYS]
        timeout = aiohttp.ClientTimeout(_SCRAPE_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            texts = await asyncio.gather(*(_scrape(session, port) for port in self._worker.ports))
        found = {str(number): text for number, text in enumerate(texts, 1) if text is not None}
        if not found:  # the key is refused, and the gateway says why
            await self._app(scope, receive, send)
            return
        await Response(send).whole(merged(found), content_type=CONTENT_TYPE)


async def _scrape(session: aiohttp.ClientSession, port: int) -> str | None:
    """Return the metrics of a process; ``None`` if it does not answer or refuses the key."""
    try:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


class _Families(Collector):
    """Metrics that were read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of all processes; the label ``worker`` of a sample names the process.

    They are not added up: the counters of a process that starts again begin at 0. A rate of each
    process allows for that, and a rate of a sum does not.
    """
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            about = family.name, family.documentation, family.type
            known = families.setdefault(family.name, Metric(*about))
            known.samples += [
                one._replace(labels={**one.labels, "worker": worker}) for one in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
