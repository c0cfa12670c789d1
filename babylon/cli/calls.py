"""``babylon calls``: recorded calls, and which calls are recorded."""

from dataclasses import asdict
from typing import Annotated

import msgspec
import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, show_values, with_store
from babylon.core.errors import ConfigError
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="Recorded calls.", no_args_is_help=True)
Key = Annotated[str | None, typer.Option(metavar="KEY_ID", help="The rule is for this key.")]
Agent = Annotated[
    str | None, typer.Option(metavar="AGENT", help="The rule is for this agent, or crowd-*.")
]


@app.command()
def show(
    call_id: Annotated[str, typer.Argument(metavar="ID", help="An answer's id.")],
    json: Json = False,
) -> None:
    """Print a recorded call: messages, answer, policy, tokens and logprobs."""
    from babylon.store.calls import find_call

    call = with_store(load_settings(), find_call, call_id)
    values: dict[str, object] = asdict(call)
    for name in ("messages", "parameters", "answer"):
        values[name] = msgspec.json.decode(text) if (text := getattr(call, name)) else None
    show_values(values | {"started_at": call.started_at.isoformat()}, json)


@app.command()
def rules(json: Json = False) -> None:
    """List the rules of recording. Calls without a rule are recorded as they are."""
    from babylon.store.recording_rules import list_rules

    listed = [asdict(rule) for rule in with_store(load_settings(), list_rules)]
    if json:
        print_json({"rules": listed})
        return
    columns = ["kind", "subject", "share", "redact"]
    rows = [[*list(rule.values())[:3], ", ".join(rule["redact"])] for rule in listed]
    print_table("Rules of recording", columns, rows)


@app.command()
def record(
    key: Key = None,
    agent: Agent = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of trajectories recorded; 0: none.")
    ] = 1.0,
    redact: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="JSON field whose values are left out; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Set which calls of a key or agent are recorded. Share 1 and no field remove the rule."""
    from babylon.store.recording_rules import RuleKind, remove_rule, set_rule

    kind: RuleKind = "key" if key else "agent"
    subject = key or agent
    if not subject or (key and agent):
        raise ConfigError("name either --key or --agent")
    settings = load_settings()
    if share == 1 and not redact:
        with_store(settings, remove_rule, kind, subject)
    else:
        with_store(settings, set_rule, kind, subject, share, redact or [])
    show_values({"kind": kind, "subject": subject, "share": share, "redact": redact or []}, json)
