"""Out of memory: the same gradients from smaller portions, and a clear end when none fits."""

import inspect
import logging
import os
import pathlib
import resource
import subprocess
import sys
from random import Random
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from babylon.training.grpo import forward as module
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.forward import (
    TRY_MORE_AFTER,
    FittingForward,
    OutOfMemoryError,
    Path,
    PolicyForward,
    checkpoint_activations,
)
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import compile_window
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.windows import Probe, relative_error, trained_gradient, update, window

ROOT = pathlib.Path(__file__).parents[4]
MIB = 2**20
PROBE = 16  # tokens: what is run to learn whether a model can share prefixes is shorter


def with_memory_for(tokens: int) -> Any:
    """A model that fails as CUDA does when a pass has more input tokens than that."""
    model = tiny_model(0)

    def refuse(_: Any, __: Any, given: dict[str, Any]) -> None:
        if (count := given["input_ids"].numel()) > tokens:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {count} tokens")

    model.model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def test_a_large_step_has_the_same_gradient_in_portions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trajectories = window(agents=8)
    whole = trained_gradient(tiny_model(0), trajectories)
    probe = Probe(model := with_memory_for(100))
    config = TrainerConfig(iterations=1, trajectories_per_step=100, grad_clip=1e9, max_tokens=400)
    report = train_on_window(model, probe, compile_window(trajectories, config))
    assert relative_error(probe.gradients[-1], whole) < 1e-5
    assert (report.oom_halvings, report.max_tokens) == (2, 100)
    assert "out of memory with portions of 400 tokens: the step is repeated with 200" in caplog.text
    assert "Tried" in caplog.text


def test_shared_text_is_forwarded_once_while_its_activations_fit() -> None:
    """With room for all, for the upper portions, and for none."""
    tree = compile_window(window(agents=8), TrainerConfig()).tree
    passes, gradients = [], []
    for kept in (10_000, 100, 0):
        model, count = tiny_model(0), [0]

        def counted(*_: Any, count: list[int] = count, **__: Any) -> None:
            count[0] += 1

        forward = PolicyForward(model, max_tokens=100)
        forward.keep_tokens = kept
        model.model.register_forward_pre_hook(counted)
        forward.accumulate(tree, lambda _, values: values.logprobs.square().sum())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        passes.append(count[0])
    assert passes[0] <= passes[1] < passes[2]
    assert all(relative_error(one, gradients[2]) < 1e-6 for one in gradients)


def test_a_conversation_of_five_portions_is_forwarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "portion_tokens", lambda *_: 100)
    model, passes = tiny_model(0), []
    forward = PolicyForward(model)
    model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    said = list(range(1, 10)) * 55
    calls = [CallTokens(prompt=said[:n], completion=[1, 2], logprobs=None) for n in (90, 288, 495)]
    forward.accumulate(compile_tree(calls), lambda _, values: values.logprobs.sum())
    assert len(passes) == 5


def test_a_call_of_more_portions_than_frames_of_python_is_trained() -> None:
    tree = compile_tree([CallTokens(prompt=[5, 6] * 32, completion=[1, 2], logprobs=None)])
    gradients = []
    for portion, limit in ((10_000, sys.getrecursionlimit()), (1, len(inspect.stack()) + 60)):
        model, before = tiny_model(0), sys.getrecursionlimit()
        forward = PolicyForward(model, max_tokens=portion)
        sys.setrecursionlimit(limit)
        try:
            forward.accumulate(tree, lambda _, values: values.logprobs.sum())
        finally:
            sys.setrecursionlimit(before)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_kept_activations_are_given_up_before_portions_shrink(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def short(forward: PolicyForward) -> None:
        tries.append((forward.max_tokens, forward.keep_tokens > 0))
        if len(tries) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    fitting = FittingForward(tiny_model(0), None)
    fitting.run(short)
    first = tries[0][0]
    assert tries == [(first, True), (first, False), (first // 2, False)]
    remembered: dict[str, Any] = {}
    fitting.remember([remembered])
    again = FittingForward(tiny_model(0), None, [remembered])
    assert (again.forward.max_tokens, again.forward.keep_tokens) == (first // 2, 0)
    smaller = FittingForward(tiny_model(0), 100)
    smaller.restore(9)  # of larger portions
    assert smaller.forward.max_tokens == 100


def test_the_portion_that_fitted_grows_again_and_counts_only_without_a_size_that_is_given() -> None:
    """Another process may have used the memory for an hour."""
    plan = FittingForward(tiny_model(0), None).forward
    group: dict[str, Any] = {"portion_that_fits": {"cpu": (plan.max_tokens // 4, True)}}
    given = FittingForward(tiny_model(0), 4096, [group])
    given.remember([group])
    assert given.forward.max_tokens == 4096 and not given.checkpointing
    found = []
    for _ in range(2 * TRY_MORE_AFTER + 1):
        fitting = FittingForward(tiny_model(0), None, [group])
        found.append((fitting.forward.max_tokens, fitting.checkpointing))
        fitting.remember([group])
    sizes = [(plan.max_tokens // 4, True), (plan.max_tokens // 2, True)]
    assert found[:TRY_MORE_AFTER] == sizes[:1] * TRY_MORE_AFTER
    assert found[TRY_MORE_AFTER:-1] == sizes[1:] * TRY_MORE_AFTER
    assert found[-1] == (plan.max_tokens, False) and plan.keep_tokens
    assert FittingForward(tiny_model(0), None, [group]).forward.keep_tokens == plan.keep_tokens


def test_a_portion_that_runs_out_again_is_tried_for_as_long_as_before() -> None:
    group: dict[str, Any] = {"portion_that_fits": {"cpu": (256, True, TRY_MORE_AFTER - 1)}}
    fitting = FittingForward(tiny_model(0), None, [group])
    fitting.restore(1)
    fitting.remember([group])
    assert group["portion_that_fits"] == {"cpu": (128, True, 0)}


def test_activations_are_recomputed_on_request() -> None:
    config = TrainerConfig(iterations=1, activation_checkpointing=True)
    model = tiny_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    report = train_on_window(model, optimizer, compile_window(window(), config))
    assert report.activation_checkpointing and report.oom_halvings == 0


def test_gradients_of_an_attempt_that_did_not_fit_are_forgotten() -> None:
    """It fails after some of its portions have been added to the gradient."""
    trajectories = window(agents=8)
    whole = trained_gradient(tiny_model(0), trajectories)
    model = tiny_model(0)
    passes = 0

    def refuse_the_second(_: Any, __: Any, given: dict[str, Any]) -> None:
        nonlocal passes
        large = given["input_ids"].numel() > PROBE
        passes += large
        if large and passes == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    model.model.register_forward_pre_hook(refuse_the_second, with_kwargs=True)
    assert relative_error(trained_gradient(model, trajectories, max_tokens=200), whole) < 1e-5
    assert passes > 4


def test_the_failure_names_the_smallest_portion_and_the_remedy() -> None:
    with pytest.raises(OutOfMemoryError, match=r"portions of 100 tokens.*TUNING=lora"):
        update(with_memory_for(PROBE), window(), max_tokens=400)


def test_an_optimiser_that_does_not_fit_says_so() -> None:
    class Large(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried the moments")

    model = tiny_model(0)
    config = TrainerConfig(iterations=1)
    with pytest.raises(OutOfMemoryError, match=r"in the optimiser.*Tried the moments.*TUNING=lora"):
        train_on_window(model, Large(model.parameters()), compile_window(window(), config))


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    def broken(_: PolicyForward) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        FittingForward(tiny_model(0), 1000).run(broken)


@pytest.mark.parametrize("path", ["padded", "piecewise"])
def test_recomputing_activations_changes_no_gradient_and_switches_no_dropout_on(path: Path) -> None:
    """In several portions, so that gradients pass from one to the keys of another."""
    tree = compile_window(window(agents=8), TrainerConfig()).tree
    gradients, passes = [], []
    for recompute in (False, True):
        model = tiny_model(0)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        count = [0]

        def counted(*_: Any, count: list[int] = count) -> None:
            count[0] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(counted)
        forward = PolicyForward(model, max_tokens=100, path=path)
        if recompute:
            assert checkpoint_activations(model)
        forward.accumulate(tree, lambda _, values: values.logprobs.square().sum())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        passes.append(count[0])
    assert relative_error(gradients[1], gradients[0]) < 1e-5
    assert passes[0] < passes[1] <= 2 * passes[0]


def test_a_real_lack_of_memory_is_survived_up_to_a_clear_failure() -> None:
    """In a process of its own, whose address space is limited once the model is loaded.

    Blocks of a megabyte and more go back to the system when they are freed, so that what fits does
    not depend on what lies around.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the step is repeated with" in done.stderr
    survived, failed = done.stdout.splitlines()
    assert survived == "survived"
    assert "out of memory with portions of" in failed and "TUNING=lora" in failed


def wide_model() -> Any:
    """Its activations outweigh its weights: 0.3 MB a token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=8192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config).eval()


def wide_window() -> list[ScoredTrajectory]:
    random = Random(0)
    return [
        ScoredTrajectory(
            trajectory_id=str(agent),
            group="g",
            score=float(agent),
            calls=[
                CallTokens(
                    prompt=[random.randrange(64) for _ in range(200)], completion=[5], logprobs=None
                )
            ],
        )
        for agent in range(8)
    ]


def limit(megabytes: int) -> None:
    """So much more address space than is in use."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + megabytes * MIB
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig()
    whole = trained_gradient(wide_model(), wide_window(), max_tokens=400)
    limit(300)
    model = wide_model()
    probe = Probe(model)
    config = TrainerConfig(iterations=1, trajectories_per_step=100, grad_clip=1e9, max_tokens=1600)
    report = train_on_window(model, probe, compile_window(wide_window(), config))
    assert report.oom_halvings > 0, report
    assert relative_error(probe.gradients[-1], whole) < 1e-5
    print("survived")
    limit(8)
    try:
        train_on_window(model, probe, compile_window(wide_window(), config))
    except OutOfMemoryError as error:
        print(error)


if __name__ == "__main__":
    main()
