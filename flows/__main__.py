"""``python -m babylon.flows '{"type": "train", ...}'``: what ``babylon train`` and ``babylon
demo`` become.

The library may not import Prefect, so its command line replaces itself by this process and hands
over one JSON request (``babylon.cli.requests``). Terminal, signals and exit code are then this
process's own.
"""

import asyncio
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime

from prefect.exceptions import TerminationSignal

from babylon.cli.output import fail, is_storage, print_json, show_logs, storage_error
from babylon.cli.requests import DemoRequest, Request, TrainRequest, decode
from babylon.cli.training_report import print_training, training_report
from babylon.core.errors import BabylonError, DatabaseError
from babylon.core.settings import load_settings, merge_overrides
from babylon.core.types import WindowResult
from babylon.flows.backfill import backfill
from babylon.flows.console import stage_progress
from babylon.flows.continuous import continuous
from babylon.flows.train_window import train_window
from babylon.store.connection import UNREACHABLE

STOPPED = (KeyboardInterrupt, TerminationSignal)


class InterruptedRunError(BabylonError):
    """A signal ended the run; what it had not finished can be started again."""


def main(argv: list[str]) -> int:
    """Run the request and return the exit code."""
    request = decode(argv[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    show_logs()
    try:
        return run(request)
    except BabylonError as error:
        return fail(error, json=request.json)
    except UNREACHABLE as error:
        if isinstance(error, OSError) and (error.filename or is_storage(error)):
            return fail(storage_error(error), json=request.json)
        return fail(_database_error(error), json=request.json)
    except STOPPED:
        return fail(InterruptedRunError("stopped by a signal; run it again"), json=request.json)


def _database_error(error: Exception) -> DatabaseError:
    return DatabaseError(
        f"the connection to the database failed with {type(error).__name__}: {error};"
        " check it with `babylon db status` and run this again"
    )


def run(request: Request) -> int:
    return _demo(request) if isinstance(request, DemoRequest) else _train(request)


def _train(request: TrainRequest) -> int:
    results: list[WindowResult] = []
    with stage_progress():
        if request.mode == "continuous":
            with suppress(*STOPPED):  # the way it is meant to end
                asyncio.run(_collect(request, results))
        elif request.mode == "backfill":
            results += asyncio.run(
                backfill(
                    request.hours,
                    request.overrides,
                    first=request.first,
                    last=request.last,
                    limit=request.limit,
                )
            )
        else:
            results.append(asyncio.run(train_window(request.window_id, request.overrides)))
    settings = load_settings(**request.overrides)
    searched = None if request.window_id else _searched(request, settings.windows.lookback_hours)
    report = training_report(request.mode, results, searched)
    print_json(report) if request.json else print_training(report, results, settings)
    return 0 if report["ok"] else 1


def _searched(request: TrainRequest, lookback_hours: int) -> str:
    hours = f"of the last {request.hours or lookback_hours} h"
    until = f"to {request.last}" if request.last else ""
    return f"from {request.first} {until}" if request.first else f"{hours} {until}"


async def _collect(request: TrainRequest, results: list[WindowResult]) -> None:
    async for result in continuous(load_settings(**request.overrides), request.overrides):
        results.append(result)


def _demo(request: DemoRequest) -> int:
    """The demo plays the hours; how a window is trained is handed to it."""
    from babylon.cli.demo import demo_progress, print_demo
    from babylon.ops.demo import demo_overrides, report_json, run_demo

    outer = load_settings(**request.overrides)
    overrides = merge_overrides(request.overrides, demo_overrides(outer, datetime.now(UTC)))
    settings = load_settings(**overrides)

    async def train(window_id: str) -> WindowResult:
        return await train_window(window_id, overrides)

    with demo_progress() as (say, step):
        report = asyncio.run(
            run_demo(
                settings,
                outer.home.models,
                windows=request.windows,
                train=train,
                say=say,
                step=step,
            )
        )
    print_json(report_json(report)) if request.json else print_demo(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
