"""The loss against numbers worked out by hand."""

import math

import pytest
import torch

from babylon.grpo.loss import LossConfig, LossTerms, decoupled_ppo_loss


def loss_of(
    theta: list[list[float]],
    proximal: list[list[float]],
    mu: list[list[float]],
    advantage: list[float],
    *,
    weight: list[float] | None = None,
    mask: list[list[bool]] | None = None,
    known: bool = True,
    config: LossConfig | None = None,
    reference: list[list[float]] | None = None,
) -> tuple[LossTerms, torch.Tensor]:
    """Probabilities in, (terms, gradient of the loss by log pi_theta) out."""
    log_theta = torch.tensor(theta).log().requires_grad_()
    kept = torch.ones_like(log_theta, dtype=torch.bool) if mask is None else torch.tensor(mask)
    terms = decoupled_ppo_loss(
        log_theta,
        torch.tensor(proximal).log(),
        torch.tensor(mu).log(),
        kept & known,
        kept,
        torch.tensor(advantage),
        torch.tensor(weight or [1.0] * len(theta)),
        config or LossConfig(),
        reference=None if reference is None else torch.tensor(reference).log(),
    )
    terms.loss.backward()
    assert log_theta.grad is not None
    return terms, log_theta.grad


def test_loss_and_gradient_of_a_hand_computed_case() -> None:
    """Two calls. Call 1: A = 2, weight 0.5, tokens with r = 1.1, w = 0.9 and r = 1, w = 1.25.
    L1 = -0.5 * (0.9 * 1.1 * 2 + 1.25 * 1 * 2) = -2.24. Call 2: A = -1, weight 0.25, one token with
    r = 0.9, w = 1: L2 = 0.25 * 0.9 = 0.225. d(r A)/d(log theta) = r A, so the gradient is
    -0.5 * 0.9 * 2.2, -0.5 * 1.25 * 2 and 0.25 * 0.9.
    """
    terms, gradient = loss_of(
        theta=[[0.495, 0.5], [0.36, 1.0]],
        proximal=[[0.45, 0.5], [0.40, 1.0]],
        mu=[[0.50, 0.4], [0.36, 1.0]],
        mask=[[True, True], [True, False]],
        advantage=[2.0, -1.0],
        weight=[0.5, 0.25],
        config=LossConfig(max_importance=2.0),
    )
    w = 0.40 / 0.36
    assert terms.loss.item() == pytest.approx(-2.24 + 0.25 * w * 0.9, rel=1e-5)
    assert gradient.flatten().tolist() == pytest.approx(
        [-0.99, -1.25, 0.25 * w * 0.9, 0.0], rel=1e-5
    )


def test_a_good_call_becomes_likelier_and_a_bad_one_less_likely() -> None:
    _, gradient = loss_of([[0.5], [0.5]], [[0.5], [0.5]], [[0.5], [0.5]], [1.0, -1.0])
    assert gradient[0].item() < 0 < gradient[1].item()


@pytest.mark.parametrize(("ratio", "flat"), [(1.27, False), (1.29, True), (0.5, False)])
def test_a_rising_good_token_is_clipped_at_the_upper_bound_alone(ratio: float, flat: bool) -> None:
    terms, gradient = loss_of([[0.5 * ratio]], [[0.5]], [[0.5 * ratio]], [1.0])
    assert (gradient.item() == 0) == flat
    assert terms.clipped == flat


@pytest.mark.parametrize(("ratio", "flat"), [(0.81, 0), (0.79, 1), (1.5, 0), (3.1, 1)])
def test_a_falling_bad_token_is_clipped_below_and_a_risen_one_by_the_dual_clip(
    ratio: float, flat: bool
) -> None:
    _, gradient = loss_of([[0.3 * ratio]], [[0.3]], [[0.3 * ratio]], [-1.0])
    assert (gradient.item() == 0) == flat


def test_the_importance_weight_is_truncated_at_two() -> None:
    _, modest = loss_of([[0.6]], [[0.6]], [[0.4]], [1.0])
    _, extreme = loss_of([[0.6]], [[0.6]], [[0.15]], [1.0])
    assert modest.item() == pytest.approx(-1.5)
    assert extreme.item() == pytest.approx(-2.0)


def test_tokens_outside_the_band_are_left_out() -> None:
    terms, gradient = loss_of([[0.2, 0.5]], [[0.2, 0.5]], [[0.5, 0.5]], [1.0])
    assert gradient[0, 0] == 0 and gradient[0, 1] != 0
    assert terms.masked_band == 1


def test_a_bad_call_that_theta_left_already_is_left_out() -> None:
    terms, gradient = loss_of([[0.45, 0.45]], [[0.5, 0.5]], [[0.5, 0.5]], [-1.0])
    assert terms.masked_negative == 2 and not gradient.any()  # log(0.5 / 0.45) = 0.105 > 0.05
    _, kept = loss_of([[0.45, 0.45]], [[0.5, 0.5]], [[0.5, 0.5]], [1.0])
    assert kept.all()


def test_a_call_with_an_impossible_token_is_left_out() -> None:
    terms, gradient = loss_of([[0.5, 0.5]], [[0.5, 1e-6]], [[0.5, 0.5]], [1.0])
    assert terms.masked_impossible == 2 and not gradient.any()


def test_unknown_behaviour_logprobs_mean_weight_one_and_no_masks() -> None:
    terms, gradient = loss_of([[0.2, 0.5]], [[0.2, 0.5]], [[0.9, 0.9]], [1.0], known=False)
    assert gradient.flatten().tolist() == pytest.approx([-1.0, -1.0])
    assert terms.masked_band == terms.masked_negative == terms.masked_impossible == 0


def test_padding_changes_nothing() -> None:
    plain, _ = loss_of([[0.4]], [[0.5]], [[0.5]], [1.0])
    padded, gradient = loss_of(
        [[0.4, 0.7]], [[0.5, 0.1]], [[0.5, 0.9]], [1.0], mask=[[True, False]]
    )
    assert padded.loss.item() == plain.loss.item()
    assert gradient[0, 1] == 0 and padded.tokens == 1


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    config = LossConfig(kl_penalty=1.0)
    terms, gradient = loss_of([[0.5]], [[0.5]], [[0.5]], [0.0], config=config, reference=[[0.25]])
    k3 = 0.5 - math.log(0.5) - 1  # ratio reference / theta = 0.5
    assert terms.loss.item() == pytest.approx(k3, rel=1e-5)
    assert gradient.item() > 0  # descending lowers theta, towards 0.25


def test_a_kl_penalty_without_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference"):
        loss_of([[0.5]], [[0.5]], [[0.5]], [1.0], config=LossConfig(kl_penalty=0.1))


def test_what_padding_predicts_cannot_overflow() -> None:
    """A model may find the padding token as unlikely as exp(-95); its log-ratio is no number."""
    theta = torch.tensor([[-0.7, -95.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    mask = torch.tensor([[True, False]])
    terms = decoupled_ppo_loss(
        theta,
        torch.tensor([[-0.7, 0.0]]),
        zeros,
        torch.zeros_like(mask),
        mask,
        torch.tensor([1.0]),
        torch.tensor([1.0]),
        LossConfig(kl_penalty=0.1),
        reference=torch.tensor([[-0.8, 0.0]]),
    )
    terms.loss.backward()
    assert theta.grad is not None and theta.grad.isfinite().all() and theta.grad[0, 1] == 0


def test_a_token_masked_for_several_reasons_counts_once() -> None:
    terms, _ = loss_of([[1e-6, 0.5]], [[1e-6, 0.5]], [[0.5, 0.5]], [-1.0])
    assert terms.masked_band and terms.masked_negative and terms.masked_impossible
    assert terms.masked == terms.tokens == 2


def test_the_effective_sample_size_sees_weights_before_truncation() -> None:
    terms, _ = loss_of([[0.9, 0.1]], [[0.9, 0.1]], [[0.1, 0.1]], [1.0])
    assert (terms.importance_sum, terms.importance_square_sum) == pytest.approx((10, 82))
