from pathlib import Path

import msgspec
import pytest
import torch

from babylon.core.errors import ModelError
from babylon.core.llm_calls import Message
from babylon.core.trajectories import Call, Trajectory
from babylon.training.grpo.forward import PolicyForward
from babylon.training.likelihood import log_ratios
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model
from tests.trajectories import a_trajectory

PROMPT = (257, 10, 20, 30)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), seed=0)


def call(*completion: int, seed: int = 0, temperature: float = 1.0) -> Call:
    """Played by the tiny policy of that seed."""
    logprobs = plain_logprobs(tiny_model(seed), PROMPT, completion, temperature=temperature)
    return Call(
        step=0,
        messages=(Message(role="user", content="?"),),
        response="",
        temperature=temperature,
        prompt_token_ids=PROMPT,
        completion_token_ids=completion,
        logprobs=tuple(logprobs.tolist()),
    )


def trajectory(name: str, *calls: Call) -> Trajectory:
    return a_trajectory(name, steps=len(calls), calls=calls)


def test_a_policy_makes_its_own_play_neither_likelier_nor_less(policy: Path) -> None:
    played = trajectory("own", call(1, 2, 258), call(3, 258, temperature=0.7))
    assert log_ratios(policy, [played])["own"] == pytest.approx(0, abs=1e-3)


def test_a_lack_of_memory_has_a_remedy(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PolicyForward, "logprobs", lacking)
    with pytest.raises(ModelError, match=r"out of memory with portions of .*more memory"):
        log_ratios(policy, [trajectory("own", call(1, 258))])


def test_the_ratio_is_over_all_tokens_of_all_calls(policy: Path) -> None:
    calls = [call(1, 2, 258, seed=1), call(5, 258, seed=1)]
    mine = [plain_logprobs(tiny_model(0), PROMPT, c.completion_token_ids or ()) for c in calls]
    expected = sum(float(m.sum()) - sum(c.logprobs or ()) for m, c in zip(mine, calls, strict=True))
    assert abs(expected) > 1
    assert log_ratios(policy, [trajectory("other", *calls)])["other"] == pytest.approx(
        expected, abs=1e-3
    )


def test_play_with_the_tokens_of_another_model_is_left_out(policy: Path) -> None:
    own = trajectory("own", call(1, 258))
    foreign = msgspec.structs.replace(call(2, 258), completion_token_ids=(99_999, 258))
    other = trajectory("other", call(1, 258), foreign)
    assert [*log_ratios(policy, [own, other])] == ["own"]
    assert log_ratios(policy, [other]) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": None},
        {"completion_token_ids": None, "logprobs": None},
        {"untrainable": "top_k=5"},
        {"top_p": 0.9},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_a_trajectory_needs_only_exact_calls(policy: Path, change: dict[str, object]) -> None:
    whole = trajectory("whole", call(1, 258))
    part = trajectory("part", call(1, 258), msgspec.structs.replace(call(2, 258), **change))
    assert log_ratios(policy, [whole, part]).keys() == {"whole"}
    assert log_ratios(policy, [part, trajectory("silent")]) == {}
