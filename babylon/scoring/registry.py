"""Scorers by name: the built-in ones, and any ``package.module:function`` of the user."""

import importlib

from babylon.core.errors import ConfigError
from babylon.core.settings import JudgeSettings
from babylon.scoring.judge.judge_requirements import require_art_judge, require_judge
from babylon.scoring.scorer import Scorer

SCORERS = {
    "heuristic": "babylon.scoring.rewards.heuristic:heuristic",
    "ruler": "babylon.scoring.judge.judge_scorers:ruler",
    "preference": "babylon.scoring.judge.judge_scorers:preference",
    "regression": "babylon.scoring.judge.judge_scorers:regression",
    "art-ruler": "babylon.scoring.rewards.art_ruler:art_ruler",
}
"""Name → function. The module is imported when the scorer is chosen."""

NEEDS_JUDGE = ("ruler", "preference", "regression")


def load_scorer(name: str) -> Scorer:
    """Return the scorer of that name.

    Raises:
        ConfigError: the name is unknown, or the module does not import.
    """
    module_name, colon, attribute = SCORERS.get(name, name).partition(":")
    if not (colon and module_name and attribute) or module_name.startswith("."):
        raise ConfigError(
            f"scorer {name!r} is unknown: choose {', '.join(SCORERS)}"
            " or your own function, package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"scorer {name!r}: module {module_name!r} does not import ({error}):"
            " install it or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"scorer {name!r}: module {module_name!r} does not import ({error!r}): correct it"
        ) from error
    scorer = getattr(module, attribute, None)
    if not callable(scorer):
        raise ConfigError(
            f"scorer {name!r}: {module.__name__} ({module.__file__}) has no function {attribute!r}"
        )
    found: Scorer = scorer
    return found


def require_scorer(scorer: str, judge: JudgeSettings) -> None:
    """Check the chosen scorer before a window is claimed.

    Raises:
        ConfigError: the scorer is unknown, or a setting that it needs is missing.
    """
    load_scorer(scorer)
    if scorer in NEEDS_JUDGE:
        require_judge(scorer, judge)
    elif scorer == "art-ruler":
        require_art_judge(judge)
