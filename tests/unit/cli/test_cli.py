"""The command line as a script meets it: exit codes, one JSON object, one clear line."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

import babylon
from babylon.cli import main
from babylon.cli.demo import print_demo
from babylon.cli.output import print_table, show_logs, show_values, storage_error
from babylon.cli.training import TrainRequest
from babylon.cli.training_report import window_table
from babylon.core.types import Published, WindowResult
from babylon.core.windows import WindowState, window_at
from babylon.ops.demo import DemoReport, Final
from tests.imported import imported_with
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
COMMANDS = [
    ["train"],
    ["demo"],
    ["up"],
    ["down"],
    ["status"],
    ["doctor"],
    ["backup"],
    ["restore"],
    ["agents", "spawn"],
    ["windows", "list"],
    ["windows", "check"],
    ["windows", "show"],
    ["windows", "release"],
    ["judge", "explain"],
    ["model", "init"],
    ["model", "sft"],
    ["model", "list"],
    ["model", "show"],
    ["model", "lineage"],
    ["model", "promote"],
    ["model", "rollback"],
    ["deploy", "replace"],
    ["deploy", "ab"],
    ["deploy", "canary"],
    ["deploy", "rollback"],
    ["deploy", "status"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "revoke"],
    ["keys", "rotate"],
    ["dataset", "build"],
    ["dataset", "replay"],
    ["db", "migrate"],
    ["db", "status"],
    ["db", "import"],
    ["db", "export"],
]

# A command that works until it is stopped, and awaits something when it is.
ENDLESS = """
import asyncio
import babylon.cli

@babylon.cli.app.command()
def endless():
    async def work():
        try:
            print("works", flush=True)
            await asyncio.sleep(600)
        finally:
            await asyncio.to_thread(print, "tidied up")
    asyncio.run(work())

babylon.cli.main(["endless"])
"""


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Commands set a signal handler and Prefect's environment for a process of their own."""
    handler, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    for name in environment:
        if name.startswith("PREFECT_"):
            del os.environ[name]
    yield
    signal.signal(signal.SIGTERM, handler)
    os.environ.clear()
    os.environ.update(environment)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_offers_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--mode", "sometimes"],
        ["train", "--trainer", "verl"],
        ["train", "--loss", "dpo"],
        ["train", "--mode", "backfill", "--window", "2025-11-14T09:00"],
        ["train", "--backfill-hours", "3"],
        ["train", "--frequency", "3"],
        ["train", "--from", "2025-11-14"],
        ["train", "--limit", "3"],
        ["train", "--mode", "backfill", "--from", "2025-11-14", "--backfill-hours", "3"],
        ["train", "--mode", "backfill", "--limit", "0"],
        ["train", "--mode", "backfill", "--from", "2025-11-15", "--to", "2025-11-14T23:00"],
        ["train", "--mode", "continuous", "--recipe", "again"],
        ["train", "--include-late"],
        ["train", "--window", "2025-11-14T09:00+one", "--recipe", "other"],
        ["train", "--min-agents", "1"],
        ["baseline", "train", "--algorithm", "cqn", "--from", "play"],
        ["baseline", "train", "--algorithm", "dqn", "--windows", "2025-11"],
        ["judge", "cost", "--window", "2025-11-14T09:00", "--days", "3"],
        ["up", "--foreground", "--apply"],
        ["windows", "hold", "--reason", " "],
        ["dataset", "replay", "--agent", "a", "--window", "w", "--from", "x", "--interpolate"],
        ["dataset", "erase", "--agent", ""],
        ["dataset", "erase", "--agent", "ann", "--squash"],
        ["deploy", "ab"],
        ["deploy", "canary", "5", "--share", "much"],
        ["deploy", "replace", "3000000000"],
        ["deploy", "canary", "3000000000"],
        ["deploy", "approve", "3000000000"],
        ["keys", "create", "ann", "--concurrency", "3000000000"],
        ["keys", "create", "ann", "--requests-per-minute", "3000000000"],
        ["keys", "create", "ann", "--tokens-per-minute", "3000000000"],
        ["model", "show", "newest"],
        ["population", "show", "--plot", "lineage.jpgg"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


def test_wrong_usage_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("windows", "list", "--min-agents", "1", "--json") == 2
    captured = capsys.readouterr()
    assert "--min-agents" in json.loads(captured.out)["error"] and captured.err
    assert exit_code("config", "show", "--markdown", "--json") == 2  # a page is no object
    assert "--markdown" in json.loads(capsys.readouterr().out)["error"]


def test_an_argument_that_is_no_text_is_refused_and_a_file_of_that_name_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    reason = os.fsdecode(b"f\xfcr sp\xe4ter")  # as Python hands on a terminal's Latin-1
    assert exit_code("windows", "hold", "--reason", reason, "--json") == 1
    captured = capsys.readouterr()
    assert "is not UTF-8: write it in UTF-8" in json.loads(captured.out)["error"]
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xfc.jsonl"))
    path.touch()
    assert exit_code("db", "import", str(path), "--format", "nonsense") == 2


@pytest.mark.parametrize("scorer", ["unknown", "no_module:f", "..above:f", "broken:f"])
def test_a_scorer_that_cannot_be_used_is_refused_before_prefect_starts(
    scorer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code("train", "--scorer", scorer, "--json") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: scorer '{scorer}'") and captured.err.count("\n") == 1
    assert json.loads(captured.out)["kind"] == "ConfigError"


def test_neither_a_file_of_another_user_nor_one_in_the_way_is_told_to_be_a_full_disk() -> None:
    refused = storage_error(PermissionError(errno.EACCES, "Permission denied", "/backup/calls.zst"))
    assert str(refused).startswith("cannot use /backup/calls.zst (Permission denied): give this")
    for number in (errno.EEXIST, errno.ENOTDIR):
        said = str(storage_error(OSError(number, "why", "/out/x")))
        assert said.startswith("cannot write /out/x (why): a file lies where a directory must be")
    full = storage_error(OSError(errno.ENOSPC, "No space left on device", "/home/x"))
    assert str(full).startswith("cannot write /home/x (No space left on device): free disk space")


def test_a_home_that_is_a_file_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    for command in (["train"], ["up"], ["db", "status"]):
        assert exit_code(*command) == 1
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and "BABYLON_HOME" in captured.err
        assert "a file lies" in captured.err and "disk space" not in captured.err


@pytest.mark.parametrize("command", ["train", "demo", "up", "down", "serve"])
def test_a_home_where_no_directory_can_be_made_is_one_clear_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BABYLON_HOME", "/proc/no-such-process")
    for name in ("LOCAL_ENDPOINT", "ENGINE_PORT", "ADMIN_PORT"):
        port = free_port()
        monkeypatch.setenv(name, str(port) if "PORT" in name else f"http://localhost:{port}")
    assert exit_code(command) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: cannot make the directory /proc/no-such-process")
    assert captured.err.count("\n") == 1 and "BABYLON_HOME" in captured.err


def test_prefects_directory_that_cannot_be_made_is_told_before_prefect_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prefect").touch()
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    assert exit_code("train") == 1
    assert f"cannot make the directory {tmp_path}/prefect" in capsys.readouterr().err


def test_the_training_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {
        "trajectories": 1000,
        "pnl_before": -1234.5,
        "pnl_after": 1234.5,
        "win_rate_before": 0.08,
        "win_rate_after": 1.0,
        "avg_reward": 0.61,
        "training_loss": -0.284,
        "kl_before": 0.0,
        "kl_after": 6.3e-7,
    }
    result = WindowResult(
        window_id="2026-11-21T06:00", status=WindowState.DEPLOYED, reason="", metrics=metrics
    )
    print_table("Training", *window_table([result]))
    lines = capsys.readouterr().out.splitlines()
    assert "-1234.5→1234.5" in lines[-1] and "8→100" in lines[-1] and "0→6e-07" in lines[-1]
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_a_narrow_terminal_breaks_the_longest_text_and_no_short_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    names = ["window", "state", "age", "owner", "plays", "agents", "trained", "rejected", "late"]
    row = ["2025-11-14T09:00+judged-again", "deployed", "380 d", None, 5, 5, 0, 12345678, 0]
    print_table("Windows", names, [row])
    output = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = output.splitlines()
    assert all(word in output for word in ("deployed", "380 d", "rejected", "12345678"))
    assert max(map(len, lines)) <= 80 and len(lines) == 5, (
        output
    )  # the id alone takes a second line


def test_a_bad_setting_is_one_line_or_a_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("train", "--max-dropout", "1.5", "--json") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    report = json.loads(captured.out)
    assert report["kind"] == "ConfigError" and "1.5" in report["error"]


@pytest.mark.parametrize(
    ("window", "kind"),
    [
        ("yesterday", "WindowError"),
        ("2025-11-14T09:17", "WindowError"),
        ("2025-11-14T09:00+", "WindowError"),
        ("2999-01-01T00:00", "WindowNotReadyError"),
    ],
)
def test_bad_windows_are_refused(
    window: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "--window", window, "--json") == 1
    captured = capsys.readouterr()
    assert window in captured.err
    assert json.loads(captured.out)["kind"] == kind


def test_a_window_of_the_future_is_refused_with_the_present_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = datetime.now(UTC)
    assert exit_code("train", "--window", "2999-01-01T00:00") == 1
    found = re.search(r"it is (\S+) now", capsys.readouterr().err)
    assert found is not None
    now = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    assert timedelta(seconds=-1) < now - before < timedelta(hours=1)


@pytest.mark.parametrize("group", ["windows", "judge"])
@pytest.mark.parametrize("window", ["yesterday", "2025-11-14", "2025-13-14T09:00"])
def test_what_is_no_window_id_is_never_called_an_unknown_window(
    group: str, window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {
        "windows": [["show"], ["explain"], ["release"], ["retry"], ["skip", "--reason", "x"]],
        "judge": [[name, "--window"] for name in ("explain", "cost", "pairs", "again")],
    }[group]
    for command in commands:
        assert exit_code(group, *command, window, "--json") == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert error.startswith(f"window id '{window}' is not ")


def test_a_page_of_windows_ends_before_a_window_or_a_date(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("windows", "list", "--before", "yesterday", "--json") == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "WindowError"


def test_the_database_decides_if_todays_window_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of this machine may be wrong by hours."""
    asked: list[str | None] = []

    def run(request: TrainRequest) -> NoReturn:
        asked.append(request.window)
        raise SystemExit(0)

    monkeypatch.setattr("babylon.cli.training._run", run)
    window = window_at(datetime.now(UTC) + timedelta(hours=5)).id
    assert exit_code("train", "--window", window) == 0
    assert asked == [window]


def test_train_without_a_database_is_one_clear_line(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "babylon", "train", "--json"],
        cwd=ROOT,
        env=os.environ
        | {"BABYLON_HOME": str(tmp_path), "DATABASE_URL": "postgresql://x@127.0.0.1:1/x"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: ") and finished.stderr.count("\n") == 1
    report = json.loads(finished.stdout)
    assert report["kind"] == "DatabaseError" and "127.0.0.1:1" in report["error"]
    assert not list(tmp_path.iterdir())  # Prefect, which takes seconds, has not been prepared


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    imported = imported_with("babylon.cli")
    assert not imported & {"torch", "transformers", "prefect", "polars", "asyncpg"}


def test_version_and_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"{babylon.__version__}\n"
    assert exit_code("--show-completion") == 0
    assert "_COMPLETE=complete_" in capsys.readouterr().out


@pytest.mark.parametrize("started", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN);"])
def test_sigterm_tidies_up_like_ctrl_c_also_in_the_background_of_a_script(started: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; {started} {ENDLESS}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "works\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "tidied up\n"
        assert process.stderr.read() == ""
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("prefix", "command"),
    [("project/.venv", ".venv/bin/babylon"), ("else where", "'{}/else where/bin/babylon'")],
)
def test_what_the_demo_prints_to_run_next_can_be_pasted(
    prefix: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr("sys.executable", str(tmp_path / prefix / "bin" / "python"))
    print_demo(
        DemoReport(
            ok=True,
            seed=1,
            home="/my home",
            windows=(),
            fleet_pnl=(),
            final=Final(
                scenarios=1,
                pnl_base=0.0,
                pnl_sft=0.5,
                pnl_final=1.0,
                rule="bold",
                pnl_rule=1.5,
                pnl_oracle=2.0,
                difference=1.0,
                difference_low=0.5,
                difference_high=1.5,
                gap_closed=0.5,
                win_rate_base=0.1,
                win_rate_final=0.9,
            ),
            policy_version=1,
            plot="plot.png",
            duration_s=60.0,
        )
    )
    environment = "DATABASE_URL= BABYLON_HOME='/my home'"
    assert f"{environment} {command.format(tmp_path)} model list" in capsys.readouterr().out


def test_dataset_build_prints_paths_and_hands_on_uris(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = "file:///my%20home/month%3D2025-11/x.parquet"

    problems: list[str] = []

    def build(*_: object) -> tuple[list[Published], list[str]]:
        return [Published(window_id="2025-11-14T09:00", uri=uri, sha256="", rows=5)], problems

    monkeypatch.setattr("babylon.cli.dataset.with_store", build)
    assert exit_code("dataset", "build") == 0
    assert "/my home/month=2025-11/x.parquet" in capsys.readouterr().out
    assert exit_code("dataset", "build", "--json") == 0
    assert json.loads(capsys.readouterr().out)["published"][0]["uri"] == uri
    problems.append("window x was not written: its rows are gone")
    assert exit_code("dataset", "build") == 1
    assert "its rows are gone" in capsys.readouterr().err


def test_numbers_near_a_thousand_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("P&L", ["name", "usd"], [["a", 999.4], ["b", -999.6], ["c", 1000.4]])
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[3:]] == [
        "999", "-1,000", "1,000",
    ]  # fmt: skip


def test_a_terminal_gets_no_command_of_a_players_text(capsys: pytest.CaptureFixture[str]) -> None:
    played = "héllo\x1b]0;owned\x07\x1b[2J\r\x9b2J\tthere\n\u3000end"
    show_values({"messages": [{"content": played}]}, json=False)
    print_table("Agents", ["agent", "reason"], [["a", played]])
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r", "\x9b"} & {*printed}
    assert "héllo�]0;owned��[2J��2J\tthere\n\u3000end" in printed
    show_values({"content": played}, json=True)
    assert json.loads(capsys.readouterr().out)["content"] == played


def test_a_table_shows_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["team[alpha]", "[/b]", "a:dog:b"]
    print_table("[i] keys", ["name"], [[name] for name in names])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("[i] keys", *names))


@pytest.mark.parametrize("command", [["resume"], ["hold", "--reason", "x"]], ids=" ".join)
def test_a_user_of_a_container_without_a_name_decides_too(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    given: list[object] = []
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("babylon.cli.windows.with_store", lambda *values: given.extend(values))
    assert exit_code("windows", *command) == 0
    assert f"uid {os.getuid()}" in given


def test_a_log_line_in_a_file_is_one_line_however_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kept in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(logging.getLogger("babylon"), name, kept)  # undone after the test
    show_logs()
    path = "/srv/" + "/".join(["directory"] * 30)
    logging.getLogger("babylon.test").info("%s is deleted", path)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d " + re.escape(f"{path} is deleted"), line)
