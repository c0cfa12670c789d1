"""Weights & Biases: one run a model, one step a policy version, in a process of its own.

wandb starts a service, threads and exit hooks, and reads the environment, which a worker that runs
for months must not share. So each window is passed to a child process, which logs it, with its
checkpoint if that is asked for, and ends. Offline (the default) it leaves files under
``BABYLON_HOME/wandb`` for ``wandb sync`` and does not use the network.
"""

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import babylon
from babylon.core.errors import ArtifactError, StorageError
from babylon.core.failpoints import failpoint
from babylon.core.home import Home, make_directory, remove_untouched
from babylon.core.objects import fetch
from babylon.core.settings import ModelSettings, TrackingSettings
from babylon.core.types import Metrics
from babylon.policies.checkpoint_files import PUBLIC_SUFFIXES

log = logging.getLogger(__name__)
TIMEOUT_S = 120.0
MODEL_TIMEOUT_S = 1800.0  # weights are gigabytes
_UPLOAD_S = 60.0


def track_window(
    home: Home,
    model: ModelSettings,
    tracking: TrackingSettings,
    metrics: Metrics,
    checkpoint_uri: str | None = None,
) -> bool:
    """Log one window. Return True if W&B has it, False also if no project is set. Blocking.

    ``checkpoint_uri``: the policy that the window promoted. With ``WANDB_MODELS`` its weights
    become an artifact, if they are a directory here and not at a training service. A failure is
    only logged, because Postgres holds the same metrics.
    """
    if tracking.project is None or tracking.mode == "disabled":
        return False
    make_directory(home.wandb)
    failpoint("tracking.before")
    window = {
        "project": tracking.project,
        "mode": tracking.mode,
        "run": model.name,
        "home": str(home.root),
        "metrics": metrics,
        "files": _public_files(home, checkpoint_uri) if checkpoint_uri and tracking.models else [],
    }
    limit_s = MODEL_TIMEOUT_S if window["files"] else TIMEOUT_S
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(window),
            env=_environment(home.wandb),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        problem = done.stderr.strip() if done.returncode else None
    except subprocess.TimeoutExpired:  # Postgres has the metrics: do not hold the run up
        problem = f"no answer within {limit_s:g} s"
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


def remove_old_runs(home: Home, retention_days: int) -> int:
    """Delete W&B's files that are older, synced or not; 0 keeps all. Return their number. Blocking.

    Its own cleaning, ``wandb sync --clean``, needs the network.
    """
    if not retention_days:
        return 0
    return remove_untouched(home.wandb, time.time() - retention_days * 24 * 3600)


def _public_files(home: Home, checkpoint_uri: str) -> list[str]:
    """Return weights, configuration and tokenizer; the trainer's own files stay here."""
    try:
        directory = fetch(home, Path(home.resolve(checkpoint_uri)))
    except (ArtifactError, StorageError):  # of another scheme, or gone
        return []
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(str(path) for path in found if path.suffix in PUBLIC_SUFFIXES)


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
    files: list[str],
) -> None:
    """Add one step to the run of that name, and the files as an artifact, in the child process."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=MODEL_TIMEOUT_S if files else _UPLOAD_S,
        finish_timeout_raises=True,
        use_dot_wandb=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )
    run_id = re.sub("[:;,#?/']", "-", run)  # W&B refuses these; a model may be called org/name
    with wandb.init(
        project=project,
        id=run_id,
        name=run,
        mode=mode,
        dir=home,
        resume="allow",
        settings=settings,
    ) as opened:
        opened.log(metrics, step=int(metrics["policy_version"] or 0))
        if files:
            known = {name: metrics.get(name) for name in ("window_id", "policy_version")}
            artifact = wandb.Artifact(f"{opened.id}-policy", type="model", metadata=known)
            for file in files:
                artifact.add_file(file, skip_cache=True)  # or each promotion stays on the disk
            opened.log_artifact(artifact, aliases=[f"policy-{metrics['policy_version']}"])


if __name__ == "__main__":
    log_window(**json.load(sys.stdin))
