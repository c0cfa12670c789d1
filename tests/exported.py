"""Exported numeric policies, made without agilerl."""

from pathlib import Path

import torch

from babylon.core.numeric_manifest import Coding, NumericManifest
from babylon.game.envs.observation import feature_names
from babylon.game.market.scenario import STARTER, Rules
from babylon.policies.numeric_policy import save_numeric


def exported(
    directory: Path, scores: dict[tuple[int, str], float], rules: Rules = STARTER, width: int = 19
) -> Path:
    """A linear policy. ``scores``: (output, name of a feature) → weight."""
    names = feature_names(rules.markets, rules.perps)
    layer = torch.nn.Linear(len(names), width)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        for (output, name), weight in scores.items():
            layer.weight[output, names.index(name)] = weight
    coding: Coding = "menu"
    manifest = NumericManifest(
        algorithm="dqn",
        coding=coding,
        questions=rules.markets,
        perps=rules.perps,
        features=tuple(names),
        rules="starter",
        steps=0,
        seed=0,
        pnl=0.0,
    )
    save_numeric(directory, layer, manifest)
    return directory


def news_buyer(directory: Path) -> Path:
    """Buys, with the largest order, the side that a headline suggests, and holds without one.

    The entries of the starter's menu: hold, then half and whole of each verb of each question.
    """
    weights = {}
    for question in range(3):
        news = f"m{question + 1}: news"
        weights |= {(2 + 6 * question, news): 1.0, (4 + 6 * question, news): -1.0}
    return exported(directory, weights)
