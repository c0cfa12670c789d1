"""The tables, and the same figures as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.trainer.contenders.babylon_session import window_work
from benchmarks.trainer.flops import Work, flop, rows_work
from benchmarks.trainer.models import MODELS, Tuning, shape_of
from benchmarks.trainer.rounds import CaseResult, Measured

HEADER = (
    "| trainer | micro-batch | s/iteration | ours is faster by | CPU s | trained tok/s"
    " | unique tok/s | peak MiB | use: own | flat | unique | cosine - 1 | relative error |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def flat_work(result: CaseResult) -> Work:
    """Work of every call alone, unpadded. A call's last token is only a target."""
    lengths = [len(call) - 1 for call in result.window.calls]
    return rows_work(lengths, result.window.trained_tokens)


def ours(result: CaseResult, tuning: Tuning) -> Measured | None:
    """Our trainer, tuning the same weights."""
    for record in result.measured:
        if record.contender.startswith("babylon") and record.tuning == tuning:
            return record
    return None


def figures(result: CaseResult, record: Measured) -> dict[str, Any]:
    """Figures derived from a measurement. ``use_*`` are shares of the measured matmul rate."""
    unique, flat = window_work(result.window), flat_work(result)
    shape = shape_of(MODELS[result.model])
    available = result.matmul_rate * record.seconds

    def use(work: Work) -> float:
        return flop(shape, work, record.tuning) / available

    base = ours(result, record.tuning)
    return {
        "seconds": record.seconds,
        "slower_than_ours": record.seconds / base.seconds if base else None,
        "trained_tokens_per_s": result.window.trained_tokens / record.seconds,
        "unique_tokens_per_s": unique.tokens / record.seconds,
        "use_own": use(record.work),
        "use_flat": use(flat),
        "use_unique": use(unique),
    }


def case_table(result: CaseResult) -> str:
    """One Markdown table, below a line about the window."""
    window, unique, flat = result.window, window_work(result.window), flat_work(result)
    shape = shape_of(MODELS[result.model])
    lengths = [len(call) for call in window.calls]
    lines = [
        f"**{result.model}, {window.name}**: {len(lengths)} calls of {min(lengths)} to"
        f" {max(lengths)} tokens, {window.trained_tokens} trained; {flat.tokens} tokens flat,"
        f" {unique.tokens} unique ({flat.tokens / unique.tokens:.2f} times); FLOP flat/unique"
        f" {flop(shape, flat, 'full') / flop(shape, unique, 'full'):.2f}; matmul"
        f" {result.matmul_rate / 1e9:.0f} GFLOP/s",
        "",
        *HEADER,
    ]
    lines += [_row(result, record) for record in result.measured]
    for tuning in dict.fromkeys(record.tuning for record in result.measured):
        floor = flop(shape, unique, tuning) / result.matmul_rate
        base = ours(result, tuning)
        share = f" | {floor / base.seconds:.2f}x" if base else " | "
        lines.append(f"| floor, {tuning} | | {floor:.2f}{share} | | | | | | | 100% | | |")
    return "\n".join(lines)


def _row(result: CaseResult, record: Measured) -> str:
    values = figures(result, record)
    ratio = values["slower_than_ours"]
    peak = "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:.0f}"
    agreed = record.agreement
    gradient = f"{agreed.cosine - 1:.0e} | {agreed.relative_error:.0e}" if agreed else " | "
    unit = " tokens" if record.contender.startswith("babylon") else ""
    return (
        f"| {record.contender} | {record.micro_batch}{unit}"
        f" | {record.seconds:.2f} | {'' if ratio is None else f'{ratio:.2f}x'}"
        f" | {statistics.median(record.cpu_estimates):.2f}"
        f" | {values['trained_tokens_per_s']:.0f} | {values['unique_tokens_per_s']:.0f} | {peak}"
        f" | {values['use_own']:.0%} | {values['use_flat']:.0%} | {values['use_unique']:.0%}"
        f" | {gradient} |"
    )


def to_json(
    results: Sequence[CaseResult], machine: Mapping[str, Any], missing: Sequence[str]
) -> dict[str, Any]:
    """All measured and derived figures."""
    return {
        "machine": dict(machine),
        "not_installed": list(missing),
        "cases": [
            {
                "model": result.model,
                "case": result.window.name,
                "matmul_flop_per_s": result.matmul_rate,
                "trained_tokens": result.window.trained_tokens,
                "unique": asdict(window_work(result.window)),
                "flat": asdict(flat_work(result)),
                "measured": [
                    asdict(record) | figures(result, record) for record in result.measured
                ],
            }
            for result in results
        ],
    }
