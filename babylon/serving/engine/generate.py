"""Sampling without HTTP: many prompts, one policy, exact token ids and behaviour logprobs."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from babylon.serving.engine.running_batch import Batch, Row
from babylon.serving.engine.sampling import Completion, Request


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
) -> list[Completion]:
    """Sample one completion per request, all in one batch.

    Args:
        model: a causal LM of transformers whose layers keep only keys and values, in eval mode.

    Raises:
        ModelError: the policy's logits are not finite.
    """
    batch = Batch(model, eos_token_ids=eos_token_ids, pad_token_id=pad_token_id)
    rows = [Row(request) for request in requests]
    if rows:
        batch.join(rows)
    while len(batch):
        batch.step()
    return [row.completion for row in rows]
