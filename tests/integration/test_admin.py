"""The admin API over HTTP: what it changes, whom it lets, and how it refuses."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.deployment.admin import app as admin_module
from babylon.deployment.admin.app import admin_app
from babylon.deployment.change import checks_under
from babylon.store import Store
from babylon.store.api_keys import create_key, revoke_key
from babylon.store.gateways import GatewayRow, announce_gateway, live_gateways
from babylon.store.proposals import open_proposals
from babylon.store.routes import commit_route, current_route, list_routes
from tests.deployments import announced, serving, three_policies
from tests.integration.test_serving import on_uvicorn


@dataclass
class Client:
    """Asks the admin API with one key."""

    http: aiohttp.ClientSession
    url: str
    key: str

    async def ask(
        self, method: str, path: str, body: object = None, key: str | None = None
    ) -> tuple[int, Any]:
        """Status and decoded answer; bytes go out as they are."""
        data = {"data": body} if isinstance(body, bytes) else {"json": body} if body else {}
        headers = {"authorization": f"Bearer {key or self.key}"}
        async with self.http.request(method, self.url + path, headers=headers, **data) as answer:
            return answer.status, await answer.json()

    async def get(self, what: str, **options: Any) -> tuple[int, Any]:
        return await self.ask("GET", f"/admin/{what}", **options)

    async def post(self, what: str, body: object = None, **options: Any) -> tuple[int, Any]:
        return await self.ask("POST", f"/admin/{what}", body, **options)


@pytest.fixture
async def admin(store: Store, settings: Settings) -> AsyncIterator[Client]:
    """Policy 0 serves; 1 and 2 are there, which only `force` gets past the checks."""
    await three_policies(store)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with (
            on_uvicorn(admin_app(store, settings.home, checks_under(settings)), listener),
            aiohttp.ClientSession() as http,
        ):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Client(http, url, str(await create_key(store, "ops", scopes=["deploy"])))


async def test_changes_take_effect_and_tell_who_asked_for_them(admin: Client, store: Store) -> None:
    async with announced(store, holds=(0,)):
        body = {"policy_version": 1, "force": True, "reason": "it is better"}
        status, made = await admin.post("replace", body)
        assert (status, made["policy_version"], made["acknowledged_by"]) == (200, 1, ["g1"])
        status, made = await admin.post("canary", {"policy_version": 2, "force": True})
        assert (status, made["challenger_version"], made["share"]) == (200, 2, 0.05)
        assert (await admin.post("canary", {"share": 0.25}))[1]["salt"] == made["salt"]
        status, now = await admin.get("status")
        assert (status, now["settled"], now["route"]["share"]) == (200, True, 0.25)
        assert now["gateways"][0]["loaded"] == [0, 1, 2]
        for champion in (1, 0):
            status, made = await admin.post("rollback")
            assert (status, made["policy_version"], made["challenger_version"]) == (
                200,
                champion,
                None,
            )
    author = f"key {admin.key.split('-')[2]}"
    status, listed = await admin.get("routes")
    assert [route["author"] for route in listed["routes"]] == [author] * 5 + ["babylon"]
    assert listed["routes"][-2]["reason"].startswith("it is better; its checks were skipped")
    _, listed = await admin.get("policies")
    assert [policy["policy_version"] for policy in listed["policies"]] == [0, 1, 2]


async def test_ab_goes_to_half_of_the_agents(admin: Client, store: Store) -> None:
    status, made = await admin.post("ab", {"policy_version": 1})
    assert (status, made["mode"], made["share"]) == (200, "ab", 0.5)
    assert (await current_route(store)).challenger_version == 1


async def test_keys_need_the_scope_and_fail_when_revoked(admin: Client, store: Store) -> None:
    infer, read, deploy = [
        await create_key(store, scope, scopes=[scope]) for scope in ("infer", "read", "deploy")
    ]
    assert (await admin.get("status", key="sk-babylon-nobody-nothing"))[0] == 401
    assert (await admin.get("status", key=str(infer)))[0] == 403
    assert (await admin.get("status", key=str(read)))[0] == 200
    for scope in ("read", "deploy"):  # all agents' play is no business of one agent's key
        bound = await create_key(store, "bound", scopes=[scope], agents=["alice"])
        status, refused = await admin.get("status", key=str(bound))
        assert (status, refused["error"]["code"]) == (403, "wrong_agent")
    status, refused = await admin.post("rollback", key=str(read))
    assert (status, refused["error"]["code"]) == (403, "scope")
    assert (await admin.post("ab", {"policy_version": 1}, key=str(deploy)))[0] == 200
    await revoke_key(store, deploy.key_id)
    assert (await admin.post("rollback", key=str(deploy)))[0] == 401
    async with admin.http.get(f"{admin.url}/admin/status") as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("what", "body", "status", "message"),
    [
        ("replace", b"{", 400, "bad replace request"),
        ("replace", b"[" * 100_000, 400, "bad replace request"),
        ("replace", b"\xff\xfe", 400, "bad replace request"),
        ("replace", b"", 400, "policy_version: Field required"),
        (
            "replace",
            {"policy_version": "1"},
            400,
            "policy_version: Input should be a valid integer",
        ),
        ("replace", {"policy_version": -1}, 400, "greater than or equal to 0"),
        ("replace", {"policy_version": 2**40}, 400, "bad replace request"),
        (
            "replace",
            {"policy_version": 1, "forced": True},
            400,
            "forced: Extra inputs are not permitted",
        ),
        ("replace", {"policy_version": 1, "reason": "\x1b[2J"}, 400, "reason"),
        ("replace", {"policy_version": 1, "reason": "long" * 100}, 400, "reason"),
        ("replace", {"policy_version": 77}, 404, "no policy version 77: see `babylon model list`"),
        ("ab", {"policy_version": 1, "share": 1.0}, 400, "share"),
        ("ab", {"policy_version": 0}, 409, "policy 0 is the champion"),
        ("canary", {"share": 0.2}, 409, "no canary runs"),
        ("rollback", {}, 404, "nothing to roll back to"),
        ("restart", {}, 404, "there is no POST '/admin/restart'"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_the_gateways_error_shape(
    admin: Client, store: Store, what: str, body: object, status: int, message: str
) -> None:
    found, refused = await admin.post(what, body)
    assert (found, message in refused["error"]["message"]) == (status, True), refused
    assert set(refused["error"]) == {"message", "type", "param", "code"}
    assert len(await list_routes(store)) == 1 and await serving(store) == 0
    assert (await admin.get("status"))[0] == 200


async def test_failed_checks_are_422_and_failed_loads_503(admin: Client, store: Store) -> None:
    async with announced(store, refuses={2: "out of memory"}):
        status, refused = await admin.post("replace", {"policy_version": 1})
        assert (status, refused["error"]["code"]) == (422, "CheckpointRefusedError")
        assert "policy 0 keeps serving" in refused["error"]["message"]
        status, refused = await admin.post("replace", {"policy_version": 2})
        assert (status, refused["error"]["code"]) == (503, "ServingError")
        assert "out of memory" in refused["error"]["message"]
    assert await serving(store) == 0


@pytest.mark.parametrize("name", ["", "  "])
async def test_a_key_without_a_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="give it one that tells keys apart"):
        await create_key(store, name, scopes=["infer"])
    with pytest.raises(ConfigError, match=r"one of them is empty"):
        await create_key(store, "key", scopes=["infer"], agents=["alice", name])


async def test_the_schema_names_every_route_and_needs_no_key(admin: Client) -> None:
    async with admin.http.get(f"{admin.url}/openapi.json") as response:
        assert response.status == 200
        schema = await response.json()
    assert set(schema["paths"]["/admin/replace"]["post"]["responses"]) >= {"200"}
    fields = schema["components"]["schemas"]["Replace"]
    assert (fields["required"], fields["additionalProperties"]) == (["policy_version"], False)
    assert (await admin.ask("GET", "/docs"))[0] == 404


async def test_while_an_experiment_runs_another_change_is_409(admin: Client) -> None:
    assert (await admin.post("ab", {"policy_version": 1}))[0] == 200
    for what in ("replace", "ab"):
        status, refused = await admin.post(what, {"policy_version": 2})
        assert (status, refused["error"]["code"]) == (409, "ExperimentError")


@asynccontextmanager
async def loading(admin: Client, store: Store) -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
    """A change that waits until a gateway has loaded policy 1."""
    await announce_gateway(store, GatewayRow(gateway_id="g1", url="http://one", route_version=1))
    asked = asyncio.create_task(admin.post("replace", {"policy_version": 1, "force": True}))
    while not await open_proposals(store):
        await asyncio.sleep(0.01)
    _, now = await admin.get("status")  # answers meanwhile
    assert [proposal["policy_version"] for proposal in now["proposals"]] == [1]
    yield asked


async def test_a_change_made_meanwhile_is_409(admin: Client, store: Store) -> None:
    async with loading(admin, store) as asked:
        await commit_route(
            store, policy_version=2, author="other", reason="quicker", expected_route_version=1
        )
        async with announced(store):
            status, refused = await asked
    assert (status, refused["error"]["code"]) == (409, "RouteConflictError")
    assert await serving(store) == 2


async def test_a_client_that_leaves_does_not_stop_the_change(admin: Client, store: Store) -> None:
    async with loading(admin, store) as asked:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    async with announced(store), asyncio.timeout(20):
        while [one.route_version for one in await live_gateways(store)] != [2]:
            await asyncio.sleep(0.01)
    assert await serving(store) == 1


async def test_a_body_without_bounds_is_not_read(admin: Client) -> None:
    reader, writer = await asyncio.open_connection(*urlsplit(admin.url).netloc.split(":"))
    head = f"POST /admin/replace HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {admin.key}\r\n"
    writer.write(f"{head}content-length: {2**40}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413") and b"larger than" in answer
    writer.close()
    await writer.wait_closed()


async def test_a_bug_is_500_in_the_same_shape_and_its_traceback_is_logged(
    admin: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(store: Store) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr("babylon.deployment.admin.app.deployment_status", broken)
    status, refused = await admin.get("status")
    assert (status, refused["error"]["code"]) == (500, "internal")
    assert set(refused["error"]) == {"message", "type", "param", "code"}
    assert "nobody thought of this" in caplog.text and "Traceback" in caplog.text
    assert (await admin.get("routes"))[0] == 200


async def test_without_a_database_it_says_so(admin: Client, store: Store) -> None:
    await store.pool.execute("ALTER TABLE babylon.api_keys RENAME TO hidden")
    status, refused = await admin.get("status")
    assert (status, "database" in refused["error"]["message"]) == (503, True)
    await store.pool.execute("ALTER TABLE babylon.hidden RENAME TO api_keys")
    assert (await admin.get("status"))[0] == 200
    async with admin.http.get(f"{admin.url}/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_an_answer_has_the_newest_policies_and_the_next_one_those_before(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window may bring a policy with its metrics: a year's are a hundred megabytes."""
    monkeypatch.setattr(admin_module, "MOST_POLICIES", 2)
    pages = [(await admin.get(f"policies{rest}"))[1] for rest in ("", "?before=1", "?before=0")]
    found = [[one["policy_version"] for one in page["policies"]] for page in pages]
    assert found == [[1, 2], [0], []]
    for bad in ("x", "-1", "9999999999"):
        assert (await admin.get(f"policies?before={bad}"))[0] == 400
