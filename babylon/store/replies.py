"""The table ``sampled_replies``: what a policy answers to recorded prompts, with its value.

It holds token ids and numbers: neither text nor ground truth.
"""

from collections.abc import Sequence

import msgspec

from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.types import Claim
from babylon.store.connection import Store, guarded


async def store_replies(
    store: Store, claim: Claim, sampled: Sequence[PromptReplies], valued_by: str
) -> None:
    """Store what was sampled for a window, in place of earlier replies to the same prompts.

    Raises:
        FencedError: the claim is stale.
    """
    async with guarded(store, claim) as connection:
        await connection.executemany(
            "INSERT INTO babylon.sampled_replies (trajectory_id, step, policy_version, temperature,"
            " window_id, valued_by, prompt_token_ids, replies)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
            " ON CONFLICT (trajectory_id, step, policy_version, temperature) DO UPDATE SET"
            " window_id = excluded.window_id, valued_by = excluded.valued_by,"
            " prompt_token_ids = excluded.prompt_token_ids, replies = excluded.replies",
            [
                (
                    one.trajectory_id,
                    one.step,
                    one.policy_version,
                    one.temperature,
                    claim.window_id,
                    valued_by,
                    list(one.prompt_token_ids),
                    msgspec.to_builtins(one.replies),
                )
                for one in sampled
            ],
        )


async def read_replies(
    store: Store, window_id: str, policy_version: int, temperature: float, valued_by: str
) -> list[PromptReplies]:
    """Return what a policy answered for a window, without decisions that were trained since."""
    rows = await store.pool.fetch(
        "SELECT trajectory_id, step, prompt_token_ids, replies FROM babylon.sampled_replies s"
        " WHERE window_id = $1 AND policy_version = $2 AND temperature = $3 AND valued_by = $4"
        " AND NOT EXISTS"
        " (SELECT FROM babylon.trained t WHERE t.trajectory_id = s.trajectory_id)"
        " ORDER BY trajectory_id, step",
        window_id,
        policy_version,
        temperature,
        valued_by,
    )
    return [
        PromptReplies(
            trajectory_id=row["trajectory_id"],
            step=row["step"],
            prompt_token_ids=tuple(row["prompt_token_ids"]),
            replies=msgspec.convert(row["replies"], tuple[ValuedReply, ...]),
            temperature=temperature,
            policy_version=policy_version,
        )
        for row in rows
    ]
