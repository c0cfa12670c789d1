"""Automations that send alerts through a notification block: Slack, e-mail, a webhook and others.

They are made once. A person changes their times and events in Prefect's UI, and deletes one to
have it made again. Another ``ALERT_BLOCK`` moves them to that block.
"""

from typing import Any

import aiohttp

from babylon.core.errors import ServingError
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.prefect_setup import create_automations

BAD_NEWS = (
    "approval.asked",
    "window.failed",
    "window.stuck",
    "checkpoint.rejected",
    "model.rolled_back",
    "judge.budget",
    "data.late",
    "data.stale",
    "data.drift",
)
ENDS = ("window.finished", "checkpoint.rejected", "window.skipped")
NO_WINDOW_S = 2 * 3600  # at least two windows
# The fields that Prefect wants whole in an update.
_UPDATED = ("name", "enabled", "tags", "trigger", "actions_on_trigger", "actions_on_resolve")
SLA_S = 90 * 60  # from ready to the end of its work


async def set_up_alerts(
    http: aiohttp.ClientSession, api: PrefectApi, block: str | None, minutes: int
) -> None:
    """Create the missing automations for a notification block, and move those of another block.

    Without a block, none is made.

    ``minutes``: the length of a window.

    Raises:
        ServingError: the block does not exist, or Prefect refused.
    """
    if block is None:
        return
    kind, _, name = block.partition("/")
    try:
        path = f"block_types/slug/{kind}/block_documents/name/{name}"
        document = await call(http, api, "GET", path)
    except ServingError as error:
        raise ServingError(
            f"ALERT_BLOCK={block!r} cannot be read: make that block in Prefect's UI (Blocks), or"
            f" unset ALERT_BLOCK ({error})"
        ) from error
    wanted = automations(block, document["id"], minutes)
    existing = await create_automations(http, api, wanted)
    for one in wanted:
        if (found := existing.get(one["name"])) and found["description"] != one["description"]:
            moved = _moved(found, one["description"], document["id"])
            await call(http, api, "PUT", f"automations/{found['id']}", moved)


def automations(block: str, block_id: str, minutes: int) -> list[dict[str, Any]]:
    """Return the automations as Prefect's API takes them.

    ``block``: the name in ``ALERT_BLOCK``, which the description keeps.
    """
    no_window_s = max(NO_WINDOW_S, 2 * minutes * 60)
    # Reactive: something happened. Proactive: something did not happen in time.
    said = "{{ event.event }}: {{ event.payload.message }}"
    return [
        _automation(
            "babylon: bad news",
            {"posture": "Reactive", "expect": _named(*BAD_NEWS), "within": 0},
            block,
            block_id,
            said,
        ),
        _automation(
            "babylon: no new window",
            {"posture": "Proactive", "expect": _named("window.ready"), "within": no_window_s},
            block,
            block_id,
            f"no window became ready for {no_window_s // 3600} hours",
        ),
        _automation(
            "babylon: a window takes long",
            {
                "posture": "Proactive",
                "after": _named("window.ready"),
                "expect": _named(*ENDS),
                "for_each": ["prefect.resource.id"],
                "within": SLA_S,
            },
            block,
            block_id,
            f"a window was ready and is not finished after {SLA_S // 60} minutes",
        ),
    ]


def _named(*events: str) -> list[str]:
    return [f"babylon.{event}" for event in events]


def _moved(found: dict[str, Any], description: str, block_id: str) -> dict[str, Any]:
    """Return the automation with its first notification sent to the block, otherwise unchanged."""
    kept = {name: found[name] for name in _UPDATED}
    actions = [dict(action) for action in found["actions"]]
    for action in actions:
        if action["type"] == "send-notification":
            action["block_document_id"] = block_id
            break
    return {**kept, "description": description, "actions": actions}


def _automation(
    name: str, trigger: dict[str, Any], block: str, block_id: str, body: str
) -> dict[str, Any]:
    match = {"prefect.resource.id": "babylon.*"}
    action = {"type": "send-notification", "block_document_id": block_id, "subject": name}
    return {
        "name": name,
        "description": f"Made by `babylon up` for ALERT_BLOCK={block}",
        "trigger": {"type": "event", "match": match, "threshold": 1, **trigger},
        "actions": [{**action, "body": body}],
    }
