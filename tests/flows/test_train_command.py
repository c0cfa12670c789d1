"""``babylon train``, in this process: its reports, and its errors in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from prefect.server.api.server import SubprocessASGIServer

from babylon.cli import main
from babylon.core.settings import Settings
from babylon.core.windows import WindowState
from babylon.store import Store
from babylon.store.windows import get_window
from tests.flows.conftest import Workshop

ROOT = Path(__file__).parents[2]
WINDOW = "2025-11-14T09:00"
ENDLESS = """
import asyncio
import signal
from babylon.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

async def endless(*_, **__):
    print("training", flush=True)
    await asyncio.sleep(600)

import babylon.stages.train
babylon.stages.train.train_window = endless
main(["train", "--window", "2025-11-14T09:00", "--json"])
"""


def train(*arguments: str) -> int:
    """Exit code of ``babylon train``."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            main(["train", *arguments])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(left.value.code, int)
    return left.value.code


def raise_error(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: object) -> None:
        raise error

    monkeypatch.setattr("babylon.cli.training._run", run)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), asyncpg.InterfaceError("connection is closed")]
)
def test_a_lost_connection_is_one_line_and_one_json_object(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_error(monkeypatch, error)
    assert train("--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "DatabaseError"
    assert err.count("\n") == 1 and str(error) in err and "babylon db status" in err


def test_an_evaluator_that_does_not_load_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVALUATOR", "no_such_desk:Desk")
    assert train("--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "ConfigError" and "EVALUATOR=no_such_desk:Desk" in said["error"]


def test_an_error_of_a_file_is_not_blamed_on_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_error(monkeypatch, FileNotFoundError(2, "No such file", "config.json"))
    with pytest.raises(FileNotFoundError):
        main(["train"])


@pytest.mark.parametrize("mode", ["single", "backfill"])
def test_when_nothing_waits_it_says_where_others_may(
    mode: str, played: Settings, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--mode", mode, "--lookback-hours", "24") == 1
    assert "no window of the last 24 h" in capsys.readouterr().out
    assert train("--mode", mode, "--lookback-hours", "24", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and "`babylon windows check`" in report["hint"]
    assert train("--mode", mode, "--lookback-hours", "876000", "--json") == 0
    assert "hint" not in json.loads(capsys.readouterr().out)
    assert train("--window", WINDOW, "--json") == 1
    assert "hint" not in json.loads(capsys.readouterr().out)  # no range was searched


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_with_130_one_line_and_a_window_that_is_free_again(
    number: signal.Signals, played: Settings, store: Store
) -> None:
    server = SubprocessASGIServer()  # of this process's flows
    server.start(180)
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PREFECT_HOME"}
        | {"PREFECT_API_URL": server.api_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    *stages, last = err.splitlines()
    assert last == "error: stopped by a signal; run it again"
    assert [line.split()[1] for line in stages if "dropout" in line] == ["dropout:"]
    assert "Traceback" not in err
    assert json.loads(out)["kind"] == "InterruptedRunError"
    row = await get_window(store, WINDOW)
    assert row is not None and (row.state, row.leased) == (WindowState.SCORED, False)
