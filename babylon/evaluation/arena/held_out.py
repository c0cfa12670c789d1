"""The challenger's P&L on recorded play that it was not trained on.

It is the gate's second check, which can veto. Where no worlds can be made, it may also promote.

Held-out play has two sources, newest windows first: trajectories that dropout removed from a
window, and whole windows whose policy was not promoted, so that the challenger does not descend
from it. Trajectories that were trained into the challenger or its ancestors are excluded, and those
that were taken down, which the artifacts still hold. Each trajectory counts once. If all windows
are small and promoted, there is no held-out play, and the verdict says so.

The P&L is estimated off-policy, from other players' trajectories. The
method is weighted (self-normalised) importance sampling per trajectory (Precup, Sutton, Singh
2000, "Eligibility traces for off-policy policy evaluation", section 3): a trajectory's weight is
its probability under the challenger over that under its player. Its P&L is taken relative to the
mean of the others in its scenario, so that easy markets do not count. Weights are truncated at
sqrt(n) times their mean (Ionides 2008, "Truncated importance sampling"), which bounds the variance
at the cost of a small bias. The effective sample size is ``ess = (sum w)² / sum w²`` (Kong 1992);
below ``MIN_ESS``, and with play of fewer than ``MIN_SCENARIOS``, there is no estimate.

A veto needs the interval at 99 %. Its error is that of independent scenarios, because agents of one
market rise and fall together, or that of independent plays if it is larger. The interval is wider
by what rare outcomes may be worth that no scenario showed. n scenarios miss an outcome of the
probability ``log(100) / n`` once in a hundred times (the rule of three at 99 %; Hanley and
Lippman-Hand 1983, "If nothing goes wrong, is everything all right?"). It counts as S for the share
of play that the challenger would change. Without this, rare wins that pay for usual losses look
like a loss wherever none was recorded.

A promotion needs more, because weights have long tails: betting
(``babylon.evaluation.arena.betting``) on the differences ``(w - 1) (x + S)``, with the plain weight
w and the relative P&L x cut to ``[-S, S]``. They are at least ``-2 S`` whatever the weight, and
cutting large ones only makes a promotion harder (the bound of Waudby-Smith, Wu, Ramdas,
Karampatziakis, Mineiro 2022, "Anytime-valid off-policy inference for contextual bandits"). Each x
contains the P&L of the others, and plays of one scenario may resemble each other. So a scenario is
one bet, on the mean of its differences. Play of an hour on which the challenger's line was trained
proves no gain: who has learned by heart how its markets ended would gain there and nowhere else.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from babylon.core.errors import ArtifactError
from babylon.core.learning_settings import TrainingSettings, reading_precision
from babylon.core.trajectories import Trajectory, read_trajectories
from babylon.core.types import Artifact, OffPolicy, Trained
from babylon.core.windows import GAME_MINUTES, WindowState, start_of
from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth
from babylon.evaluation.arena.confidence import unseen_share
from babylon.evaluation.arena.play import Floats
from babylon.evaluation.experiment.difference import student
from babylon.store.connection import Store
from babylon.store.lineage import descends, trained_into, windows_trained_into
from babylon.store.policies import policy_of_batch
from babylon.store.published import read_withheld
from babylon.store.windows import WindowRow, list_windows, window_lengths

MOST = 512  # trajectories: enough for a mean; a large model needs minutes for them
MIN_ESS = 30.0  # trajectories; below, the mean's interval is not Student's
MIN_SCENARIOS = 8  # with several trajectories; of fewer, the error is not known
_Z = 2.576  # 99 % of symmetric errors
SCALE_USD = 1000.0  # S: relative P&L beyond it counts as S
log = logging.getLogger(__name__)


async def held_out_check(store: Store, trained: Trained, training: TrainingSettings) -> OffPolicy:
    """Return the importance-weighted P&L of held-out play, or the reason why there is none."""
    found, problem = await held_out_play(store, trained)
    if not found:
        return OffPolicy(problem=problem)
    checkpoint = store.home.resolve(trained.checkpoint_uri)
    hours, lengths = await trained_hours(store, trained), await window_lengths(store)
    fresh = np.array([hours.isdisjoint(_hours(one.window_id, lengths)) for one in found])
    return await asyncio.to_thread(
        _check, checkpoint, found, training, trained.parent_version, fresh
    )


async def trained_hours(store: Store, trained: Trained) -> frozenset[str]:
    """Return the hours on which the challenger's line was trained: outcomes are of whole hours."""
    lengths = await window_lengths(store)
    windows = await windows_trained_into(store, trained.policy_version)
    return frozenset(hour for window_id in windows for hour in _hours(window_id, lengths))


def _hours(window_id: str, lengths: Mapping[str, int]) -> list[str]:
    """Return the hours of which a window has a part: one of 45 minutes may end in the next."""
    start = start_of(window_id)
    minutes = start.minute + lengths.get(window_id, GAME_MINUTES)
    return [f"{start + timedelta(hours=n):%Y-%m-%dT%H}" for n in range(math.ceil(minutes / 60))]


async def held_out_play(
    store: Store, trained: Trained, apart_from: Collection[str] = ()
) -> tuple[list[Trajectory], str]:
    """Return the newest held-out trajectories, and the reason if there are none.

    None is of an hour in ``apart_from``.
    """
    found: dict[str, Trajectory] = {}
    withheld = await read_withheld(store)
    problem = "no held-out play: all that was recorded was trained on or taken down"
    for row in reversed(await list_windows(store)):
        if any(hour in apart_from for hour in _hours(row.window_id, {row.window_id: row.minutes})):
            continue
        for artifact in await _held_out(store, row, trained):
            try:
                played = await asyncio.to_thread(read_trajectories, store.home, artifact)
            except ArtifactError as error:  # one unreadable window must not stop the check
                # A verdict is published: the file's place on this machine is for the log alone.
                problem = f"held-out play of window {row.window_id} cannot be read (see the log)"
                log.warning("%s: %s", problem, error)
                continue
            new = [t for t in played if not withheld.covers(t.agent_id, t.trajectory_id)]
            ids = [trajectory.trajectory_id for trajectory in new]
            seen = await trained_into(store, trained.policy_version, ids)
            found |= {name: t for name, t in zip(ids, new, strict=True) if name not in seen}
        if len(found) >= MOST:
            break
    return [*found.values()][:MOST], problem


async def _held_out(store: Store, row: WindowRow, trained: Trained) -> list[Artifact]:
    artifacts: list[Artifact] = []
    if row.scored is None:
        return artifacts
    if row.scored.held_out:
        artifacts.append(row.scored.held_out)
    if row.state == WindowState.REJECTED and row.batch_id is not None:
        policy = await policy_of_batch(store, row.batch_id)
        if policy and not await descends(store, trained.policy_version, policy.policy_version):
            artifacts.append(row.scored.artifact)
    return artifacts


def _check(
    checkpoint: str,
    played: Sequence[Trajectory],
    training: TrainingSettings,
    champion: int,
    fresh: NDArray[np.bool_],
) -> OffPolicy:
    from babylon.training.likelihood import log_ratios  # torch takes seconds to import

    precision = reading_precision(training.tuning, training.base_precision)
    ratios = log_ratios(checkpoint, played, training.max_tokens, precision)
    measured = np.array([trajectory.trajectory_id in ratios for trajectory in played])
    exact = [trajectory for trajectory, is_so in zip(played, measured, strict=True) if is_so]
    if not exact:
        return OffPolicy(
            problem=f"none of {len(played)} held-out trajectories has its exact tokens and logprobs"
        )
    return off_policy(
        np.array([ratios[trajectory.trajectory_id] for trajectory in exact]),
        np.array([trajectory.pnl_usd for trajectory in exact]),
        [f"{trajectory.window_id}/{trajectory.scenario_id}" for trajectory in exact],
        np.array([{call.policy_version for call in one.calls} == {champion} for one in exact])
        & fresh[measured],
    )


def off_policy(
    log_ratios: Floats,
    pnl_usd: Floats,
    scenarios: Sequence[str],
    telling: NDArray[np.bool_] | None = None,
) -> OffPolicy:
    """Estimate the challenger's P&L minus the players', from n trajectories.

    Args:
        log_ratios: ``[n]`` log of the probability under the challenger over that under the player.
        pnl_usd: ``[n]`` each trajectory's P&L.
        scenarios: ``[n]`` each trajectory's scenario; one alone in its scenario is ignored.
        telling: ``[n]`` whether it can prove a gain; None: all of it. The champion played it,
            because an older policy may be easier to beat, in a window on which the challenger's
            line was not trained, because others' play of the same hour tells how markets end.
    """
    _, index, count = np.unique(scenarios, return_inverse=True, return_counts=True)
    size, total = count[index], np.bincount(index, pnl_usd)[index]
    compared = size > 1
    n = int(compared.sum())
    if n == 0:
        return OffPolicy(problem="too small: no two held-out trajectories share a scenario")
    own = np.full(n, True) if telling is None else telling[compared]
    others = (total - pnl_usd)[compared] / (size[compared] - 1)
    earned = pnl_usd[compared] - others
    weights = np.exp(log_ratios[compared] - log_ratios[compared].max())
    # Truncated importance sampling (Ionides 2008): a bounded variance for a small bias.
    weights = np.minimum(weights, np.sqrt(n) * weights.mean())
    weights /= weights.sum()
    ess = float(1 / (weights**2).sum())
    if ess < MIN_ESS:
        problem = f"too small: ESS {ess:.1f} of {n} held-out trajectories; {MIN_ESS:g} needed"
        return OffPolicy(trajectories=n, ess=ess, problem=problem)
    shared = int((count > 1).sum())
    if shared < MIN_SCENARIOS:
        problem = f"too small: held-out play of {shared} scenarios; {MIN_SCENARIOS} needed"
        return OffPolicy(trajectories=n, ess=ess, problem=problem)
    difference = float(weights @ earned)
    errors = weights * (earned - difference)
    together = np.bincount(index[compared], errors)
    # In a scenario x adds up to zero: where weights hardly differ, only plays show the spread.
    spread = max((together**2).sum() * shared / (shared - 1), (errors**2).sum())
    half = student(_Z, shared - 1) * float(np.sqrt(spread))
    half += _unseen(weights, index[compared])
    return OffPolicy(
        trajectories=n,
        ess=ess,
        difference=difference,
        low=difference - half,
        high=difference + half,
        gain=_surely_gains(log_ratios[compared][own], earned[own], index[compared][own]),
    )


def _unseen(weights: Floats, scenario: NDArray[np.intp]) -> float:
    """Return what outcomes that no scenario showed may be worth to the challenger, in dollars."""
    changed = np.abs(weights - 1 / len(weights)).sum() / 2  # total variation from the players
    scenarios = 1 / (np.bincount(scenario, weights) ** 2).sum()  # their effective number
    return float(changed * SCALE_USD * unseen_share(float(scenarios)))


def _surely_gains(log_ratios: Floats, earned: Floats, scenario: NDArray[np.intp]) -> bool:
    """Return whether betting on a gain of the challenger is believed, with one bet a scenario."""
    if len(earned) == 0:
        return False
    weights = np.exp(np.minimum(log_ratios, np.log(len(earned))))  # larger ones are cut below
    each = (weights - 1) * (np.clip(earned, -SCALE_USD, SCALE_USD) + SCALE_USD)
    _, place, count = np.unique(scenario, return_inverse=True, return_counts=True)
    values = np.bincount(place, each) / count
    n, most = len(values), 2 * SCALE_USD
    limits = np.full(n, most)
    wealth = log_wealth(Differences(values, limits, limits * np.sqrt(n)), budget=n)
    return bool(wealth[-1] >= CERTAIN)
