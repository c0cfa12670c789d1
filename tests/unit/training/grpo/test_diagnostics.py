"""The report's numbers: by hand where they are statistics, by cause where they are findings."""

import math
from dataclasses import asdict, replace
from random import Random

import pytest
import torch

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import (
    Logged,
    UpdateRecord,
    divergence,
    effective_sample_size,
    spread,
    update_norm,
)
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import compile_window
from babylon.training.grpo.tree_forward import of_similar_length
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.trees import naive_logprobs
from tests.unit.training.grpo.windows import update, weights, window


def test_a_spread_is_mean_percentiles_and_maximum() -> None:
    values = torch.arange(1.0, 102.0)
    assert spread(values[torch.randperm(101)]) == (51.0, 2.0, 100.0, 101.0)
    assert spread(values[:0]) == (1.0, 1.0, 1.0, 1.0)


def test_divergences_are_schulmans_estimates() -> None:
    """log ratios log 0.5 and log 2: k1 = 0, k3 = ((0.5 + log 2 - 1) + (2 - log 2 - 1)) / 2."""
    sampled, other = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    assert divergence(sampled, other) == pytest.approx((0.0, 0.25), abs=1e-6)
    k1, k3 = divergence(sampled[:1], other[:1])
    assert (k1, k3) == pytest.approx((math.log(2), 0.5 + math.log(2) - 1), rel=1e-5)


def test_the_effective_sample_size_of_equal_weights_is_one() -> None:
    assert effective_sample_size(torch.full((7,), 1.7).log()) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([9.0, 1.0]).log()) == pytest.approx(100 / (2 * 82))


def test_a_weight_beyond_all_numbers_takes_the_whole_effective_sample() -> None:
    assert effective_sample_size(torch.tensor([0.0, 0.0, 0.0, 9998.0])) == pytest.approx(0.25)
    assert math.isnan(effective_sample_size(torch.tensor([0.0, math.inf])))


@pytest.mark.parametrize("logged", [-8.0, -9999.0])
def test_a_token_that_is_masked_weighs_nothing_in_the_effective_sample(logged: float) -> None:
    """A server that logs -9999, or one token of another adapter, must not reject an update."""
    trajectories = window()
    call = trajectories[0].calls[0]
    assert call.logprobs
    odd = replace(call, logprobs=[call.logprobs[0] + logged, *call.logprobs[1:]])
    trajectories[0] = replace(trajectories[0], calls=[odd, *trajectories[0].calls[1:]])
    report = update(tiny_model(0), trajectories, iterations=1)
    assert report.importance_max > 1000
    assert report.ess == pytest.approx(1 - 1 / report.tokens, abs=0.02)


def test_the_update_norm_is_relative_to_the_weights() -> None:
    model = torch.nn.Linear(300, 300)  # 90,000 weights: every second one stands for two
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.zero_()
        before = [model.weight.detach().flatten()[::2].clone(), model.bias.detach().clone()]
        model.weight.mul_(1.01)
    assert update_norm(model, before) == pytest.approx(0.01, rel=1e-4)


def test_a_report_is_flat_numbers_and_one_sentence() -> None:
    report = asdict(update(tiny_model(0), window(), iterations=2, stop_kl=9.0))
    assert report.pop("sharing_advice") is None
    assert {type(value) for value in report.values()} <= {int, float, bool}
    assert all(math.isfinite(value) for value in report.values())


def test_the_update_norm_of_an_update_is_what_the_weights_say() -> None:
    model = tiny_model(0)
    before = weights(model)
    report = update(model, window(), iterations=2, stop_kl=9.0)
    assert report.update_norm == pytest.approx(
        float((weights(model) - before).norm() / before.norm()), rel=1e-4
    )


def test_stale_data_is_seen_as_stale() -> None:
    fresh = update(tiny_model(0), window(), iterations=1)
    stale = update(tiny_model(5), window(), iterations=1)
    assert stale.ess < 0.5 < fresh.ess
    assert stale.kl_before > fresh.kl_before and stale.importance_max > fresh.importance_max
    assert abs(fresh.importance_mean - 1) < 0.01 and fresh.importance_p99 < 1.02


def versioned(
    trajectories: list[ScoredTrajectory], *versions: int | None
) -> list[ScoredTrajectory]:
    """The first trajectories' calls come from these policies, the others' from version 7."""
    chosen = [*versions, *[7] * (len(trajectories) - len(versions))]
    return [
        replace(t, calls=[replace(call, policy_version=version) for call in t.calls])
        for t, version in zip(trajectories, chosen, strict=True)
    ]


def test_the_ages_of_calls_are_counted() -> None:
    trajectories = versioned(window(), None, 6, 5, 4)
    ages = {7: 0, 6: 1, 5: 2, 4: 3}
    report = update(tiny_model(0), trajectories, staleness=ages, max_staleness=2, iterations=1)
    unknown, one, two, gone = (len(t.calls) for t in trajectories[:4])
    assert (report.staleness_unknown, report.staleness_1, report.staleness_2) == (unknown, one, two)
    assert report.calls_too_stale == gone
    assert report.staleness_0 == sum(len(t.calls) for t in trajectories[4:])


def off(trajectory: ScoredTrajectory, by: float) -> ScoredTrajectory:
    """The same calls with logged logprobs that are wrong by so many nats."""
    calls = [
        replace(call, logprobs=[value - by for value in call.logprobs or ()])
        for call in trajectory.calls
    ]
    return replace(trajectory, calls=calls)


def test_the_logprob_mismatch_is_that_of_calls_of_the_parent_itself() -> None:
    """An older policy's logprobs differ by right; those of the same version must not."""
    old_differs = versioned([off(window()[0], 0.5), *window()[1:]], 6)
    ages = {7: 0, 6: 1}
    assert update(tiny_model(0), old_differs, staleness=ages, iterations=1).logprob_mismatch < 0.01
    same_differs = versioned([off(t, 0.5) for t in window()])
    report = update(tiny_model(0), same_differs, staleness=ages, iterations=1)
    assert report.logprob_mismatch == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_calls_that_other_weights_answered_are_found_in_their_window(
    wrong: int, rounding: float
) -> None:
    """Other weights are one update away: 0.01 nats a token. Rounding moves all calls."""
    random, own, other = Random(0), tiny_model(0), tiny_model(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.005 * torch.randn_like(parameter))
    trajectories, calls = [], []
    for number in range(24):
        model = other if number < wrong else own
        tokens = [random.randrange(2, 50) for _ in range(30)]
        call = CallTokens(prompt=tokens[:10], completion=tokens[10:], logprobs=None)
        logged = naive_logprobs(model, call).detach() + rounding * torch.randn(20)
        calls.append(replace(call, logprobs=logged.tolist()))
        trajectories.append(
            ScoredTrajectory(
                trajectory_id=f"{number}", group="s", score=float(number % 2), calls=[calls[-1]]
            )
        )
    if wrong:
        kept = torch.tensor([x for call in calls[:wrong] for x in call.logprobs or ()])
        exact = torch.cat([naive_logprobs(own, call).detach() for call in calls[:wrong]])
        assert divergence(kept, exact)[1] < 0.03
    report = update(tiny_model(0), versioned(trajectories), staleness={7: 0}, iterations=1)
    assert report.calls_of_other_weights == wrong
    assert report.logprob_mismatch < 0.1  # so promotion alone would not have told


def test_shared_prompts_are_counted_once() -> None:
    report = update(tiny_model(0), window(), iterations=1)
    assert report.unique_tokens < report.flat_tokens
    assert report.packing_ratio == report.flat_tokens / report.unique_tokens
    assert report.unique_tokens_per_s > 0 and report.trained_tokens_per_s > 0


def test_the_order_of_prompts_that_loses_sharing_reaches_the_report() -> None:
    """Private text first, and 40 tokens that all agents have after it."""
    market = list(range(2, 42))
    trajectories = [
        replace(t, calls=[replace(c, prompt=[43 + n, *market, 3], logprobs=None) for c in t.calls])
        for n, t in enumerate(window(groups=1))
    ]
    report = update(tiny_model(0), trajectories, iterations=1)
    assert report.lost_tokens >= 3 * 39 and report.sharing_advice is not None
    assert "from token 0 a segment of 1 tokens differs between calls" in report.sharing_advice


def test_loss_mass_shows_which_weighting_favours_the_talkative() -> None:
    fair = update(tiny_model(0), window(), iterations=1)
    assert fair.loss_mass_min == pytest.approx(1.0) and fair.loss_mass_max == pytest.approx(1.0)
    by_token = update(tiny_model(0), window(), iterations=1, call_weight="token")
    assert by_token.loss_mass_min < 0.7 and by_token.loss_mass_max > 1.3


def test_masked_and_clipped_tokens_are_counted_by_reason() -> None:
    """Bad calls that seem to have been likelier, good ones that p finds impossible."""
    trajectories = window()
    clean = update(tiny_model(0), trajectories, iterations=1)
    assert clean.masked_fraction == clean.clip_fraction == 0
    drifted = [off(t, -0.2) for t in trajectories]
    negative = update(tiny_model(0), drifted, iterations=1)
    assert negative.masked_negative > 0 and negative.masked_band == 0
    assert negative.masked_fraction == negative.masked_negative
    shifted = [off(trajectories[0], 1.0), off(trajectories[1], -12.0), *trajectories[2:]]
    report = update(tiny_model(0), shifted, iterations=1)
    assert report.masked_impossible > 0 and report.masked_band > 0
    assert report.masked_fraction < report.masked_band + report.masked_impossible
    free = {"stop_kl": 99.0, "stop_clip_fraction": 1.0}
    far = update(tiny_model(0), trajectories, iterations=3, learning_rate=3e-3, **free)
    assert far.clip_low_fraction > 0 and far.clip_high_fraction > 0
    assert far.clip_fraction == pytest.approx(far.clip_low_fraction + far.clip_high_fraction)


def test_an_untouched_policy_reports_no_divergence() -> None:
    report: TrainReport = update(tiny_model(0), window(), iterations=1, learning_rate=1e-12)
    assert abs(report.kl_after) < 1e-9 and report.ratio_max == report.ratio_p1 == 1.0
    assert report.kl_reference == 0


def test_one_long_reply_among_short_ones_costs_no_more_than_its_own_tokens() -> None:
    """One reply of 16,384 tokens and 2,880 of ten: a padded table would have 47 million places."""
    lengths = [16_384, *[10] * 2880]
    trajectories = [
        ScoredTrajectory(
            trajectory_id=str(number),
            group=str(number // 2),
            score=float(number % 2),
            calls=[CallTokens(prompt=[number], completion=[5] * length, logprobs=[-1.0] * length)],
        )
        for number, length in enumerate([*lengths, 10])
    ]
    window = compile_window(trajectories, TrainerConfig())
    logged = Logged.of(window, torch.device("cpu"))
    record = UpdateRecord.start(logged.mu.clone(), logged.mu.clone(), [])
    tables = [getattr(logged, name) for name in ("mu", "known", "exact", "offsets", "advantage")]
    tables += [record.proximal, record.reference, record.theta, record.entropy, record.flags]
    a_pass = 4 * 4 * window.tokens  # values and gradients of logprobs and entropies
    bytes_a_token = (sum(table.nbytes for table in tables) + a_pass) / window.tokens
    assert window.tokens == sum(lengths) + 10 and bytes_a_token < 50
    groups = list(of_similar_length(range(len(window.calls)), window.lengths))
    padded = sum(len(group) * max(window.lengths[call] for call in group) for group in groups)
    assert sorted(call for group in groups for call in group) == list(range(2882))
    assert padded <= 2 * window.tokens
