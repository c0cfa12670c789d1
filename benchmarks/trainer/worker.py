"""One contender in a process of its own: JSON lines in, JSON lines out.

``prepare`` a window, write the ``gradient`` of its first calls, ``tune`` the micro-batch, ``warm``
up, time one ``part``, ``finish``. The process lives through all cases: peers take long to import.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.trainer import memory
from benchmarks.trainer.cases import AGENTS, Window, load_window
from benchmarks.trainer.contenders import CONTENDERS, PARTS, Contender, Session, Task
from benchmarks.trainer.flops import Work, flop
from benchmarks.trainer.models import GRAD_CLIP, MODELS, Tuning, shape_of
from benchmarks.trainer.reference import gradients_of

NO_CLIP = 1e9
SWEEP_CALLS = 2 * AGENTS  # two ticks, so that trainers that share prompts can
_LONG_S = 2.0  # beyond which one timing is enough to choose a size


class Worker:
    """State between commands; each public method is one."""

    def __init__(self, contender: Contender, tuning: Tuning, seed: int) -> None:
        self.contender = contender
        self.tuning = contender.tuning or tuning
        self.seed = seed
        self.session: Session | None = None
        self.baseline: int | None = None

    def prepare(self, model: str, window: str) -> dict[str, Any]:
        self.window = load_window(Path(window))
        self.config = MODELS[model]
        memory.release()
        self.baseline = memory.resident_bytes()
        return {"tuning": self.tuning}

    def tune(self) -> dict[str, Any]:
        """Time every size, in seconds of the whole window.

        A size is timed on a few calls and scaled by the work of the window at that size.
        """
        tried = {size: self._predicted_seconds(size) for size in self.contender.sizes(self.config)}
        return {"micro_batch": min(tried, key=tried.__getitem__), "tried": tried}

    def _predicted_seconds(self, size: int) -> float:
        session = self._open(self._sample(size), size, parts=1)
        seconds = float("inf")
        for _ in range(2):
            started = time.perf_counter()
            session.accumulate(0)
            seconds = min(seconds, time.perf_counter() - started)
            if seconds > _LONG_S:
                break
        return seconds * self._flop(self._open(self.window, size).work) / self._flop(session.work)

    def _sample(self, size: int) -> Window:
        if self.contender.in_tokens:
            return self.window.head(SWEEP_CALLS)
        calls = _spread(self.window.calls, size * (1 + size % 2))  # even: TRL wants pairs
        return replace(self.window, calls=calls)

    def _flop(self, work: Work) -> float:
        return flop(shape_of(self.config), work, self.tuning)

    def gradient(self, file: str, calls: int) -> dict[str, Any]:
        """The gradient of the window's first calls, all ratios 1, by canonical name as npz."""
        window = self.window.head(calls).on_policy()
        size = self.contender.sizes(self.config)[:2][-1]
        session = self._open(window, size, parts=1, grad_clip=NO_CLIP)
        gradients: dict[str, Any] = {}
        session.optimizer.register_step_pre_hook(  # AgileRL steps by itself, and zeroes then
            lambda *_: gradients.update(gradients_of(session.model))
        )
        session.accumulate(0)
        np.savez(file, **(gradients or gradients_of(session.model)))
        return {}

    def warm(self, micro_batch: int) -> dict[str, Any]:
        """Open the measured session, and run a part and a step without timing them.

        Ours has only one part, the whole window, and the sweep has warmed it up.
        """
        memory.release()
        memory.reset_peak()
        self.session = self._open(self.window, micro_batch)
        if len(self.session.shares) > 1:
            self.session.accumulate(0)
            self.session.update()
        return {"work": asdict(self.session.work), "shares": list(self.session.shares)}

    def part(self, part: int) -> dict[str, Any]:
        assert self.session is not None, "part before warm"
        index = part % len(self.session.shares)
        processor, started = time.process_time(), time.perf_counter()
        self.session.accumulate(index)
        accumulated = time.perf_counter()
        processor = time.process_time() - processor
        self.session.update()
        return {
            "seconds": accumulated - started,
            "cpu_seconds": processor,
            "step_seconds": time.perf_counter() - accumulated,
            "share": self.session.shares[index],
        }

    def finish(self) -> dict[str, Any]:
        peak = memory.peak_bytes()
        self.session = None
        known = peak is not None and self.baseline is not None
        memory.release()
        return {"peak_bytes": peak - self.baseline if known else None}  # type: ignore[operator]

    def _open(
        self, window: Window, micro_batch: int, *, parts: int = PARTS, grad_clip: float = GRAD_CLIP
    ) -> Session:
        task = Task(
            config=self.config,
            window=window,
            tuning=self.tuning,
            seed=self.seed,
            micro_batch=micro_batch,
            grad_clip=grad_clip,
            parts=parts,
        )
        return self.contender.open(task)


def _spread(calls: Sequence[Any], count: int) -> list[Any]:
    """Calls spread evenly over the window."""
    return [calls[index * len(calls) // count] for index in range(count)]


def main() -> None:
    """``python -m benchmarks.trainer.worker INDEX TUNING SEED THREADS``, started by ``rounds``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which carries answers
    index, tuning, seed, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    worker = Worker(CONTENDERS[int(index)], "lora" if tuning == "lora" else "full", int(seed))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
