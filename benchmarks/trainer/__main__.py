"""``python -m benchmarks.trainer``: all cases, or the chosen ones; see docs/benchmarks/trainer.md.

Exits with 1 if a chosen peer is not installed, after measuring the others.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer.cases import AGENTS, CASES
from benchmarks.trainer.contenders import CONTENDERS, Contender
from benchmarks.trainer.models import MODELS, Tuning
from benchmarks.trainer.report import case_table, to_json
from benchmarks.trainer.rounds import CaseResult, Process, measure_case

PEERS = ("trl", "agilerl")
DEFAULT_RUNS = (*(("small", case) for case in CASES), ("larger", "high"))
REPEATS = 10
GRADIENT_CALLS = {"small": 2 * AGENTS, "larger": 4}


def main() -> int:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    runs = _runs(options.model, options.case)
    chosen = _chosen(options.peers, options.tune)
    missing = [contender.name for contender in chosen if not contender.installed()]
    for name in missing:
        print(f"not installed: {name} (make bench-trainer installs the peers)", file=sys.stderr)
    started = time.monotonic()
    results = _measure(runs, [c for c in chosen if c.installed()], options)
    machine = _machine(options.threads) | {"wall_s": time.monotonic() - started}
    print(f"{machine}\n" + "".join(f"{name}: not installed\n" for name in missing))
    if options.json:
        report = to_json(results, machine, missing)
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.trainer", description=__doc__)
    parser.add_argument("--case", choices=CASES, help="default: all, on the larger model only high")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "none"), default=list(PEERS))
    parser.add_argument(
        "--tune", choices=("full", "lora"), default="full", help="AgileRL always tunes LoRA"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    return parser


def _runs(model: str | None, case: str | None) -> list[tuple[str, str]]:
    if model is None and case is None:
        return list(DEFAULT_RUNS)
    models = [model] if model else list(MODELS)
    return [(m, c) for m in models for c in ([case] if case else CASES)]


def _chosen(peers: Sequence[str], tuning: Tuning) -> list[Contender]:
    """The chosen contenders, with ours and the naive one. AgileRL is compared with our LoRA."""
    wanted = {"babylon", "naive", *peers}
    return [
        contender
        for contender in CONTENDERS
        if contender.peer in wanted
        and not (
            contender.peer == "babylon"
            and contender.tuning == "lora"
            and (tuning == "lora" or "agilerl" not in peers)
        )
    ]


def _measure(
    runs: Sequence[tuple[str, str]], contenders: Sequence[Contender], options: argparse.Namespace
) -> list[CaseResult]:
    results = []
    everything = bool(options.model or options.case)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        processes = [
            Process(c, options.tune, options.seed, options.threads, directory / f"{number}.log")
            for number, c in enumerate(contenders)
        ]
        try:
            for model, case in runs:
                started = time.monotonic()
                result = measure_case(
                    [p for p in processes if measures(p.contender, model, case, everything)],
                    model,
                    case,
                    repeats=options.repeats,
                    gradient_calls=GRADIENT_CALLS[model],
                    seed=options.seed,
                    directory=directory,
                    say=_say,
                )
                print(f"{case_table(result)}\n\n{time.monotonic() - started:.0f} s\n", flush=True)
                results.append(result)
        finally:
            for process in processes:
                process.close()
    return results


def measures(contender: Contender, model: str, case: str, everything: bool) -> bool:
    """True if this combination is measured. LoRA runs on the small model only.

    Unless ``everything`` is measured, the least informative ones are left out: LoRA without
    high sharing, unmodified TRL on the larger model, and under skew its better head alone.
    """
    if contender.tuning == "lora":
        return model == "small" and (everything or case == "high")
    left_out = {("larger", "high"): "TRL", ("small", "skew"): "TRL, completion head"}
    return everything or contender.name != left_out.get((model, case))


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _machine(threads: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "peft", *PEERS)
    return {
        "processor": _processor(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
