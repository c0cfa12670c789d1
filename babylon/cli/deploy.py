"""``babylon deploy``: change and show the route of the agents' calls.

``babylon model promote | rollback`` are two of these commands under other names.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from babylon.cli import model
from babylon.cli.experiment import analyse
from babylon.cli.options import MAX_INTEGER, Json, Version
from babylon.cli.output import print_json, print_table, show_values, stderr, user_name, with_store
from babylon.core.settings_loading import load_settings

if TYPE_CHECKING:
    from babylon.core.types import Change
    from babylon.deployment.experiments import Experiment
    from babylon.deployment.status import Status
    from babylon.store import Store

    Changing = Callable[[Store], Awaitable[Change]]

AUTHOR = "cli"
app = typer.Typer(help="The route that agents' calls take.", no_args_is_help=True)
Reason = Annotated[str, typer.Option(help="Kept in the route's history.")]
Force = Annotated[bool, typer.Option("--force", help="Skip the checks; the history says so.")]
Challenger = Annotated[
    int | None,
    typer.Argument(
        min=0,
        max=MAX_INTEGER,
        metavar="[VERSION]",
        help="The challenger; omit it to change the canary's share.",
    ),
]
Share = Annotated[
    float | None,
    typer.Option(metavar="FRACTION", help="The challenger's share: 0.25 is a quarter."),
]
app.command()(analyse)


@app.command()
def replace(
    version: Version, reason: Reason = "by hand", force: Force = False, json: Json = False
) -> None:
    """Send every agent to one policy, without a dropped request.

    While an experiment runs, only its challenger can be sent, which ends it.
    """

    async def put_in_force(store: "Store") -> "Change":
        from babylon.deployment.change import ChangeRequest, checks_under
        from babylon.deployment.replace import replace_champion

        request = ChangeRequest(author=AUTHOR, reason=reason, force=force)
        return await replace_champion(store, checks_under(load_settings()), version, request)

    _make(put_in_force, json)


@app.command()
def ab(
    version: Version,
    share: Share = None,
    reason: Reason = "by hand",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare a policy with the champion on a share of the agents, by default half of them."""
    _experiment("ab", version, share, reason, force, json)


@app.command()
def canary(
    version: Challenger = None,
    share: Share = None,
    reason: Reason = "by hand",
    force: Force = False,
    json: Json = False,
) -> None:
    """Try a policy on 5 % of the agents, then on more: `canary --share 0.25`."""
    _experiment("canary", version, share, reason, force, json)


@app.command()
def rollback(reason: Reason = "by hand", json: Json = False) -> None:
    """End the experiment that runs; without one, restore the policy that served before."""

    async def take_back(store: "Store") -> "Change":
        from babylon.deployment.change import ChangeRequest
        from babylon.deployment.rollback import roll_back

        return await roll_back(store, ChangeRequest(author=AUTHOR, reason=f"rollback {reason}"))

    _make(take_back, json)


@app.command()
def approve(version: Version, reason: Reason = "", json: Json = False) -> None:
    """Approve a policy that waits for approval; its run then deploys it."""
    _answer(version, True, reason, json)


@app.command()
def refuse(version: Version, reason: Reason = "", json: Json = False) -> None:
    """Let a run that waits for an approval end without deploying its policy."""
    _answer(version, False, reason, json)


def _answer(version: int, approved: bool, reason: str, json: bool) -> None:
    from babylon.store.approvals import answer_approval

    answer = with_store(load_settings(), answer_approval, version, approved, user_name(), reason)
    show_values({"policy": version, "window": answer.window_id, "answer": str(answer)}, json)


model.app.command("promote")(replace)
model.app.command("rollback")(rollback)


@app.command()
def status(json: Json = False) -> None:
    """Show the route and the gateways that serve it; exit code 1 while one does not."""

    async def found(store: "Store") -> "Status":
        from babylon.deployment.status import deployment_status

        return await deployment_status(store)

    now = with_store(load_settings(), found)
    if json:
        about = asdict(now)
        print_json({**about.pop("route"), **about})
    else:
        _show_status(now)
        _show_approvals(now)
    raise typer.Exit(0 if now.settled else 1)


def _show_approvals(now: "Status") -> None:
    for one in now.approvals:
        print(
            f"policy {one.policy_version} of window {one.window_id} waits for an approval until"
            f" {one.open_until:%Y-%m-%d %H:%M} UTC: `babylon deploy approve {one.policy_version}`"
        )


def _experiment(
    mode: "Experiment",
    version: int | None,
    share: float | None,
    reason: str,
    force: bool,
    json: bool,
) -> None:
    async def compare(store: "Store") -> "Change":
        from babylon.deployment.change import ChangeRequest, checks_under
        from babylon.deployment.experiments import run_experiment

        request = ChangeRequest(author=AUTHOR, reason=reason, force=force)
        return await run_experiment(
            store, checks_under(load_settings()), mode, version, share, request
        )

    _make(compare, json)


def _make(changing: "Changing", json: bool) -> None:
    async def made(store: "Store") -> "Change":
        with stderr.status("gateways load and check the policy, then take the route"):
            return await changing(store)

    change = with_store(load_settings(), made)
    if json:
        print_json(asdict(change))
        return
    from babylon.deployment.deploy_page import serving

    checks = (change.checks or {}).get("checks", ())
    show_values(
        {
            f"route {change.route_version}": serving(change),
            "acknowledged by": ", ".join(change.acknowledged_by) or "no gateway runs",
            "checks": f"{len(checks)} passed" if checks else "none",
            "loading, s": change.prepare_s,
            "checking, s": change.check_s,
            "commit to acknowledgement, s": change.commit_s,
            "draining, s": change.drain_s,
            "calls still answered by the policy before": change.unfinished,
        },
        json,
    )


def _show_status(now: "Status") -> None:
    route, split = now.route, now.route.split
    print(
        f"route {route.route_version}, {route.mode}, since {route.created_at:%Y-%m-%d %H:%M} UTC"
        f" by {route.author}: {route.reason}"
    )
    arms: list[list[object]] = [["champion", route.policy_version, "all agents"]]
    if split:
        print(f"experiment {split.salt}")
        arms = [
            ["champion", route.policy_version, f"{1 - split.share:.0%}"],
            ["challenger", split.challenger_version, f"{split.share:.0%}"],
        ]
    print_table("Arms", ["arm", "policy", "share"], arms)
    rows = [
        [
            gateway.gateway_id,
            gateway.url,
            gateway.route_version,
            ", ".join(map(str, gateway.loaded)),
            ", ".join(f"{calls} by {v}" for v, calls in gateway.in_flight.items() if calls) or None,
            f"not waited for: {late}" if (late := gateway.quarantined) else gateway.problem,
        ]
        for gateway in now.gateways
    ]
    print_table("Gateways", ["gateway", "url", "route", "holds", "answers", "problem"], rows)
    if now.proposals:
        asked = [[p.policy_version, p.author, f"{p.created_at:%H:%M:%S}"] for p in now.proposals]
        print_table("Policies to load", ["policy", "for", "since, UTC"], asked)
