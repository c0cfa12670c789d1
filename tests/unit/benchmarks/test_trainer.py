"""The trainer's benchmark without its peers: cases, FLOP count, gradients, arithmetic, GPU path."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from babylon.training.grpo.prefix_tree import compile_tree
from benchmarks.trainer.__main__ import measures
from benchmarks.trainer.cases import AGENTS, CASES, Window, load_window, make_window, save_window
from benchmarks.trainer.contenders import CONTENDERS, Session, Task
from benchmarks.trainer.contenders.babylon_session import call_tokens, window_work
from benchmarks.trainer.contenders.local import policy
from benchmarks.trainer.contenders.padded import deal, left_padded, right_padded, token_chunks
from benchmarks.trainer.cuda import line, measure
from benchmarks.trainer.flops import Work, flop, rows_work, tree_work
from benchmarks.trainer.models import MODELS, ModelShape, Tuning, qwen3, shape_of
from benchmarks.trainer.reference import agreement, gradients_of, reference_gradient
from benchmarks.trainer.report import case_table, figures
from benchmarks.trainer.rounds import CaseResult, Measured
from benchmarks.trainer.worker import Worker

TINY = qwen3(16, 2, vocab=64)
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


@pytest.mark.parametrize("name", CASES)
def test_a_seed_repeats_a_window_and_every_agent_has_one_advantage(name: str) -> None:
    once, again = (make_window(name, vocab=4096, seed=7) for _ in range(2))
    other = make_window(name, vocab=4096, seed=8)
    assert all((a.prompt == b.prompt).all() for a, b in zip(once.calls, again.calls, strict=True))
    assert not np.array_equal(once.calls[0].prompt, other.calls[0].prompt)
    assert len(once.calls) == CASES[name] * AGENTS
    for agent in range(AGENTS):
        assert len({call.advantage for call in once.calls[agent::AGENTS]}) == 1
    assert sum(call.advantage for call in once.head(AGENTS).calls) == pytest.approx(0, abs=1e-9)


def test_the_cases_share_what_they_say() -> None:
    unique = {name: window_work(make_window(name, vocab=2**20, seed=1)).tokens for name in CASES}
    assert unique["high"] == 256 + 12 * 640 + 120 * (96 + 40 - 1)
    assert unique["low"] == 128 + 60 * (320 + 48 + 20 - 1)
    assert unique["zero"] == 60 * (128 + 320 + 48 + 20 - 1)
    lengths = [len(call) for call in make_window("skew", vocab=4096, seed=1).calls]
    assert max(lengths) > 10 * min(lengths)


def test_a_window_survives_its_file(tmp_path: Path) -> None:
    window = short_window("skew")
    save_window(window, tmp_path / "w.npz")
    loaded = load_window(tmp_path / "w.npz")
    assert loaded.name == "skew"
    for a, b in zip(window.calls, loaded.calls, strict=True):
        assert (a.prompt == b.prompt).all() and (a.completion == b.completion).all()
        assert a.mu is not None and b.mu is not None and (a.mu == b.mu).all()
        assert a.advantage == b.advantage


def test_flop_by_hand() -> None:
    work = Work(tokens=10, scored=3, pairs=7)
    attention = 14 * 2 * 16 * 7
    assert flop(SHAPE, work, "full") == 6 * 200 * 10 + 6 * 8 * 32 * 3 + attention
    assert flop(SHAPE, work, "lora") == (4 * 200 + 6 * 20) * 10 + 4 * 8 * 32 * 3 + attention


def test_work_by_hand() -> None:
    assert rows_work([3, 2], scored=4) == Work(tokens=5, scored=4, pairs=6 + 3)
    shared = tree_work([[1, 2, 3], [1, 2, 4], [1, 2]], scored=4)
    assert shared == Work(tokens=4, scored=4, pairs=1 + 2 + 3 + 3)


def test_our_tree_forwards_as_many_tokens_as_are_counted() -> None:
    window = short_window("high")
    nodes = compile_tree(call_tokens(window)).nodes
    assert sum(len(node.tokens) for node in nodes) == window_work(window).tokens


def test_a_models_weights_are_counted_as_they_are() -> None:
    model = policy(
        Task(
            config=TINY, window=short_window(), tuning="lora", seed=1, micro_batch=1, grad_clip=1.0
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


def test_agreement_by_hand() -> None:
    a = {"w": np.array([3.0, 4.0], dtype=np.float32)}
    b = {"w": np.array([3.0, 0.0], dtype=np.float32)}
    agreed = agreement(a, b)
    assert agreed.cosine == pytest.approx(0.6)
    assert agreed.relative_error == pytest.approx(0.8)
    with pytest.raises(ValueError, match="other parameters"):
        agreement(a, {"v": a["w"]})


def test_padding_keeps_every_token_and_parts_every_micro_batch() -> None:
    calls = short_window("skew").calls
    padded = left_padded(calls)
    assert int(padded.prompt_mask.sum()) == sum(len(call.prompt) for call in calls)
    assert padded.prompt_mask[:, -1].all() and padded.completion_mask[:, 0].all()
    assert right_padded(calls).shape == (len(calls), max(map(len, calls)))
    portions = token_chunks(calls, 3)
    assert sorted(len(c) for p in portions for c in p) == sorted(map(len, calls))
    works = [rows_work([len(p[0])] * len(p), 1) for p in portions]
    dealt = deal(works, 3)
    assert sorted(i for part in dealt for i in part) == list(range(len(portions)))
    assert len(dealt) == min(3, len(portions))


def test_the_shares_of_a_session_add_up_and_a_step_moves_the_weights() -> None:
    session = open_tiny("naive, length-bucketed", short_window("skew"), "full", parts=3)
    assert sum(session.shares) == pytest.approx(1)
    before = next(session.model.parameters()).detach().clone()
    session.accumulate(0)
    session.update()
    assert not torch.equal(before, next(session.model.parameters()))
    assert all(parameter.grad is None for parameter in session.model.parameters())


@pytest.mark.parametrize("name", ["babylon", "naive, length-bucketed"])
def test_sweep_then_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", TINY)
    save_window(short_window("skew"), tmp_path / "w.npz")
    contender = next(c for c in CONTENDERS if c.name == name)
    monkeypatch.setattr("benchmarks.trainer.contenders.CALLS", (1, 2))
    worker = Worker(contender, "full", seed=3)
    assert worker.prepare("small", str(tmp_path / "w.npz")) == {"tuning": "full"}
    worker.gradient(str(tmp_path / "g.npz"), calls=4)
    assert np.load(tmp_path / "g.npz").files
    tuned = worker.tune()
    assert tuple(tuned["tried"]) == ((3072,) if contender.in_tokens else (1, 2))
    assert tuned["micro_batch"] == min(tuned["tried"], key=tuned["tried"].__getitem__)
    shares = worker.warm(tuned["micro_batch"])["shares"]
    parts = [worker.part(number) for number in range(len(shares))]
    assert [part["share"] for part in parts] == shares and sum(shares) == pytest.approx(1)
    assert worker.finish().keys() == {"peak_bytes"} and worker.session is None


def test_our_micro_batch_is_in_tokens_and_bounds_what_is_forwarded_at_once() -> None:
    window = short_window("zero")
    for micro_batch in (16, 64):
        task = Task(
            config=TINY,
            window=window,
            tuning="full",
            seed=3,
            micro_batch=micro_batch,
            grad_clip=1.0,
        )
        session = CONTENDERS[0].open(task)
        rows: list[int] = []
        layer = next(m for n, m in session.model.named_modules() if n.endswith("layers.0.mlp"))
        layer.register_forward_pre_hook(
            lambda _, given, rows=rows: rows.append(given[0].shape[:-1].numel())
        )
        session.accumulate(0)
        assert micro_batch / 4 < max(rows) <= micro_batch


LORA = {"babylon, LoRA", "AgileRL, LoRA", "AgileRL, LoRA, no checkpointing"}


@pytest.mark.parametrize(
    ("case", "model", "everything", "left_out"),
    [
        ("high", "small", False, set()),
        ("low", "small", False, LORA),
        ("skew", "small", False, LORA | {"TRL, completion head"}),
        ("skew", "small", True, set()),
        ("high", "larger", False, LORA | {"TRL"}),
        ("high", "larger", True, LORA),
    ],
)
def test_the_default_run_leaves_out_only_what_it_says(
    case: str, model: str, everything: bool, left_out: set[str]
) -> None:
    assert {c.name for c in CONTENDERS if not measures(c, model, case, everything)} == left_out


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


def test_the_gpu_measurement_runs_on_a_small_model() -> None:
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=None,
    )
    for tuning in ("full", "lora"):
        result = measure(
            "tiny", config, tuning, short_window(), device="cpu", repeats=1, max_tokens=64
        )
        assert result.seconds > 0 and result.flop > 0
        assert result.share_of(result.flop / result.seconds) == pytest.approx(1)
        assert "unique-token MFU 100.0% (aim 25%)" in line(
            result, result.flop / result.seconds, 0.25
        )
