"""Alerts arrive: a real Prefect server, its automations, a webhook and a mail server."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email import message_from_bytes
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from aiohttp import web
from aiosmtpd.controller import Controller
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import SecretStr

from babylon.ops.prefect_env import PrefectApi, inline_environment
from babylon.ops.up import alerts
from babylon.ops.up.alerts import set_up_alerts
from babylon.ops.up.news import NewsItem
from babylon.ops.up.prefect_call import call
from tests.ports import free_port

START_S = 600


class Mailbox:
    """Keeps what the mail server takes."""

    def __init__(self) -> None:
        self.mails: list[bytes] = []

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        self.mails.append(envelope.content)
        return "250 OK"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[PrefectApi]:
    """A whole server: the one of inline flows fires no automations."""
    port = free_port()
    database = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    environment = {
        **os.environ,
        **inline_environment(tmp_path),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
    }
    (tmp_path / "prefect").mkdir()
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    api = PrefectApi(url=f"http://127.0.0.1:{port}/api")
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(START_S):
            while not await _answers(http, api):
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                await asyncio.sleep(0.2)
        yield api
    finally:
        server.terminate()
        server.wait()


async def _answers(http: aiohttp.ClientSession, api: PrefectApi) -> bool:
    try:
        async with http.get(f"{api.url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@dataclass
class Hook:
    """A webhook, and the messages that it got."""

    url: str
    posted: "asyncio.Queue[dict[str, Any]]"


@pytest.fixture
async def hook(api: PrefectApi) -> AsyncIterator[Hook]:
    """It is the block ``custom-webhook/oncall`` of the server."""
    posted: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        posted.put_nowait(await request.json())
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/services/T0/B0/secret", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/services/T0/B0/secret"
    with temporary_settings({PREFECT_API_URL: api.url}):
        # Slack takes exactly this JSON at its incoming webhooks.
        await CustomWebhookNotificationBlock(
            name="oncall", url=url, json_data={"text": "{{subject}}: {{body}}"}
        ).save("oncall")
    yield Hook(url, posted)
    await runner.cleanup()


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # by a plugin of Apprise
async def test_bad_news_reaches_a_webhook_and_a_mailbox(api: PrefectApi, hook: Hook) -> None:
    box = Mailbox()
    mail = Controller(box, hostname="127.0.0.1", port=free_port())
    mail.start()
    to = f"mailto://127.0.0.1:{mail.port}?from=babylon@example.com&to=oncall@example.com"
    try:
        with temporary_settings({PREFECT_API_URL: api.url}):
            await SlackWebhook(url=SecretStr(to)).save("mail")
        async with aiohttp.ClientSession() as http, asyncio.timeout(300):
            await set_up_alerts(http, api, "custom-webhook/oncall", 60)
            said = await _tell_until(http, api, lambda: not hook.posted.empty())
            assert hook.posted.get_nowait() == {"text": f"babylon: bad news: {said}"}
            await set_up_alerts(http, api, "slack-webhook/mail", 60)
            said = await _tell_until(http, api, lambda: bool(box.mails))
            sent = message_from_bytes(box.mails[0])
            assert (sent["To"], sent["Subject"]) == ("oncall@example.com", "babylon: bad news")
            assert any(
                said in (part.get_payload(decode=True) or b"").decode()  # type: ignore[union-attr]
                for part in sent.walk()
                if not part.is_multipart()
            )
    finally:
        mail.stop()


async def test_what_does_not_happen_in_time_reaches_the_webhook(
    api: PrefectApi, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is never finished, and none after it; ten seconds instead of hours."""
    monkeypatch.setattr(alerts, "NO_WINDOW_S", 10)
    monkeypatch.setattr(alerts, "SLA_S", 10)
    missing = {"babylon: no new window", "babylon: a window takes long"}
    async with aiohttp.ClientSession() as http, asyncio.timeout(300):
        await set_up_alerts(http, api, "custom-webhook/oncall", 0)
        while missing:  # the server takes up automations by and by
            await call(http, api, "POST", "events", [_news("window.ready", "is ready").body()])
            with suppress(TimeoutError):
                async with asyncio.timeout(30):  # every event of the window begins its time anew
                    while missing:
                        text = (await hook.posted.get())["text"]
                        missing.discard(text.rpartition(": ")[0])


def _news(event: str, message: str) -> NewsItem:
    return NewsItem(
        event=event,
        subject="window.2025-11-14T09:00",
        mark=str(uuid4()),
        at=datetime.now(UTC),
        message=message,
    )


async def _tell_until(http: aiohttp.ClientSession, api: PrefectApi, arrived: Any) -> str:
    """Send an event again until its alert arrives. The server takes up automations by and by."""
    while not arrived():
        news = _news("window.failed", "the disk is full")
        await call(http, api, "POST", "events", [news.body()])
        for _ in range(20):
            if arrived():
                break
            await asyncio.sleep(0.25)
    return "babylon.window.failed: the disk is full"
