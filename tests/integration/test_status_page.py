"""The status page over HTTP and in a real browser: who sees what, and what a button does."""

import asyncio
import json
import re
import shutil
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl
import pytest

from babylon.core.api_keys import local_key
from babylon.core.artifacts import write_artifact
from babylon.core.settings import Settings
from babylon.core.types import Scored
from babylon.core.windows import WindowState, parse_window_id
from babylon.deployment.admin.app import admin_app
from babylon.deployment.change import checks_under
from babylon.ops.pages import pairs, trajectory
from babylon.ops.status_page.app import StatusPage
from babylon.scoring.judge.validity import JudgedGroup
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.recording_rules import HIDDEN_MESSAGES
from babylon.store import Store
from babylon.store.api_keys import create_key, revoke_key, rotate_key
from babylon.store.approvals import ask_approval, get_approval
from babylon.store.calls import insert_calls
from babylon.store.holds import hold, running_hold
from babylon.store.judge_validity import JudgeIdentity, WindowValidity, store_validity
from babylon.store.people import read_answers
from babylon.store.routes import commit_route, current_route
from babylon.store.scores import StoredScore, replace_scores
from babylon.store.windows import claim_window, set_state
from tests.chromium import keyboard
from tests.conftest import real_rows
from tests.deployments import announced, three_policies
from tests.integration.game import insert_real_window
from tests.integration.test_serving import on_uvicorn
from tests.unit.serving.gateway.calls import CALL, call

WINDOW = "2025-11-14T07:00"
HOSTILE = "<script>document.title='owned'</script>"
REASON = "the market resolved YES"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Browser:
    """Keeps its cookie and fills in forms as a person's browser does."""

    http: aiohttp.ClientSession
    url: str

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> tuple[int, str]:
        async with self.http.post(self.url + path, data=fields, headers=headers) as answer:
            return answer.status, await answer.text()

    async def sign_in(self, key: object) -> tuple[int, str]:
        return await self.post("/login", {"key": str(key)})

    async def fields(self, path: str = "/policies") -> dict[str, str]:
        """The hidden fields of a page's forms."""
        _, page = await self.get(path)
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page))


@pytest.fixture
async def browser(store: Store, settings: Settings) -> AsyncIterator[Browser]:
    """A fleet with three policies, one judged window, and hostile text in play."""
    await three_policies(store)
    await insert_real_window(store)
    rows = real_rows("trajectories")
    name = str(rows[0]["trajectoryId"])
    await store.pool.execute(
        'UPDATE trajectories SET "stepsJson" = replace("stepsJson", \'HOLD\', $1)', HOSTILE
    )
    claim = await claim_window(store, parse_window_id(WINDOW), owner="box:1:a", lease_s=600)
    played = {"trajectory_id": name, "agent_id": HOSTILE, "scenario_id": "s", "pnl_usd": 1.5}
    artifact = write_artifact(
        settings.home, pl.DataFrame([played]), window_id=WINDOW, stage="scored"
    )
    score = StoredScore(trajectory_id=name, scorer="judge", score=0.5, reasons=[REASON])
    await replace_scores(store, claim, [score])
    scored = Scored(
        claim=claim, artifact=artifact, eligible=1, agents=1, scorer="judge", avg_reward=0.5
    )
    await set_state(store, claim, WindowState.SCORED, reason=HOSTILE, scored=scored)
    checks = checks_under(settings)
    app = admin_app(store, settings.home, checks)
    StatusPage(store, settings.home, checks).add_to(app)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        jar = aiohttp.CookieJar(unsafe=True)  # an address has cookies too
        async with on_uvicorn(app, listener), aiohttp.ClientSession(cookie_jar=jar) as http:
            yield Browser(http, f"http://127.0.0.1:{listener.getsockname()[1]}")


async def test_without_a_key_there_is_only_the_sign_in(browser: Browser, store: Store) -> None:
    for path in ("/", "/policies", f"/windows/{WINDOW}", "/compare?one=0&other=1"):
        assert "<h1>Sign in</h1>" in (await browser.get(path))[1]
    infer = await create_key(store, "agent", scopes=["infer"])
    assert (await browser.sign_in(infer))[0] == 403
    assert (await browser.sign_in("sk-babylon-nobody-nothing"))[0] == 401
    bound = await create_key(store, "one agent's", scopes=["read"], agents=[HOSTILE])
    assert (await browser.sign_in(bound))[0] == 403
    headers = {"authorization": f"Bearer {bound}"}
    async with browser.http.get(f"{browser.url}/windows/{WINDOW}", headers=headers) as answer:
        assert "<h1>Sign in</h1>" in await answer.text()
    assert "<h1>Sign in</h1>" in (await browser.get("/"))[1]


async def test_a_session_ends_with_the_secret_that_began_it(browser: Browser, store: Store) -> None:
    former = await create_key(store, "reader", scopes=["read"])
    present = await rotate_key(store, former.key_id, timedelta(hours=1))
    end = "UPDATE babylon.api_keys SET former_until = now() WHERE key_id = $1"
    for shown, stays in ((former, False), (present, True)):
        await browser.sign_in(shown)
        assert "<h1>Sign in</h1>" not in (await browser.get("/"))[1]
        await store.pool.execute(end, former.key_id)
        assert ("<h1>Sign in</h1>" not in (await browser.get("/"))[1]) == stays
    await revoke_key(store, former.key_id)
    assert "<h1>Sign in</h1>" in (await browser.get("/"))[1]


async def test_a_reader_of_all_agents_sees_the_judges_scores(
    browser: Browser, store: Store
) -> None:
    await browser.sign_in(await create_key(store, "reader", scopes=["read"]))
    _, page = await browser.get(f"/windows/{WINDOW}")
    assert re.search(r"<td[^>]*>\s*0\.5", page), page


async def test_a_reader_sees_play_escaped_and_no_ground_truth_and_no_button(
    browser: Browser, store: Store
) -> None:
    key = await create_key(store, "reader", scopes=["read"])
    assert "<h1>The fleet</h1>" in (await browser.sign_in(key))[1]
    pages = [(await browser.get(path))[1] for path in ("/", f"/windows/{WINDOW}", "/policies")]
    (trajectory,) = set(re.findall(r'href="(/trajectories/[^"]+)"', pages[1]))
    pages.append((await browser.get(trajectory))[1])
    assert all(HOSTILE not in page and REASON not in page for page in pages)
    assert "&lt;script&gt;" in pages[1] and "&lt;script&gt;" in pages[3]
    assert not any("Promote" in page or "Roll back" in page for page in pages)
    assert not any(word in pages[3] for word in ("correctness", "actualOutcome", "futureOutcomes"))
    assert "<h2>Score 0.500</h2>" in pages[3]
    forged = {**await browser.fields("/"), "route_version": "1", "policy_version": "1"}
    assert (await browser.post("/promote", forged))[0] == 403
    await revoke_key(store, key.key_id)
    assert "<h1>Sign in</h1>" in (await browser.get("/"))[1]


async def test_a_gate_that_played_nothing_shows_no_games_and_no_promotion(
    browser: Browser, store: Store, settings: Settings
) -> None:
    await browser.sign_in(local_key(settings.home.root))
    window, verdict = "/windows/2025-11-14T09:00", {"promote": True, "reason": "a canary decides"}
    for scenarios in (0, 8):
        await store.pool.execute(
            "UPDATE babylon.policies SET verdict = $1 WHERE policy_version = 1",
            {**verdict, "scenarios": scenarios},
        )
        page = (await browser.get(window))[1]
        assert "Passed the gate: a canary decides" in page and "Promoted" not in page
        assert ("both played the same" in page) == bool(scenarios)


async def test_a_button_changes_the_route_that_it_showed_once(
    browser: Browser, store: Store, settings: Settings
) -> None:
    await browser.sign_in(local_key(settings.home.root))
    assert REASON not in (await browser.get(f"/windows/{WINDOW}"))[1]
    assert "Promote" not in (await browser.get("/policies"))[1]  # any program has the local key
    key = await create_key(store, "operator", scopes=["deploy"])
    await browser.sign_in(key)
    _, page = await browser.get(f"/windows/{WINDOW}")
    assert REASON in page
    (trajectory,) = set(re.findall(r'href="(/trajectories/[^"]+)"', page))
    assert REASON in (await browser.get(trajectory))[1]
    before = await current_route(store)
    await commit_route(
        store,
        policy_version=1,
        author="test",
        reason="test",
        expected_route_version=before.route_version,
    )
    fields = await browser.fields()
    for wrong in ({"form_token": "no"}, {"form_token": ""}):
        assert (await browser.post("/rollback", {**fields, **wrong}))[0] == 403
    for origin in ("http://127.0.0.1:4200", "null", "http://["):
        assert (await browser.post("/rollback", fields, origin=origin))[0] == 403
    async with announced(store, holds=(0, 1)):
        assert (await browser.post("/rollback", fields))[0] == 200
        now = await current_route(store)
        assert (now.policy_version, now.author) == (before.policy_version, f"key {key.key_id}")
        status, page = await browser.post("/rollback", fields)  # the second click
    assert status == 409 and "came into force meanwhile" in page
    assert await current_route(store) == now
    fields = {**await browser.fields("/policies"), "policy_version": "2"}
    assert (await browser.post("/promote", fields))[0] == 200
    promoted = await current_route(store)
    assert (promoted.policy_version, promoted.author) == (2, f"key {key.key_id}")
    assert (await browser.post("/promote", fields))[0] == 409
    assert await current_route(store) == promoted


async def test_a_policy_that_waits_is_approved_by_its_button_once(
    browser: Browser, store: Store, settings: Settings
) -> None:
    claim = await claim_window(store, parse_window_id(WINDOW), owner="box:1:a", lease_s=600)
    await ask_approval(store, claim, 2, timedelta(hours=1))
    await hold(store, "alice", HOSTILE)
    answer = {"policy_version": "2", "answer": "approve"}
    await browser.sign_in(await create_key(store, "reader", scopes=["read"]))
    _, page = await browser.get("/")
    assert "Policy 2 waits for an approval" in page and "Deploy policy 2" not in page
    assert "On hold:" in page and HOSTILE not in page
    assert (await browser.post("/approval", {**await browser.fields(), **answer}))[0] == 403
    key = await create_key(store, "operator", scopes=["deploy"])
    assert "Deploy policy 2" in (await browser.sign_in(key))[1]
    fields = {**await browser.fields(), **answer}
    assert (await browser.post("/approval", {**fields, "answer": "perhaps"}))[0] == 400
    status, page = await browser.post("/approval", fields)
    assert status == 200 and "waits for an approval" not in page
    assert (await get_approval(store, 2)).author == f"key {key.key_id}"
    status, page = await browser.post("/approval", {**fields, "answer": "refuse"})
    assert status == 409 and "approved by key" in page


async def test_training_is_held_and_resumed_by_button(browser: Browser, store: Store) -> None:
    await browser.sign_in(await create_key(store, "reader", scopes=["read"]))
    reason = {"reason": HOSTILE}
    assert "Hold training" not in (await browser.get("/"))[1]
    assert (await browser.post("/hold", {**await browser.fields("/"), **reason}))[0] == 403
    key = await create_key(store, "operator", scopes=["deploy"])
    await browser.sign_in(key)
    fields = await browser.fields("/")
    assert (await browser.post("/hold", {**fields, "reason": " "}))[0] == 400
    status, page = await browser.post("/hold", {**fields, **reason})
    assert status == 200 and "Resume training" in page and HOSTILE not in page
    running = await running_hold(store)
    assert running is not None and (running.author, running.reason) == (
        f"key {key.key_id}",
        HOSTILE,
    )
    status, page = await browser.post("/resume", await browser.fields("/"))
    assert status == 200 and "Hold training" in page
    assert await running_hold(store) is None
    holds = await asyncio.gather(*(hold(store, f"author {n}", "together") for n in range(8)))
    assert len({(one.author, one.since) for one in holds}) == 1  # one hold, and no error


async def test_of_a_long_trajectory_the_first_steps_are_shown_and_nobody_waits_for_it(
    browser: Browser, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _judged_window(store)
    await browser.sign_in(await create_key(store, "operator", scopes=["read", "deploy"]))
    await store.pool.execute('UPDATE trajectories SET "stepsJson" = $1', json.dumps([{}] * 5))
    on_the_loop: set[bool] = set()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            on_the_loop.add(threading.current_thread() is threading.main_thread())
            return work(*args, **options)

        return run

    monkeypatch.setattr(trajectory, "MOST_STEPS", 2, raising=False)
    for owner, name in ((trajectory, "_step"), (pairs, "_lines"), (StatusPage, "_html")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    _, page = await browser.get(f"/trajectories/{real_rows('trajectories')[0]['trajectoryId']}")
    assert "5 steps" in page and "Step 2" in page and "Step 3" not in page
    assert "3 more steps are not shown" in page
    assert (await browser.get("/pairs"))[1].count("3 more steps are not shown") == 2
    assert on_the_loop == {False}


async def test_play_that_no_encoding_or_parser_takes_still_has_its_page(
    browser: Browser, store: Store, settings: Settings
) -> None:
    await browser.sign_in(local_key(settings.home.root))
    half, odd = '[{"action": {"result": "\\ud800"}}]', "a/b?c"
    rows = real_rows("trajectories")
    for steps, name, row in ((half, odd, rows[0]), ("[" * 100_000, "deep", rows[1])):
        await store.pool.execute(
            'UPDATE trajectories SET "stepsJson" = $1, "trajectoryId" = $2'
            ' WHERE "trajectoryId" = $3',
            *(steps, name, row["trajectoryId"]),
        )
    assert "Step 1" in (await browser.get("/trajectories/a%2Fb%3Fc"))[1]
    assert "0 steps" in (await browser.get("/trajectories/deep"))[1]
    assert (await browser.get("/trajectories/%00"))[0] == 404
    assert (await browser.get("/windows/%00"))[0] == 404
    await browser.sign_in(await create_key(store, "operator", scopes=["deploy"]))
    assert (await browser.get("/pairs?window=%00"))[0] == 404
    fields = await browser.fields("/")
    assert (await browser.post("/hold", {**fields, "reason": "half \0 a word"}))[0] == 200
    assert (await running_hold(store)) is not None


async def test_while_the_database_is_away_there_is_a_page_that_says_so(
    browser: Browser, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise ConnectionRefusedError("postgresql://owner@secret.example")

    monkeypatch.setattr(KeyRing, "renew", away)
    for status, page in (await browser.get("/"), await browser.sign_in("sk-babylon-a-b")):
        assert status == 503 and "the database does not answer" in page and "secret" not in page


async def test_a_form_of_many_fields_is_refused(browser: Browser) -> None:
    """A page elsewhere may send one to the sign-in from the operator's browser, again and again."""
    status, answer = await browser.post("/login", {f"field{one}": "x" for one in range(1000)})
    assert status == 400 and "more than 20 fields" in answer
    assert (await browser.sign_in("x"))[0] == 401


async def test_two_policies_are_compared_word_by_word(
    browser: Browser, store: Store, settings: Settings
) -> None:
    await browser.sign_in(local_key(settings.home.root))
    status, page = await browser.get("/compare?one=0&other=1")
    assert status == 200 and "0 prompts that both answered lately" in page
    assert (await browser.get("/compare?one=-1&other=x"))[0] == 200
    hidden = json.dumps(HIDDEN_MESSAGES)
    prompts = [CALL.messages, CALL.messages, hidden, hidden]
    await insert_calls(
        store,
        [
            call(n, policy_version=n % 2, messages=text, started_at=datetime.now(UTC))
            for n, text in enumerate(prompts)
        ],
    )
    page = (await browser.get("/compare?one=0&other=1"))[1]
    assert "1 prompts that both answered lately" in page and "redacted" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("dark", [False, True])
async def test_the_page_is_drawn_by_a_browser_and_hostile_text_runs_nothing(
    browser: Browser, store: Store, settings: Settings, tmp_path: Path, dark: bool
) -> None:
    """Chromium cannot sign in without a driver, so a relay adds the key's header."""
    from tests.key_relay import key_relay

    (row, *_) = real_rows("trajectories")
    async with key_relay(browser.url, str(local_key(settings.home.root))) as url:
        shot = tmp_path / "page.png"
        title, pixels = await _drawn(url + f"/trajectories/{row['trajectoryId']}", shot, dark)
        assert "owned" not in title and "Trajectory" in title
        assert pixels == (1000, 800)
        title, _ = await _drawn(f"{url}/", shot, dark)
        assert "Fleet" in title


async def _drawn(url: str, shot: Path, dark: bool) -> tuple[str, tuple[int, int]]:
    """Return the title after all scripts had their chance, and the size of the screenshot."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"]
    options += [f"--user-data-dir={shot.parent / 'profile'}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    for what in ([f"--screenshot={shot}"], ["--dump-dom"]):
        child = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *options,
            *what,
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        page, _ = await child.communicate()
    title = re.search(r"<title>(.*?)</title>", page.decode(), re.DOTALL)
    return title[1] if title else "", struct.unpack(">II", shot.read_bytes()[16:24])


async def _judged_window(store: Store, window_id: str = WINDOW) -> None:
    """One judge's opinions of three of the recorded plays."""
    ids = [str(row["trajectoryId"]) for row in real_rows("trajectories")][:3]
    group = JudgedGroup(
        opinions=(0.1, 0.5, 0.9),
        errors=(0.1,) * 3,
        outcomes=(1.0, 2.0, 3.0),
        trajectory_ids=tuple(ids),
    )
    by = JudgeIdentity(judge="j", method="ruler", rubric="r")
    await store_validity(store, WindowValidity(window_id=window_id, by=by, groups=[group]))


async def test_a_person_judges_pairs_and_each_answer_needs_the_form(
    browser: Browser, store: Store
) -> None:
    await _judged_window(store)
    await browser.sign_in(await create_key(store, "reader", scopes=["read"]))
    assert (await browser.get("/pairs"))[0] == 403  # the page tells the outcome
    key = await create_key(store, "operator", scopes=["deploy"])
    await browser.sign_in(key)
    _, page = await browser.get("/pairs")
    assert "Play 2 is better" in page and HOSTILE not in page and "&lt;script&gt;" in page
    fields = {**await browser.fields("/pairs"), "better": "second", "because": HOSTILE}
    assert (await browser.post("/pairs", {**fields, "form_token": "no"}))[0] == 403
    assert (await browser.post("/pairs", {**fields, "first": "other"}))[0] == 409
    assert await read_answers(store) == []
    for _ in range(2):  # a second click changes nothing
        assert (await browser.post("/pairs", fields))[0] == 200
    (answer,) = await read_answers(store, [WINDOW], f"key {key.key_id}")
    assert (answer.better, answer.worse) == (fields["second"], fields["first"])
    for _ in range(2):
        fields = {**await browser.fields("/pairs"), "better": "first"}
        _, page = await browser.post("/pairs", fields)
    assert "Every pair is answered" in page and len(await read_answers(store)) == 3


async def test_a_pair_of_a_window_that_starts_within_an_hour_is_shown(
    browser: Browser, store: Store
) -> None:
    window = parse_window_id("2025-11-14T07:15", 15)
    await claim_window(store, window, owner="box:1:a", lease_s=600)
    await _judged_window(store, window.id)
    await browser.sign_in(await create_key(store, "operator", scopes=["deploy"]))
    status, page = await browser.get(f"/pairs?window={window.id}")
    assert status == 200 and "Play 2 is better" in page


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_a_reason_on_a_telephone_is_no_column_of_single_words(
    browser: Browser, store: Store, settings: Settings, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    await store.pool.execute("UPDATE babylon.windows SET reason = repeat('why it is so ', 20)")
    async with keyboard(CHROMIUM, tmp_path / "profile") as keys:
        await keys.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True},
        )
        await keys.open(f"{browser.url}/")
        await keys.tab_to("it.name == 'key'")
        await keys.type(str(local_key(settings.home.root)))
        await keys.press("Enter")
        await keys.shows("document.title.startsWith('Fleet')")
        assert await keys.value("document.querySelector('td.words').offsetWidth") >= 256
        assert await keys.value("document.documentElement.scrollWidth") == 390


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_a_person_judges_pairs_by_the_keyboard_alone(
    browser: Browser, store: Store, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    await _judged_window(store)
    key = await create_key(store, "operator", scopes=["deploy"])
    async with keyboard(CHROMIUM, tmp_path / "profile") as keys:
        await keys.open(f"{browser.url}/")
        await keys.tab_to("it.name == 'key'")
        await keys.type(str(key))
        await keys.press("Enter")
        await keys.shows("document.title.startsWith('Fleet')")
        await keys.tab_to("it.textContent == 'Judge'")
        await keys.press("Enter")
        await keys.shows("document.title.startsWith('Judge a pair')")
        for dark in (False, True):
            await keys.draw(tmp_path / f"pairs-{dark}.png", dark=dark)
        second = await keys.value("document.getElementsByName('second')[0].value")
        await keys.tab_to("it.name == 'because'")
        await keys.type("it read the news")
        await keys.press("Enter")  # a new line, and no answer
        await asyncio.sleep(0.3)
        assert await read_answers(store) == []
        await keys.tab_to("it.value == 'second'")
        await keys.press("Space")
        await keys.shows("document.body.innerText.includes('answered 1 of')")
        assert await keys.value("document.title") == "Judge a pair · Babylon"
    (answer,) = await read_answers(store, [WINDOW], f"key {key.key_id}")
    assert answer.better == second
