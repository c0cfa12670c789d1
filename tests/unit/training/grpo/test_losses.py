"""Every registered loss against numbers worked out by hand, and what must not change any."""

import math
from dataclasses import replace

import pytest
import torch

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.loss_inputs import Importance, LossBounds, LossInputs, LossTerms
from babylon.training.grpo.losses import LOSSES, loss_terms
from babylon.training.grpo.penalties import entropy_floor, kl_anchor, penalised

WIDE = LossBounds(gspo_low=0.1, gspo_high=10.0)  # nothing in these cases leaves GSPO's clip


@pytest.fixture(params=LOSSES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs(
    theta: list[list[float]],
    proximal: list[list[float]],
    mu: list[list[float]],
    advantage: list[float],
    *,
    mask: list[list[bool]] | None = None,
    known: bool = True,
    reference: list[list[float]] | None = None,
) -> LossInputs:
    """Probabilities in, their logarithms out; theta asks for a gradient."""
    log_theta = torch.tensor(theta).log().requires_grad_()
    kept = torch.ones_like(log_theta, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return LossInputs(
        theta=log_theta,
        proximal=torch.tensor(proximal).log(),
        mu=torch.tensor(mu).log(),
        known=kept & known,
        mask=kept,
        advantage=torch.tensor(advantage),
        reference=None if reference is None else torch.tensor(reference).log(),
    )


def loss_of(
    name: str, given: LossInputs, bounds: LossBounds | None = None, kl_penalty: float = 0.0
) -> tuple[LossTerms, list[list[float]]]:
    """The terms, and the gradient of their sum by log pi_theta."""
    config = TrainerConfig(bounds=bounds or LossBounds(), kl_penalty=kl_penalty)
    terms = penalised(loss_terms(name, given, config.bounds), given, config, signal=1.0)
    [gradient] = torch.autograd.grad(terms.loss.sum(), given.theta)
    return terms, gradient.tolist()


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_the_names_of_the_losses_are_a_contract() -> None:
    assert {name: loss.call_weight for name, loss in LOSSES.items()} == {
        "ppo_clip": None,
        "cispo": None,
        "gspo": "call",
        "gspo_token": "call",
        "sapo": None,
        "dapo": "token",
        "dr_grpo": "constant",
        "reinforce_is": None,
    }


GATE = 1 / (1 + math.exp(-0.1))
MEAN_S, MEAN_W = math.sqrt(1.1), math.sqrt(0.9 * 1.25)
HAND_COMPUTED = {
    # w r A = 0.9 * 1.1 * 2 and 1.25 * 1 * 2; d(r A) / d(log theta) = r A
    "ppo_clip": ([-1.98, -2.5], [-1.98, -2.5]),
    "dapo": ([-1.98, -2.5], [-1.98, -2.5]),
    "dr_grpo": ([-1.98, -2.5], [-1.98, -2.5]),
    # theta / mu = 0.99 and 1.25, without gradient, times 2 log theta
    "cispo": ([-1.98 * math.log(0.495), -2.5 * math.log(0.5)], [-1.98, -2.5]),
    "reinforce_is": ([-1.98 * math.log(0.495), -2.5 * math.log(0.5)], [-1.98, -2.5]),
    # geometric means: s = sqrt(1.1 * 1), w = sqrt(0.9 * 1.25); each token carries w s A
    "gspo": ([-2 * MEAN_W * MEAN_S] * 2, [-2 * MEAN_W * MEAN_S] * 2),
    # GSPO's ratio, the tokens' own weights
    "gspo_token": ([-1.8 * MEAN_S, -2.5 * MEAN_S], [-1.8 * MEAN_S, -2.5 * MEAN_S]),
    # 4 w A sigmoid(r - 1); the gate's slope at 1 is 1 / 4
    "sapo": ([-7.2 * GATE, -5.0], [-7.2 * GATE * (1 - GATE) * 1.1, -2.5]),
}


def test_loss_and_gradient_of_a_hand_computed_case(name: str) -> None:
    """One call with A = 2: r = 1.1 and 1, pi_p / mu = 0.9 and 1.25."""
    case = inputs([[0.495, 0.5]], [[0.45, 0.5]], [[0.5, 0.4]], [2.0])
    terms, gradient = loss_of(name, case, WIDE)
    losses, slopes = HAND_COMPUTED[name]
    assert flat(terms.loss.tolist()) == pytest.approx(losses, rel=1e-5)
    assert flat(gradient) == pytest.approx(slopes, rel=1e-5)


def test_a_good_call_becomes_likelier_and_a_bad_one_less_likely(name: str) -> None:
    _, gradient = loss_of(name, inputs([[0.5]] * 2, [[0.5]] * 2, [[0.5]] * 2, [1.0, -1.0]))
    assert gradient[0][0] < 0 < gradient[1][0]


def test_padding_changes_nothing(name: str) -> None:
    plain, slope = loss_of(name, inputs([[0.49]], [[0.5]], [[0.5]], [1.0]))
    padded, slopes = loss_of(
        name, inputs([[0.49, 0.7]], [[0.5, 0.1]], [[0.5, 0.9]], [1.0], mask=[[True, False]])
    )
    assert padded.loss.tolist() == [[plain.loss.item(), 0.0]]
    assert slopes == [[slope[0][0], 0.0]]
    assert not (padded.clipped_low | padded.clipped_high | padded.masks.dropped)[0, 1]


def test_a_call_has_the_same_loss_alone_and_among_others(name: str) -> None:
    theta, p, mu = [[0.5, 0.4], [0.3, 0.6]], [[0.49, 0.4], [0.3, 0.61]], [[0.5, 0.35], [0.31, 0.6]]
    both, slopes = loss_of(name, inputs(theta, p, mu, [1.0, -0.5]))
    for row, a in enumerate((1.0, -0.5)):
        alone, slope = loss_of(name, inputs([theta[row]], [p[row]], [mu[row]], [a]))
        assert alone.loss[0].tolist() == both.loss[row].tolist() and slope == [slopes[row]]


def test_a_call_with_an_impossible_token_is_left_out(name: str) -> None:
    terms, gradient = loss_of(name, inputs([[0.5, 0.5]], [[0.5, 1e-6]], [[0.5, 0.5]], [1.0]))
    assert terms.masks.impossible.all() and not any(flat(gradient))


def test_a_bad_call_that_theta_left_already_is_left_out(name: str) -> None:
    """mean log(0.5 / 0.45) = 0.105 > 0.05."""
    given = inputs([[0.45, 0.45]], [[0.5, 0.5]], [[0.5, 0.5]], [-1.0])
    terms, gradient = loss_of(name, given, WIDE)
    assert terms.masks.negative.all() and not any(flat(gradient))
    good = replace(given, advantage=torch.tensor([1.0]))
    assert all(flat(loss_of(name, good, WIDE)[1]))


def test_unknown_behaviour_logprobs_mean_weight_one_and_no_masks(name: str) -> None:
    terms, gradient = loss_of(
        name, inputs([[0.2, 0.5]], [[0.2, 0.5]], [[0.9, 0.9]], [1.0], known=False)
    )
    assert flat(gradient) == pytest.approx([-1.0, -1.0])
    assert not terms.masks.dropped.any()


def test_what_padding_predicts_cannot_overflow(name: str) -> None:
    """A model may find the padding token as unlikely as exp(-95); its log-ratio is no number."""
    theta = torch.tensor([[-0.7, -95.0]], requires_grad=True)
    zeros, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    given = LossInputs(
        theta=theta,
        proximal=torch.tensor([[-0.7, 0.0]]),
        mu=zeros,
        known=mask & False,
        mask=mask,
        advantage=torch.tensor([1.0]),
        reference=torch.tensor([[-0.8, 0.0]]),
    )
    _, gradient = loss_of(name, given, kl_penalty=0.1)
    assert math.isfinite(gradient[0][0]) and gradient[0][1] == 0


def test_a_token_that_p_found_impossible_cannot_overflow(name: str) -> None:
    """Its ratio of e^119 is beyond fp32; the call is left out, and its gradient is zero."""
    given = replace(
        inputs([[0.5, 0.5]], [[0.5, 0.5]], [[0.5, 0.5]], [-1.0]),
        proximal=torch.tensor([[-120.0, -0.7]]),
    )
    _, gradient = loss_of(name, given)
    assert gradient == [[0.0, 0.0]]


def test_the_kl_penalty_pulls_towards_the_reference(name: str) -> None:
    given = inputs([[0.5]], [[0.5]], [[0.5]], [0.0], reference=[[0.25]])
    terms, gradient = loss_of(name, given, kl_penalty=1.0)
    assert terms.loss.item() == pytest.approx(math.log(2), rel=1e-5)
    assert gradient[0][0] == pytest.approx(math.log(2), rel=1e-5)  # descending lowers theta


@pytest.mark.parametrize("nats", [-30.0, -10.0, -9.0, -3.0, -2.5, -0.1, 0.0, 0.1, 3.0, 9.0])
def test_a_kl_penalty_has_the_gradient_of_the_papers_formula_within_ten_nats(nats: float) -> None:
    """Eq. 7 of arXiv 2512.02556 in double precision: r (exp(-d) + d - 1) for d = theta - ref."""
    p = torch.tensor([[-1.0]], dtype=torch.float64)
    theta = p.clone().requires_grad_()
    exact = torch.exp(theta - p) * (torch.exp(p - nats - theta) - (p - nats - theta) - 1)
    [paper] = torch.autograd.grad(exact.sum(), theta)
    start = torch.tensor([[-1.0]], requires_grad=True)
    one = inputs([[0.5]], [[0.5]], [[0.5]], [0.0])
    given = replace(
        one, theta=start, proximal=p.float(), mu=p.float(), reference=(p - nats).float()
    )
    [ours] = torch.autograd.grad(kl_anchor(given, LossBounds()).sum(), start)
    assert ours.item() == pytest.approx(max(-10.0, min(10.0, paper.item())), abs=1e-5)


def test_a_kl_penalty_has_in_expectation_the_gradient_of_the_divergence() -> None:
    """Two tokens, each sampled as often as mu says; the divergence is computed over both."""
    mu, p, reference = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8])
    logit = torch.tensor([0.3, 0.0], requires_grad=True)
    theta = torch.log_softmax(logit, -1)
    [expected] = torch.autograd.grad((theta.exp() * (theta - reference.log())).sum(), logit)
    theta = torch.log_softmax(logit, -1)
    given = replace(
        inputs([[0.5], [0.5]], p[:, None].tolist(), mu[:, None].tolist(), [0.0, 0.0]),
        theta=theta[:, None],
        reference=reference.log()[:, None],
    )
    [gradient] = torch.autograd.grad((mu * kl_anchor(given, LossBounds())[:, 0]).sum(), logit)
    torch.testing.assert_close(gradient, expected)


def test_an_entropy_floor_pays_for_entropy_in_calls_below_it() -> None:
    half = [[0.5, 0.5]] * 2
    entropy = torch.tensor([[0.2, 0.6], [0.8, 1.0]], requires_grad=True)
    mask = [[True, True], [True, False]]
    given = replace(inputs(half, half, half, [0.0, 0.0], mask=mask), entropy=entropy)
    [gradient] = torch.autograd.grad(entropy_floor(given, floor=0.5).sum(), entropy)
    assert gradient.tolist() == [[-1, -1], [0, 0]]
    [gradient] = torch.autograd.grad(entropy_floor(given, floor=0.9).sum(), entropy)
    assert gradient.tolist() == [[-1, -1], [-1, 0]]


def test_a_kl_penalty_without_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference"):
        loss_of("ppo_clip", inputs([[0.5]], [[0.5]], [[0.5]], [1.0]), kl_penalty=0.1)


@pytest.mark.parametrize(
    ("advantage", "ratio", "stopped"),
    [
        *((1, 1.27, False), (1, 1.29, True), (1, 0.6, False)),
        *((-1, 0.81, False), (-1, 0.79, True), (-1, 1.5, False)),
    ],
)
def test_a_rising_good_token_is_clipped_above_alone_and_a_falling_bad_one_below(
    advantage: float, ratio: float, stopped: bool
) -> None:
    given = inputs([[0.3 * ratio]], [[0.3]], [[0.3 * ratio]], [float(advantage)])
    terms, gradient = loss_of("ppo_clip", given)
    assert (gradient[0][0] == 0) == stopped
    assert terms.clipped_high.item() == (stopped and advantage > 0)
    assert terms.clipped_low.item() == (stopped and advantage < 0)


def test_a_bad_token_that_rose_far_stops_at_the_dual_clip_but_not_under_dapo() -> None:
    risen = inputs([[0.93]], [[0.3]], [[0.93]], [-1.0])  # r = 3.1
    terms, gradient = loss_of("ppo_clip", risen)
    assert gradient == [[0.0]] and terms.clipped_high.item()
    w = 0.3 / 0.93
    assert loss_of("dapo", risen)[1][0][0] == pytest.approx(w * 3.1)


def test_dr_grpo_clips_as_far_above_as_below() -> None:
    risen = inputs([[0.625]], [[0.5]], [[0.5]], [1.0])  # r = 1.25
    assert loss_of("dr_grpo", risen)[1] == [[0.0]]
    assert loss_of("dapo", risen)[1][0][0] == pytest.approx(-1.25)


def test_gspo_clips_a_call_as_a_whole() -> None:
    """s = sqrt(1.1 * 0.92) = 1.006: above the bound, though one of the tokens fell."""
    terms, gradient = loss_of("gspo", inputs([[0.55, 0.46]], [[0.5, 0.5]], [[0.5, 0.5]], [1.0]))
    assert gradient == [[0.0, 0.0]] and terms.clipped_high.all()
    assert terms.loss.tolist()[0] == pytest.approx([-1.0004] * 2)


@pytest.mark.parametrize(
    ("name", "grown", "weight"),
    [
        ("cispo", 3.0, 3.0),
        ("cispo", 6.0, 5.0),  # capped, and not left out
        ("reinforce_is", 1.5, 1.5),
        ("reinforce_is", 3.0, 2.0),
        ("reinforce_is", 6.0, 0.0),  # outside the band
    ],
)
def test_policy_gradient_weights_are_capped(name: str, grown: float, weight: float) -> None:
    terms, gradient = loss_of(name, inputs([[0.1 * grown]], [[0.1]], [[0.1]], [1.0]))
    assert gradient[0][0] == pytest.approx(-weight)
    assert terms.clipped_high.item() == (grown > weight)


def test_the_importance_weight_is_truncated_at_two() -> None:
    _, modest = loss_of("ppo_clip", inputs([[0.6]], [[0.6]], [[0.4]], [1.0]))
    _, extreme = loss_of("ppo_clip", inputs([[0.6]], [[0.6]], [[0.15]], [1.0]))
    assert modest[0][0] == pytest.approx(-1.5)
    assert extreme[0][0] == pytest.approx(-2.0)


def test_tokens_outside_the_band_are_left_out() -> None:
    terms, gradient = loss_of("ppo_clip", inputs([[0.2, 0.5]], [[0.2, 0.5]], [[0.5, 0.5]], [1.0]))
    assert gradient[0][0] == 0 and gradient[0][1] != 0
    assert terms.masks.band.tolist() == [[True, False]]


def test_every_bound_changes_what_it_says() -> None:
    """An option that nothing reads would leave its loss alone."""
    cases = {
        "clip_low": (0.9, "ppo_clip", inputs([[0.44]], [[0.5]], [[0.44]], [-1.0])),
        "clip_high": (1.1, "ppo_clip", inputs([[0.6]], [[0.5]], [[0.5]], [1.0])),
        "dual_clip": (1.5, "ppo_clip", inputs([[0.9]], [[0.5]], [[0.9]], [-1.0])),
        "max_importance": (1.1, "ppo_clip", inputs([[0.6]], [[0.6]], [[0.5]], [1.0])),
        "band_low": (0.9, "ppo_clip", inputs([[0.4]], [[0.4]], [[0.5]], [1.0])),
        "band_high": (1.1, "ppo_clip", inputs([[0.6]], [[0.6]], [[0.5]], [1.0])),
        "negative_call_drift": (0.5, "ppo_clip", inputs([[0.45]], [[0.5]], [[0.5]], [-1.0])),
        "impossible_ratio": (0.9, "ppo_clip", inputs([[0.4]], [[0.4]], [[0.5]], [1.0])),
        "importance": ("token_mask", "ppo_clip", inputs([[0.6]], [[0.6]], [[0.25]], [1.0])),
        "sapo_positive": (2.0, "sapo", inputs([[0.6]], [[0.5]], [[0.5]], [1.0])),
        "sapo_negative": (2.0, "sapo", inputs([[0.6]], [[0.5]], [[0.5]], [-1.0])),
        "cispo_max": (1.1, "cispo", inputs([[0.6]], [[0.6]], [[0.5]], [1.0])),
        "gspo_low": (0.5, "gspo", inputs([[0.49]], [[0.5]], [[0.5]], [-1.0])),
        "gspo_high": (1.5, "gspo", inputs([[0.6]], [[0.5]], [[0.5]], [1.0])),
    }
    for name, (value, loss, given) in cases.items():
        changed = replace(LossBounds(), **{name: value})
        assert loss_of(loss, given, changed)[1] != loss_of(loss, given)[1], name
    assert {*cases, "kl_clamp", "dr_grpo_length", "teacher_clamp"} == set(LossBounds.__slots__)


@pytest.mark.parametrize(
    ("importance", "weights"),
    [
        ("token_truncate", [1.2, 2.0, 0.8, 2.0]),
        ("token_mask", [1.2, 2.4, 0.8, 2.8]),  # IcePop: within 0.5 and 5 as they are
        ("sequence_truncate", [2.0, 2.0, 2.0, 2.0]),
        ("sequence_mask", [0.0, 0.0, 0.0, 0.0]),  # 1.2 * 2.4 * 0.8 * 2.8 is above 2
    ],
)
def test_the_weight_against_the_sampling_policy(
    importance: Importance, weights: list[float]
) -> None:
    """pi_p / mu of four tokens is 1.2, 2.4, 0.8 and 2.8; A = 1 and r = 1."""
    p = [[0.6, 0.6, 0.4, 0.7]]
    given = inputs(p, p, [[0.5, 0.25, 0.5, 0.25]], [1.0])
    _, gradient = loss_of("ppo_clip", given, LossBounds(importance=importance))
    assert flat(gradient) == pytest.approx([-w for w in weights], rel=1e-5)


def test_a_call_near_its_sampling_policy_keeps_its_own_sequence_weight() -> None:
    p, mu = [[0.6, 0.4]], [[0.5, 0.5]]
    for importance in ("sequence_truncate", "sequence_mask"):
        bounds = LossBounds(importance=importance)
        _, gradient = loss_of("ppo_clip", inputs(p, p, mu, [1.0]), bounds)
        assert flat(gradient) == pytest.approx([-0.96, -0.96], rel=1e-5)


def test_a_loss_with_a_weight_of_its_own_takes_no_other() -> None:
    with pytest.raises(ValueError, match="'sequence_mask' with loss 'cispo'"):
        TrainerConfig(loss="cispo", bounds=LossBounds(importance="sequence_mask"))


def test_gspo_token_has_the_gradient_of_gspo_where_the_weights_are_one() -> None:
    given = inputs([[0.55, 0.5, 0.3]], [[0.5, 0.5, 0.31]], [[0.5, 0.5, 0.31]], [1.5])
    [by_call, by_token] = [loss_of(name, given, WIDE)[1] for name in ("gspo", "gspo_token")]
    assert flat(by_token) == pytest.approx(flat(by_call), rel=1e-5)
