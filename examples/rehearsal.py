"""A rehearsal between demo and production: all services, a fleet in real time, the schedule.

``python examples/rehearsal.py 4`` takes an hour and a quarter. ``babylon up`` starts everything in
a home of its own. 64 agents decide once a minute, and every quarter of an hour is a window. The
deployment ``hourly-training`` trains it two minutes later and deploys what is better, while the
fleet plays on. The status page shows the same: ``babylon status`` names its address.
"""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

MINUTES, DONE = 15, ("deployed", "rejected")
os.environ.setdefault("BABYLON_HOME", ".babylon/rehearsal")
os.environ |= {"WINDOW_MINUTES": str(MINUTES), "SCORER": "heuristic", "TUNING": "full"}
os.environ |= {"LEARNING_RATE": "5e-4", "ITERATIONS": "2", "BATCH_SIZE": "16"}
os.environ |= {"GRADIENT_ACCUMULATION_STEPS": "1"}  # with these, the demo's recipe


def babylon(*words: str) -> dict:
    command = [sys.executable, "-m", "babylon", *words, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def play() -> None:
    """Play until the end of the running quarter of an hour."""
    left = MINUTES - datetime.now(UTC).minute % MINUTES
    fleet = babylon("agents", "spawn", "--live", "--agents", "64", "--duration", str(left))
    policies = babylon("model", "list")["policies"]
    serving = next(one["policy_version"] for one in policies if one["champion"])
    played, pnl = ", ".join(fleet["windows"]), fleet["mean_pnl"]
    print(f"{played}: mean P&L {pnl:+.0f}, policy {serving} serves now", flush=True)


def main(windows: int) -> None:
    babylon("up")
    try:
        for _ in range(windows):
            play()
        for _ in range(4 * MINUTES):  # the last window is trained two minutes after its end
            if all(one["state"] in DONE for one in babylon("windows", "list")["windows"]):
                break
            time.sleep(15)
        play()  # by the policy that was learned
    finally:
        babylon("down")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
