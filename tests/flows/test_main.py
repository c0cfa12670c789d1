"""``python -m babylon.flows``: what an operator sees when the database goes away."""

import json
import signal
from collections.abc import Iterator
from typing import Literal

import asyncpg
import msgspec
import pytest

from babylon.cli.requests import TrainRequest, encode
from babylon.core.settings import Settings
from babylon.flows.__main__ import main
from tests.flows.conftest import Workshop

REQUEST = TrainRequest(mode="single", window_id=None, hours=None, overrides={}, json=True)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def raise_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("babylon.flows.__main__.run", run)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), asyncpg.InterfaceError("connection is closed")]
)
def test_a_lost_connection_is_one_line_and_one_json_object(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_error(monkeypatch, error)
    assert main(["flows", encode(REQUEST)]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "DatabaseError"
    assert err.count("\n") == 1 and str(error) in err and "babylon db status" in err


def test_an_error_of_a_file_is_not_blamed_on_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_error(monkeypatch, FileNotFoundError(2, "No such file", "config.json"))
    with pytest.raises(FileNotFoundError):
        main(["flows", encode(REQUEST)])


@pytest.mark.parametrize("mode", ["single", "backfill"])
def test_when_nothing_waits_it_says_where_others_may(
    mode: Literal["single", "backfill"],
    played: Settings,
    workshop: Workshop,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = TrainRequest(mode=mode, overrides={"windows": {"lookback_hours": 24}})
    assert main(["flows", encode(request)]) == 1
    assert "no window of the last 24 h" in capsys.readouterr().out
    assert main(["flows", encode(msgspec.structs.replace(request, json=True))]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and "`babylon windows check`" in report["hint"]
    everything = msgspec.structs.replace(
        request, overrides={"windows": {"lookback_hours": 876_000}}, json=True
    )
    assert main(["flows", encode(everything)]) == 0
    assert "hint" not in json.loads(capsys.readouterr().out)
    again = TrainRequest(window_id="2025-11-14T09:00", json=True)
    assert main(["flows", encode(again)]) == 1
    assert "hint" not in json.loads(capsys.readouterr().out)  # nothing was looked for
