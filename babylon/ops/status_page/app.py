"""Routes of the status page. Reading needs the scope ``read``, buttons need ``deploy``."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, quote

import msgspec
from fastapi import FastAPI, Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse

from babylon.core.api_keys import local_key, parse_key
from babylon.core.errors import BabylonError, DatabaseError, RouteConflictError
from babylon.core.home import Home
from babylon.core.text import storable
from babylon.deployment.change import ChangeRequest, RunChecks
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.evaluation.experiment.review_records import Review
from babylon.ops.pages.fleet_facts import read_fleet
from babylon.ops.pages.markdown import data_uri
from babylon.ops.pages.pairs import answer_pair, read_pair
from babylon.ops.pages.pictures import (
    Named,
    gate_pictures,
    pnl_picture,
    score_picture,
    update_picture,
)
from babylon.ops.pages.trajectory import read_trajectory
from babylon.ops.pages.window_facts import WindowFacts, gate_measure, read_window_facts
from babylon.ops.status_page.compare import read_pairs, which_is_better
from babylon.ops.status_page.logo import add_logo
from babylon.ops.status_page.session import COOKIE, LASTS_S, SessionCookies, Visitor
from babylon.serving.gateway.asgi import read_body
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.approvals import answer_approval, open_approvals
from babylon.store.connection import UNREACHABLE
from babylon.store.experiments import newest_numbers
from babylon.store.gateways import live_gateways
from babylon.store.holds import end_hold, hold, running_hold
from babylon.store.policies import list_policies, policies_about
from babylon.store.routes import current_route
from babylon.store.scores import trajectory_score

log = logging.getLogger(__name__)
POLICIES, FIELDS = 100, 20
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self' data:;"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
_SHOWN = "the pages show the play and the scores of"
Form = dict[str, str]
Picture = tuple[str, str]  # words, address


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of somebody who may read, with the fields of its form."""

    visitor: Visitor
    request: Request
    form: Form


Page = Callable[[Asked], Awaitable[Response]]


class StatusPage:
    """The pages of one home."""

    def __init__(self, store: Store, home: Home, run_checks: RunChecks) -> None:
        self._store, self._run_checks = store, run_checks
        local = local_key(home.root)
        self._keys, self._sessions = KeyRing(local), SessionCookies(local)
        self._templates = Environment(
            loader=PackageLoader("babylon.ops.status_page"),
            autoescape=True,  # play is hostile text
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application of the admin API."""

        def route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]]) -> None:
            app.add_api_route(
                path, self._with_problems(answer), methods=[method], include_in_schema=False
            )

        add_logo(app)
        route("GET", "/style.css", self._style)
        route("GET", "/login", self._login_form)
        route("POST", "/login", self._login)
        route("POST", "/logout", self._guarded(self._logout))
        route("GET", "/", self._guarded(self._fleet))
        route("GET", "/windows/{window_id}", self._guarded(self._window))
        route("GET", "/trajectories/{trajectory_id:path}", self._guarded(self._trajectory))
        route("GET", "/policies", self._guarded(self._policies))
        route("GET", "/compare", self._guarded(self._compare))
        route("GET", "/pairs", self._guarded(self._pairs))
        route("POST", "/pairs", self._guarded(self._judge_pair))
        route("POST", "/promote", self._guarded(self._promote))
        route("POST", "/rollback", self._guarded(self._roll_back))
        route("POST", "/approval", self._guarded(self._answer))
        route("POST", "/hold", self._guarded(self._hold))
        route("POST", "/resume", self._guarded(self._resume))

    def _with_problems(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer with a page, which a browser shows, also while the database is away."""

        async def answered(request: Request) -> Response:
            named = (*request.path_params.values(), *request.query_params.values())
            if any("\0" in value for value in named):  # Postgres knows no NUL
                return self._problem(None, "there is no such page", 404)
            try:
                return await answer(request)
            except UNREACHABLE as error:
                log.warning("%s %s: %r", request.method, request.url.path, error)
                return self._problem(
                    None, "the database does not answer: load the page again in some seconds", 503
                )

        return answered

    def _guarded(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """Let a session or key with the scope in, and check that a form comes from our own page."""

        async def answer(request: Request) -> Response:
            visitor = await self._visitor(request)
            if visitor is None:
                return RedirectResponse("/login", 303, HEADERS)
            form: Form = {}
            if request.method == "POST":
                form = await _form(request)
                # SameSite=Strict keeps the cookie from other sites; this refuses other ports of
                # this host too, which count as the same site.
                if not visitor.token or not _is_ours(request):
                    return self._problem(visitor, "the form was sent from another page", 403)
                if form.get("form_token") != self._sessions.form_token(visitor.token):
                    return self._problem(visitor, "the form is too old: load the page again", 403)
            try:
                return await page(Asked(visitor, request, form))
            except DatabaseError:
                raise
            except BabylonError as error:
                return self._problem(visitor, str(error), 409)

        return answer

    async def _visitor(self, request: Request) -> Visitor | None:
        await self._keys.renew(self._store)  # a revoked key is refused at once
        if "authorization" in request.headers:
            try:
                holder = self._keys.admit(request.scope["headers"], "read", "deploy")
                holder.require_all_agents(_SHOWN)
            except RequestError:
                return None
            return Visitor(holder.key_id, holder.scopes)
        token = request.cookies.get(COOKIE, "")
        visitor = self._sessions.visitor(self._keys, token) if token else None
        return visitor if visitor and visitor.may_read else None

    async def _login_form(self, request: Request) -> Response:
        return self._html("login.html", None, problem="")

    async def _login(self, request: Request) -> Response:
        key = (await _form(request)).get("key", "").strip()
        await self._keys.renew(self._store)
        try:
            if not _is_ours(request):
                raise RequestError(403, "the form was sent from another page")
            header = (b"authorization", b"Bearer " + key.encode("latin-1", "replace"))
            self._keys.admit([header], "read", "deploy").require_all_agents(_SHOWN)
        except RequestError as refused:
            page = self._html("login.html", None, problem=str(refused))
            page.status_code = refused.status
            return page
        answer = RedirectResponse("/", 303, HEADERS)
        shown = parse_key(key)
        assert shown is not None  # it was admitted
        token = self._sessions.open(shown)
        answer.set_cookie(COOKIE, token, max_age=LASTS_S, httponly=True, samesite="strict")
        return answer

    async def _logout(self, asked: Asked) -> Response:
        answer = RedirectResponse("/login", 303, HEADERS)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    async def _style(self, request: Request) -> Response:
        style = self._templates.get_template("style.css").render()
        return Response(style, media_type="text/css", headers=HEADERS)

    async def _fleet(self, asked: Asked) -> Response:
        route, windows = await current_route(self._store), await read_fleet(self._store)
        named = [(one.row.window_id, one.row.metrics) for one in windows]
        return self._html(
            "fleet.html",
            asked.visitor,
            route=route,
            gateways=await live_gateways(self._store),
            review=await self._review(route.salt) if route.salt else None,
            approvals=await open_approvals(self._store),
            holding=await running_hold(self._store),
            windows=windows[::-1],
            judge_usd=sum(one.usd for one in windows),
            pictures=await asyncio.to_thread(_fleet_pictures, named),
        )

    async def _review(self, salt: str) -> Review | None:
        numbers = await newest_numbers(self._store, salt)
        return msgspec.convert(numbers, Review) if numbers else None

    async def _window(self, asked: Asked) -> Response:
        facts = await read_window_facts(self._store, asked.request.path_params["window_id"])
        if facts is None:
            return self._problem(asked.visitor, "nobody ever claimed a window of this id", 404)
        pictures = await asyncio.to_thread(_window_pictures, facts)
        return self._html("window.html", asked.visitor, facts=facts, pictures=pictures)

    async def _trajectory(self, asked: Asked) -> Response:
        trajectory_id = asked.request.path_params["trajectory_id"]
        shown = await read_trajectory(self._store, trajectory_id)
        if shown is None:
            return self._problem(asked.visitor, "there is no trajectory of this id", 404)
        score = await trajectory_score(self._store, trajectory_id)
        about = {"shown": shown, "score": score}
        return await asyncio.to_thread(self._html, "trajectory.html", asked.visitor, **about)

    async def _policies(self, asked: Asked) -> Response:
        policies = (await list_policies(self._store, newest=POLICIES))[::-1]
        route = await current_route(self._store)
        return self._html("policies.html", asked.visitor, policies=policies, route=route)

    async def _compare(self, asked: Asked) -> Response:
        named = [asked.request.query_params.get(name, "") for name in ("one", "other")]
        one, other = [int(text) if text.isdecimal() and len(text) < 10 else None for text in named]
        pairs, policies, better = None, [], ""
        if one is not None and other is not None:
            pairs = await read_pairs(self._store, one, other)
            both = await policies_about(self._store, None, (one, other))
            policies = [both[version] for version in sorted(both)]
            better = which_is_better(*policies) if len(policies) == 2 else ""
        about = {"one": one, "other": other, "policies": policies, "better": better}
        return self._html("compare.html", asked.visitor, pairs=pairs, **about)

    async def _pairs(self, asked: Asked) -> Response:
        """Show a pair to judge. Plays stand beside what really happened."""
        if not asked.visitor.may_change:
            return self._problem(asked.visitor, "this needs a key with the scope deploy", 403)
        window_id = asked.request.query_params.get("window") or None
        pair = await read_pair(self._store, f"key {asked.visitor.key_id}", window_id)
        return await asyncio.to_thread(self._html, "pairs.html", asked.visitor, pair=pair)

    async def _judge_pair(self, asked: Asked) -> Response:
        form = asked.form
        if not asked.visitor.may_change:
            return self._problem(asked.visitor, "this needs a key with the scope deploy", 403)
        first, second = form.get("first", ""), form.get("second", "")
        better = {"first": first, "second": second}.get(form.get("better", ""), "")
        window_id, because = form.get("window_id", ""), form.get("because", "").strip()
        person = f"key {asked.visitor.key_id}"
        await answer_pair(self._store, person, window_id, first, second, better, because)
        return RedirectResponse(f"/pairs?window={quote(window_id)}", 303, HEADERS)

    async def _promote(self, asked: Asked) -> Response:
        version = _policy(asked.form)
        if version is None:
            return self._problem(asked.visitor, "the form names no policy", 400)
        return await self._change(
            asked,
            lambda request: replace_champion(self._store, self._run_checks, version, request),
        )

    async def _answer(self, asked: Asked) -> Response:
        """Approve or refuse the deployment of a policy. The run that waits acts on it."""
        version, answer = _policy(asked.form), asked.form.get("answer")
        if version is None or answer not in ("approve", "refuse"):
            return self._problem(asked.visitor, "the form names no policy and no answer", 400)
        if not asked.visitor.may_change:
            return self._problem(asked.visitor, "this needs a key with the scope deploy", 403)
        author = f"key {asked.visitor.key_id}"
        await answer_approval(self._store, version, answer == "approve", author, "status page")
        return RedirectResponse("/", 303, HEADERS)

    async def _hold(self, asked: Asked) -> Response:
        reason = asked.form.get("reason", "").strip()
        if not reason:
            return self._problem(asked.visitor, "a hold needs a reason: others will read it", 400)
        return await self._schedule(asked, lambda author: hold(self._store, author, reason))

    async def _resume(self, asked: Asked) -> Response:
        return await self._schedule(asked, lambda author: end_hold(self._store, author))

    async def _schedule(self, asked: Asked, change: Callable[[str], Awaitable[object]]) -> Response:
        """Hold or resume. Both may be repeated, so a second click does no harm."""
        if not asked.visitor.may_change:
            return self._problem(asked.visitor, "this needs a key with the scope deploy", 403)
        await change(f"key {asked.visitor.key_id}")
        return RedirectResponse("/", 303, HEADERS)

    async def _roll_back(self, asked: Asked) -> Response:
        return await self._change(asked, lambda request: roll_back(self._store, request))

    async def _change(
        self, asked: Asked, change: Callable[[ChangeRequest], Awaitable[object]]
    ) -> Response:
        """Change the route that the page showed. A second click must not change the next one."""
        if not asked.visitor.may_change:
            return self._problem(asked.visitor, "this needs a key with the scope deploy", 403)
        route = await current_route(self._store)
        if asked.form.get("route_version") != str(route.route_version):
            raise RouteConflictError(
                f"route {route.route_version} came into force meanwhile: look again, then decide"
            )
        author = f"key {asked.visitor.key_id}"
        # A browser that leaves must not stop a change half-way.
        await asyncio.shield(
            asyncio.ensure_future(
                change(ChangeRequest(author=author, reason="status page", route=route))
            )
        )
        return RedirectResponse("/", 303, HEADERS)

    def _problem(self, visitor: Visitor | None, problem: str, status: int) -> Response:
        page = self._html("problem.html", visitor, problem=problem)
        page.status_code = status
        return page

    def _html(self, name: str, visitor: Visitor | None, **values: object) -> Response:
        token = self._sessions.form_token(visitor.token) if visitor and visitor.token else ""
        template = self._templates.get_template(name)
        words = {"number": _number, "share": _share, "usd": _usd, "gate_measure": gate_measure}
        page = template.render(visitor=visitor, form_token=token, **words, **values)
        # Play may hold half a character, which UTF-8 cannot express.
        return HTMLResponse(page.encode("utf-8", "replace"), headers=HEADERS)


def _fleet_pictures(windows: list[Named]) -> list[Picture]:
    images = {
        "P&L of champion and challenger in the gate, by window": pnl_picture(windows),
        "Loss and KL of each update, by window": update_picture(windows),
    }
    return [(words, data_uri(image)) for words, image in images.items() if image]


def _window_pictures(facts: WindowFacts) -> list[Picture]:
    points = [(play.pnl_usd, play.score.score) for play in facts.played]
    images = {
        "Score against P&L, one point a trajectory": score_picture(points),
        "Confidence sequence of the gate": gate_pictures(facts.report).get("sequence"),
    }
    return [(words, data_uri(image)) for words, image in images.items() if image]


def _number(value: object) -> str:
    """Return dollars with one digit behind the point, and a task's small score with three."""
    if not isinstance(value, int | float):
        return "–"
    return f"{value:.3g}" if 0 < abs(value) < 1 else f"{value:.1f}"


def _share(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else "–"


def _usd(value: float) -> str:
    return f"{'-' if value < 0 else '+'}${abs(value):,.2f}"


def _policy(form: Form) -> int | None:
    version = form.get("policy_version", "")
    return int(version) if version.isdecimal() and len(version) < 10 else None


def _is_ours(request: Request) -> bool:
    """Return False for a form that a page of another origin sent."""
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


async def _form(request: Request) -> Form:
    body = await read_body(request.scope, request.receive)
    try:  # a million fields, which anybody may send to /login, would take seconds
        fields = parse_qs(body.decode("latin-1"), max_num_fields=FIELDS)
    except ValueError as error:
        raise RequestError(400, f"the form has more than {FIELDS} fields: send ours") from error
    return {name: storable(values[0]) for name, values in fields.items()}
