"""How much likelier a policy makes recorded play than the policies that played it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from babylon.core.trajectories import Call, Trajectory
from babylon.policies.load import load_policy
from babylon.training.grpo.memory import FittingForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens


def log_ratios(
    path: Path | str, trajectories: Sequence[Trajectory], max_tokens: int | None = None
) -> Mapping[str, float]:
    """Trajectory id → log of its probability under the policy over that under who played it.

    Over all tokens of all its calls. A trajectory with a call whose tokens or behaviour logprobs
    are not exactly known, or that was not sampled from the policy alone, is left out. Blocking.

    Raises:
        ModelError: no policy loads from ``path``.
    """
    owners, calls = [], []
    for trajectory in trajectories:
        exact = [tokens for call in trajectory.calls if (tokens := _exact(call))]
        if exact and len(exact) == len(trajectory.calls):
            owners += [trajectory.trajectory_id] * len(exact)
            calls += exact
    if not calls:
        return {}
    model, _ = load_policy(path)
    tree = compile_tree(calls)
    fitting = FittingForward(model, max_tokens)
    values = fitting.run(lambda forward: forward.logprobs(tree)).logprobs.tolist()
    ratios = dict.fromkeys(owners, 0.0)
    for owner, call, now in zip(owners, calls, values, strict=True):
        assert call.logprobs is not None  # exact
        ratios[owner] += math.fsum(now[: len(call.logprobs)]) - math.fsum(call.logprobs)
    return ratios


def _exact(call: Call) -> CallTokens | None:
    """The call's tokens, if its logprobs are those of the distribution it was sampled from."""
    if call.untrainable is not None or call.temperature <= 0 or call.top_p < 1:
        return None
    if not call.prompt_token_ids or not call.completion_token_ids or call.logprobs is None:
        return None
    return CallTokens(
        prompt=call.prompt_token_ids,
        completion=call.completion_token_ids,
        logprobs=call.logprobs,
        temperature=call.temperature,
        policy_version=call.policy_version,
    )
