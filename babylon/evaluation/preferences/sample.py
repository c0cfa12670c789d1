"""Replies of a policy to recorded prompts, sampled in this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from babylon.core.learning_settings import Precision
from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.policies.load import products
from babylon.serving.engine.loaded_policies import load
from babylon.serving.engine.running_batch import generate
from babylon.serving.engine.sampling import Request, Sampling

BATCH = 256  # replies at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """A reply's tokens with the end token, and its text."""

    token_ids: tuple[int, ...]
    text: str


def sample_replies(
    path: str,
    points: Sequence[DecisionPoint],
    count: int,
    temperature: float,
    seed: int,
    precision: Precision = "fp32",
) -> list[list[SampledReply]]:
    """Return ``count`` replies of the checkpoint to each decision's exact prompt. Blocking.

    Replies of a decision have seeds of their own, so a repeated call returns the same. A reply may
    be half as long again as the longest recorded one; one that does not end by then is left out.

    Raises:
        ModelError: the checkpoint does not load.
    """
    policy = load("preferences", path, 0, precision)
    # The call's own limit is not recorded; a reply that is cut off would be a worse one by chance.
    longest = max(len(p.call.completion_token_ids or ()) for p in points) if points else 0
    budget = max(16, longest * 3 // 2)
    requests, owners = [], []
    for number, point in enumerate(points):
        prompt = list(point.call.prompt_token_ids or ())
        room = min(budget, policy.context - len(prompt))
        if room < 1 or max(prompt) >= policy.vocabulary:
            continue
        for draw in range(count):
            name = f"{seed}:{point.trajectory_id}:{point.call.step}:{draw}"
            own = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
            sampling = Sampling(max_tokens=room, temperature=temperature, seed=own)
            requests.append(Request(prompt, sampling))
            owners.append(number)
    found: list[list[SampledReply]] = [[] for _ in points]
    for start in range(0, len(requests), BATCH):
        with products(policy.model, precision):
            completions = generate(
                policy.model,
                requests[start : start + BATCH],
                eos_token_ids=policy.eos_token_ids,
                pad_token_id=policy.pad_token_id,
            )
        for owner, completion in zip(owners[start : start + BATCH], completions, strict=True):
            if completion.finish_reason == "stop":
                text = policy.decode(completion.token_ids)
                found[owner].append(SampledReply(token_ids=tuple(completion.token_ids), text=text))
    return found
