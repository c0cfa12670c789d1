"""openpipe-art: the only module that imports ``art``, which takes seconds: import it lazily.

ART 0.5.18 patches transformers with a function of an older signature, after which every forward
pass raises a TypeError; the original is put back here, whoever imported ``art`` first.
"""

import os
from collections.abc import Sequence

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm fetches one at import

import art
from art.rewards import ruler_score_group
from art.transformers import patches

patches.masking_utils._preprocess_mask_arguments = patches._preprocess_mask_arguments


async def ruler_rewards(
    chats: Sequence[list[dict[str, str]]], *, model: str, base_url: str, api_key: str, rubric: str
) -> list[float]:
    """ART's own RULER on one group: a reward for each chat, as the judge gave them."""
    group = art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=chat, reward=0.0) for chat in chats]
    )
    scored = await ruler_score_group(
        group,
        f"openai/{model}",
        extra_litellm_params={"api_base": base_url, "api_key": api_key},
        rubric=rubric,
        swallow_exceptions=False,
    )
    return [float(trajectory.reward) for trajectory in scored.trajectories]
