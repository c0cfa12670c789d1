"""``babylon calls``, as an operator types it."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from babylon.core.api_keys import new_key
from babylon.core.settings_loading import load_settings
from babylon.store import open_store
from babylon.store.call_partitions import make_partitions
from babylon.store.calls import insert_calls
from tests.integration.test_checks import call
from tests.integration.test_traces_cli import Capture, run


@pytest.fixture(autouse=True)
def place(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))


async def _record() -> str:
    now = datetime.now(UTC)
    one = call("who lost most?", call_id="chatcmpl-1", started_at=now, parameters='{"n": 1}')
    async with open_store(load_settings()) as store:
        await make_partitions(store, now)
        await insert_calls(store, [one])
    return one.call_id


def printed(capsys: Capture, *arguments: str) -> dict[str, object]:
    assert run("calls", *arguments, "--json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_call_is_shown_with_its_messages_answer_and_tokens(capsys: Capture) -> None:
    shown = printed(capsys, "show", asyncio.run(_record()))
    assert shown["messages"] == [{"role": "user", "content": "who lost most?"}]
    assert (shown["agent_id"], shown["policy_version"], shown["parameters"]) == ("a", 0, {"n": 1})
    assert shown["completion_token_ids"] and shown["logprobs"]
    assert run("calls", "show", "chatcmpl-1") == 0
    assert "who lost most?" in capsys.readouterr().out
    assert run("calls", "show", "chatcmpl-2") == 1
    assert "no call 'chatcmpl-2' is stored" in capsys.readouterr().err


def test_a_rule_is_set_listed_and_removed(capsys: Capture) -> None:
    assert printed(capsys, "rules") == {"rules": []}
    rule = {"kind": "agent", "subject": "crowd-*", "share": 0.25, "redact": ["card", "iban"]}
    options = ("--agent", "crowd-*", "--share", "0.25", "--redact", "card", "--redact", "iban")
    assert printed(capsys, "record", *options) == rule
    assert printed(capsys, "rules") == {"rules": [rule]}
    assert run("calls", "rules") == 0 and "card, iban" in capsys.readouterr().out
    printed(capsys, "record", "--agent", "crowd-*")
    assert printed(capsys, "rules") == {"rules": []}
    for wrong in ((), ("--agent", "a", "--key", "k")):
        assert run("calls", "record", *wrong) == 1
    assert "name either --key or --agent" in capsys.readouterr().err


def test_a_rule_for_a_key_that_is_none_is_refused_without_its_secret(capsys: Capture) -> None:
    key = new_key()
    assert run("calls", "record", "--key", "fleet", "--share", "0") == 1
    assert "needs a key's id, not 'fleet'" in capsys.readouterr().err
    assert run("calls", "record", "--key", str(key), "--share", "0") == 1
    said = capsys.readouterr().err
    assert f"not the key {key.key_id} itself" in said and key.secret not in said
    assert run("calls", "record", "--key", str(key)) == 1
    said = capsys.readouterr().err
    assert f"no rule for the key {key.key_id} itself" in said and key.secret not in said
    assert printed(capsys, "rules") == {"rules": []}
    printed(capsys, "record", "--key", "local", "--share", "0")
    printed(capsys, "record", "--key", "local")
