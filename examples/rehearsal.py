"""A rehearsal between demo and production: all services, a fleet, the schedule, in minutes.

``python examples/rehearsal.py 6``: ``babylon up`` starts everything in a home of its own. 64 agents
play windows of ten minutes through the gateway, at full speed. The deployment ``hourly-training``
looks every minute instead of every quarter of an hour, trains the window on the workers, and puts
in force what is better. The status page shows the same: ``babylon status`` names its address.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("BABYLON_HOME", ".babylon/rehearsal")
os.environ |= {"WINDOW_MINUTES": "10", "SCORER": "heuristic", "TUNING": "full", "ITERATIONS": "2"}
os.environ |= {"LEARNING_RATE": "5e-4", "BATCH_SIZE": "16", "GRADIENT_ACCUMULATION_STEPS": "1"}
ENDED = ("deployed", "rejected", "failed", "skipped")


def babylon(*words: str) -> dict:
    command = [sys.executable, "-m", "babylon", *words, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def hurry() -> None:
    """Replace the quarter-hourly schedule, until the next ``babylon up``."""
    port = os.environ.get("PREFECT_SERVER_API_PORT", "4200")
    key = (Path(os.environ["BABYLON_HOME"]) / "prefect.key").read_text().strip()
    server = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_API_AUTH_STRING": key}
    words = ["deployment", "schedule", "create", "backfill/hourly-training", "--replace"]
    command = [sys.executable, "-m", "prefect", *words, "--cron", "* * * * *", "--accept-yes"]
    subprocess.run(command, env=os.environ | server, stdout=subprocess.DEVNULL, check=True)


def hour() -> str:
    """Play a window, wait until it is trained → a line about both."""
    fleet = babylon("agents", "spawn", "--agents", "64", "--duration", "10")
    [window] = fleet["windows"]
    while True:
        states = {one["window_id"]: one["state"] for one in babylon("windows", "list")["windows"]}
        if states[window] in ENDED:
            return f"{window}: fleet P&L {fleet['mean_pnl']:+.0f}, {states[window]}"
        time.sleep(5)


if __name__ == "__main__":
    babylon("up")
    try:
        hurry()
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 6):
            print(hour(), flush=True)
    finally:
        babylon("down")
