"""A bandit with a known optimum, solved from what another policy played.

Three arms pay 1, 0.85 and 0. The logging policy pulled the second arm in 60 % of all cases, so its
summed advantage exceeds that of the best arm: 0.6 * 0.14 = 0.084 against 0.2 * 0.29 = 0.058. A
trainer that mistakes the log for its own play follows the sums and learns to pull the second arm.
Weighted by pi_p / mu, the best arm wins.
"""

import math
from random import Random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.losses import LOSSES
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import compile_window

BEST, POPULAR, BAD = 0, 1, 2  # tokens
PAYS = {BEST: 1.0, POPULAR: 0.85, BAD: 0.0}
LOGGED = {BEST: 0.2, POPULAR: 0.6, BAD: 0.2}
PULLS, WINDOWS = 60, 18


def bandit_policy(seed: int) -> Qwen3ForCausalLM:
    """Three tokens, each about equally likely at first."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


def play(random: Random, *, corrected: bool) -> list[ScoredTrajectory]:
    """Pulls of the logging policy. Without its logprobs, the trainer mistakes them for its own."""
    pulled = random.choices(list(LOGGED), weights=list(LOGGED.values()), k=PULLS)
    return [
        ScoredTrajectory(
            trajectory_id=str(number),
            group="bandit",
            score=PAYS[arm],
            calls=[
                CallTokens(
                    prompt=[BAD],
                    completion=[arm],
                    logprobs=[math.log(LOGGED[arm])] if corrected else None,
                )
            ],
        )
        for number, arm in enumerate(pulled)
    ]


def learnt(seed: int, loss: str, *, corrected: bool) -> list[float]:
    """Probability of each arm after training on some windows of that play."""
    model, random = bandit_policy(seed), Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    config = TrainerConfig(
        iterations=2, trajectories_per_step=PULLS, learning_rate=2.5e-2, warmup_steps=0, loss=loss
    )
    for _ in range(WINDOWS):
        window = compile_window(play(random, corrected=corrected), config)
        train_on_window(model, optimizer, window)
    with torch.no_grad():
        arms: list[float] = (
            model(input_ids=torch.tensor([[BAD]])).logits[0, -1].softmax(-1).tolist()
        )
    return arms


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_arm_is_found_in_what_another_policy_logged(seed: int) -> None:
    corrected = learnt(seed, "ppo_clip", corrected=True)
    fooled = learnt(seed, "ppo_clip", corrected=False)
    assert corrected[BEST] > 0.9
    assert fooled[BEST] < 0.5 < fooled[POPULAR]


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"ppo_clip"}))
def test_every_loss_finds_the_best_arm(loss: str) -> None:
    arms = learnt(0, loss, corrected=True)
    assert arms[BEST] > 2 * arms[POPULAR]
