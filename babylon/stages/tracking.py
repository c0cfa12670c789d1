"""Weights & Biases: one run a model, one step a policy version, in a process of its own.

wandb starts a service, threads and exit hooks, and reads the environment, which a worker that runs
for months must not share. So each window is passed to a child process, which logs
it and ends. Offline (the default) it leaves files under ``BABYLON_HOME/wandb`` for ``wandb sync``
and does not use the network.
"""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import babylon
from babylon.core.failpoints import failpoint
from babylon.core.home import make_directory
from babylon.core.settings import Settings
from babylon.core.types import Metrics

log = logging.getLogger(__name__)
TIMEOUT_S = 120.0
_UPLOAD_S = 60.0


def track_window(settings: Settings, metrics: Metrics) -> bool:
    """Log one window. Return True if W&B has it, False also if no project is set. Blocking.

    A failure is only logged, because Postgres holds the same metrics.
    """
    if settings.tracking.project is None or settings.tracking.mode == "disabled":
        return False
    make_directory(settings.home.root / "wandb")
    failpoint("tracking.before")
    window = {
        "project": settings.tracking.project,
        "mode": settings.tracking.mode,
        "run": settings.model.name,
        "home": str(settings.home.root),
        "metrics": metrics,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(window),
            env=_environment(settings.home.root / "wandb"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        problem = done.stderr.strip() if done.returncode else None
    except subprocess.TimeoutExpired:
        problem = f"no answer within {TIMEOUT_S:g} s"
    failpoint("tracking.after")
    if problem is None:
        return True
    log.error(
        "W&B did not take window %s (%s); its metrics are in Postgres. Fix the cause, or set"
        " WANDB_MODE=offline or WANDB_MODE=disabled",
        metrics["window_id"],
        problem.splitlines()[-1] if problem else "no reason given",
    )
    return False


def _environment(directory: Path) -> dict[str, str]:
    """Return our environment, with all files of wandb below one directory and no telemetry."""
    cache = str(directory / "cache")
    return {
        **{f"WANDB_{kind}_DIR": cache for kind in ("CACHE", "CONFIG", "DATA")},
        **os.environ,
        "WANDB_ERROR_REPORTING": "false",
        "PYTHONPATH": str(Path(babylon.__file__).parents[1]),
    }


def log_window(
    *,
    project: str,
    mode: Literal["offline", "online"],
    run: str,
    home: str,
    metrics: Metrics,
) -> None:
    """Add one step to the run of that name. Called in the child process."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=_UPLOAD_S,
        finish_timeout_raises=True,
        use_dot_wandb=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )
    with wandb.init(
        project=project,
        id=re.sub("[:;,#?/']", "-", run),  # W&B refuses these; a model may be called org/name
        name=run,
        mode=mode,
        dir=home,
        resume="allow",
        settings=settings,
    ) as opened:
        opened.log(metrics, step=int(metrics["policy_version"] or 0))


if __name__ == "__main__":
    log_window(**json.load(sys.stdin))
