"""Measurement of contenders in turn, each in its own process, so that noise affects all."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.trainer.cases import Window, make_window, save_window
from benchmarks.trainer.contenders import CONTENDERS, Contender, Task
from benchmarks.trainer.contenders.local import policy
from benchmarks.trainer.flops import Work, matmul_rate
from benchmarks.trainer.models import MODELS, Tuning
from benchmarks.trainer.reference import Agreement, Gradients, agreement, reference_gradient

Say = Callable[[str], None]


class WorkerError(RuntimeError):
    """A contender's process ended; its log says why."""


class Process:
    """A contender's process: one question, one answer."""

    def __init__(self, contender: Contender, tuning: Tuning, seed: int, threads: int, log: Path):
        self.contender = contender
        self.log = log
        self._errors: TextIO = log.open("w")
        arguments = [str(CONTENDERS.index(contender)), tuning, str(seed), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trainer.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            raise WorkerError(f"{self.contender.name} ended during {do}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


@dataclass(slots=True, kw_only=True)
class Measured:
    """One contender on one case.

    ``estimates`` are the seconds of forward, loss and backward of the whole window, one a
    repetition; ``cpu_estimates`` the same in processor time, which other programs disturb less.
    """

    contender: str
    tuning: Tuning
    micro_batch: int
    work: Work
    agreement: Agreement | None
    estimates: list[float] = field(default_factory=list)
    cpu_estimates: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    tried: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median iteration: forward, loss and backward of the window, and one optimiser step."""
        return statistics.median(self.estimates) + statistics.median(self.step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All contenders on one model and window; ``matmul_rate`` is the median repetition's."""

    model: str
    window: Window
    matmul_rate: float
    measured: Sequence[Measured]


def measure_case(
    processes: Sequence[Process],
    model: str,
    case: str,
    *,
    repeats: int,
    gradient_calls: int,
    seed: int,
    directory: Path,
    say: Say,
) -> CaseResult:
    """Check gradients (over the window's first calls), tune, warm up, and time in turn."""
    window = make_window(case, vocab=int(MODELS[model].vocab_size), seed=seed)
    file = directory / f"{model}-{case}.npz"
    save_window(window, file)
    references: dict[Tuning, Gradients] = {}
    running = [process for process in processes if case == "skew" or not process.contender.buckets]
    measured = []
    for process in running:
        say(f"{model}/{case}: preparing {process.contender.name}")
        tuning: Tuning = process.ask("prepare", model=model, window=str(file))["tuning"]
        if tuning not in references:
            references[tuning] = _reference(model, window.head(gradient_calls), tuning, seed)
        gradient = directory / "gradient.npz"
        process.ask("gradient", file=str(gradient), calls=gradient_calls)
        with np.load(gradient) as arrays:
            agreed = agreement(references[tuning], dict(arrays))
        chosen = process.ask("tune")
        opened = process.ask("warm", micro_batch=chosen["micro_batch"])
        measured.append(
            Measured(
                contender=process.contender.name,
                tuning=tuning,
                micro_batch=chosen["micro_batch"],
                work=Work(**opened["work"]),
                agreement=agreed,
                tried=chosen["tried"],
            )
        )
    rates = [_round(running, measured, number, say) for number in range(repeats)]
    for process, record in zip(running, measured, strict=True):
        record.peak_bytes = process.ask("finish")["peak_bytes"]
    return CaseResult(
        model=model, window=window, matmul_rate=statistics.median(rates), measured=measured
    )


def _round(
    processes: Sequence[Process], measured: Sequence[Measured], number: int, say: Say
) -> float:
    """Measure every contender once, and return the machine's current matmul rate."""
    say(f"repetition {number + 1}")
    for process, record in zip(processes, measured, strict=True):
        answer = process.ask("part", part=number)
        record.estimates.append(answer["seconds"] / answer["share"])
        record.cpu_estimates.append(answer["cpu_seconds"] / answer["share"])
        record.step_seconds.append(answer["step_seconds"])
    return matmul_rate()


def _reference(model: str, window: Window, tuning: Tuning, seed: int) -> Gradients:
    task = Task(
        config=MODELS[model],
        window=window.on_policy(),
        tuning=tuning,
        seed=seed,
        micro_batch=1,
        grad_clip=0.0,
    )
    return reference_gradient(policy(task), task.window)
