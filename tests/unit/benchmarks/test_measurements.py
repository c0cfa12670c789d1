"""The trainer and market benchmarks: FLOP counts, gradients, and the arithmetic of reports."""

import pytest

from benchmarks.market import REFERENCE, Sizes, table
from benchmarks.market import measure as measure_market
from benchmarks.trainer.cases import AGENTS, Window, make_window
from benchmarks.trainer.contenders import CONTENDERS, Session, Task
from benchmarks.trainer.contenders.local import policy
from benchmarks.trainer.flops import Work, flop, rows_work, tree_work
from benchmarks.trainer.models import ModelShape, Tuning, qwen3, shape_of
from benchmarks.trainer.reference import agreement, gradients_of, reference_gradient
from benchmarks.trainer.report import case_table, figures
from benchmarks.trainer.rounds import CaseResult, Measured

TINY = qwen3(16, 2, vocab=64)
TINY_MARKET = Sizes(agents=3, envs=2, markets=2, plays=1, pool=2, scalar_games=1, sync_envs=1)
SHAPE = ModelShape(
    layers=2, hidden=8, attention=16, vocab=32, layer_weights=100, adapter_weights=10
)


def short_window(name: str = "high", tokens: int = 24, vocab: int = 64) -> Window:
    """The first tick of a case, every segment cut down, so that a test takes no time."""
    calls = make_window(name, vocab=vocab, seed=1).head(AGENTS).calls
    scale = max(map(len, calls)) / tokens
    keep = [max(1, round(len(call.completion) / scale)) for call in calls]
    short = [
        type(call)(
            prompt=call.prompt[:: int(scale)],
            completion=call.completion[:k],
            mu=None if call.mu is None else call.mu[:k],
            advantage=call.advantage,
        )
        for call, k in zip(calls, keep, strict=True)
    ]
    return Window(name=name, calls=short)


def open_tiny(name: str, window: Window, tuning: Tuning, parts: int = 2) -> Session:
    contender = next(c for c in CONTENDERS if c.name == name)
    task = Task(
        config=TINY,
        window=window,
        tuning=tuning,
        seed=3,
        micro_batch=32 if contender.in_tokens else 2,
        grad_clip=1.0,
        parts=parts,
    )
    return contender.open(task)


def test_flop_by_hand() -> None:
    work = Work(tokens=10, scored=3, pairs=7)
    attention = 14 * 2 * 16 * 7
    assert flop(SHAPE, work, "full") == 6 * 200 * 10 + 6 * 8 * 32 * 3 + attention
    assert flop(SHAPE, work, "lora") == (4 * 200 + 6 * 20) * 10 + 4 * 8 * 32 * 3 + attention


def test_work_by_hand() -> None:
    assert rows_work([3, 2], scored=4) == Work(tokens=5, scored=4, pairs=6 + 3)
    shared = tree_work([[1, 2, 3], [1, 2, 4], [1, 2]], scored=4)
    assert shared == Work(tokens=4, scored=4, pairs=1 + 2 + 3 + 3)


def test_a_models_weights_are_counted_as_they_are() -> None:
    model = policy(
        Task(
            config=TINY,
            window=short_window(),
            tuning="lora",
            seed=1,
            micro_batch=1,
            grad_clip=1.0,
        )
    )
    named = dict(model.named_parameters())
    layers = [p.numel() for n, p in named.items() if "layers" in n and "base_layer.weight" in n]
    adapters = [p.numel() for n, p in named.items() if "lora_" in n]
    shape = shape_of(TINY)
    assert sum(layers) == shape.layers * shape.layer_weights
    assert sum(adapters) == shape.layers * shape.adapter_weights


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", ["babylon", "naive, length-bucketed"])
def test_gradients_agree_with_one_call_at_a_time(name: str, tuning: Tuning) -> None:
    window = short_window("skew").on_policy()
    session = open_tiny(name, window, tuning)
    for part in range(len(session.shares)):
        session.accumulate(part)
    task = Task(config=TINY, window=window, tuning=tuning, seed=3, micro_batch=1, grad_clip=1.0)
    expected = reference_gradient(policy(task), window)
    agreed = agreement(expected, gradients_of(session.model))
    assert agreed.cosine > 0.99999
    assert agreed.relative_error < 1e-4


def record(name: str, estimates: list[float]) -> Measured:
    work = Work(tokens=2000, scored=100, pairs=10)
    return Measured(
        contender=name,
        tuning="full",
        micro_batch=2,
        work=work,
        agreement=None,
        estimates=estimates,
        cpu_estimates=estimates,
        step_seconds=[0.5, 0.5, 9.0],
    )


def test_the_report_is_the_arithmetic_of_its_measurements() -> None:
    window = make_window("high", vocab=4096, seed=1)
    ours, theirs = record("babylon", [1.5, 9.0, 0.1]), record("TRL", [7.5, 7.5, 7.5])
    result = CaseResult(model="small", window=window, matmul_rate=1e12, measured=[ours, theirs])
    assert ours.seconds == 2.0 and theirs.seconds == 8.0
    values = figures(result, theirs)
    assert values["slower_than_ours"] == 4.0
    assert values["trained_tokens_per_s"] == window.trained_tokens / 8
    own = flop(shape_of(qwen3(128, 4)), theirs.work, "full")
    assert values["use_own"] == pytest.approx(own / 8e12)
    assert values["use_flat"] > values["use_unique"]
    assert "| TRL | 2 | 8.00 | 4.00x | 7.50 |" in case_table(result)
    assert "| babylon | 2 tokens | 2.00 | 1.00x | 1.50 |" in case_table(result)


def test_the_market_benchmark_measures_every_contender() -> None:
    results = {result.name: result for result in measure_market(TINY_MARKET, turns=1)}
    assert all(result.wall_s > 0 for result in results.values())
    assert results[REFERENCE].times_reference == 1.0
    assert len(table([*results.values()]).splitlines()) == 2 + len(results)
