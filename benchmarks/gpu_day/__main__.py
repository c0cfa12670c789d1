"""All measurements that need a GPU: ``make gpu``, or ``python -m benchmarks.gpu_day``.

Each part is a process of its own with at most ten minutes. Its result is a file in the directory,
so that a second call goes on with the parts that have none. Nothing is fetched: models are made
from configurations with random weights. ``VLLM_PYTHON`` names the Python of a vLLM; without it, the
embedded engine serves. ``--rehearse`` runs tiny sizes on the CPU.

    python -m benchmarks.gpu_day [--rehearse] [--directory DIR] [--again] [PART ...]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S = 600
PARTS = {
    "tests": "tests/gpu",
    "train-0.5b": "full update of a 0.5B model",
    "train-7b": "LoRA update of a 7B model, base in bf16",
    "peers-0.5b": "a pass beside TRL's, a full update of a 0.5B model",
    "peers-7b": "a pass beside TRL's, LoRA of a 7B model",
    "head": "the own head beside fused linear-cross-entropy",
    "parity": "engine beside trainer, same tokens",
    "swap": "routes changed under streams",
    "gate": "a match through the engine",
    "hour-0.5b": "an hour from play to served",
    "hour-7b": "an hour from play to served, LoRA",
}


def main() -> int:
    """Run the parts that have no result yet, and print the table. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--directory", type=Path, default=Path(".gpu-day"))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for part in options.parts or PARTS:
        path = options.directory / f"{part}.json"
        if options.again or not path.exists() or json.loads(path.read_text())["status"] != "passed":
            print(f"{part}: {PARTS[part]}", file=sys.stderr, flush=True)
            result = run_part(part, options.directory, rehearse=options.rehearse)
            path.write_text(json.dumps(result, indent=1) + "\n")
    found = results(options.directory)
    table = render(found)
    (options.directory / "table.md").write_text(table)
    print(table)
    return 0 if all(one["status"] == "passed" for one in found.values()) else 1


def run_part(part: str, directory: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run one part in a process group that ends with its time limit, and return its result."""
    figures, log = directory / f"{part}.figures.json", directory / f"{part}.log"
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_day.parts", part, str(figures)]
    command += ["--rehearse"] * rehearse
    if part == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        command += ["--collect-only"] * rehearse  # they need CUDA
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {})
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
        try:
            status = "passed" if process.wait(LIMIT_S) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
            os.killpg(process.pid, signal.SIGTERM)  # the part removes its services
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    last = (log.read_text().strip().splitlines() or ["no output"])[-1]
    measured = json.loads(figures.read_text()) if figures.exists() else {"last line": last}
    return {"status": status, "seconds": time.monotonic() - started, "figures": measured}


def results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return part → result, for the parts that ran."""
    paths = {part: directory / f"{part}.json" for part in PARTS}
    return {part: json.loads(path.read_text()) for part, path in paths.items() if path.exists()}


def render(found: dict[str, dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = ["| part | status | s | figures |", "| --- | --- | ---: | --- |"]
    for part, one in found.items():
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in one["figures"].items())
        lines.append(f"| {part} | {one['status']} | {one['seconds']:.0f} | {figures} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
