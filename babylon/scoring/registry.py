"""Scorers by name: the built-in ones, and any ``package.module:function`` of the user's own."""

import importlib

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.scoring.judge.judge_requirements import require_art_judge, require_judge
from babylon.scoring.scorer import Scorer

SCORERS = {
    "heuristic": "babylon.scoring.rewards.heuristic:heuristic",
    "ruler": "babylon.scoring.judge.judge_scorers:ruler",
    "preference": "babylon.scoring.judge.judge_scorers:preference",
    "regression": "babylon.scoring.judge.judge_scorers:regression",
    "art-ruler": "babylon.scoring.rewards.art_ruler:art_ruler",
}
"""Name → where it is; imported only when it is chosen."""

ASKING_A_JUDGE = ("ruler", "preference", "regression")


def load_scorer(name: str) -> Scorer:
    """The scorer of that name.

    Raises:
        ConfigError: there is none; the message lists what there is or says what does not import.
    """
    module_name, colon, attribute = SCORERS.get(name, name).partition(":")
    if not (colon and module_name and attribute) or module_name.startswith("."):
        raise ConfigError(
            f"scorer {name!r} is unknown: choose {', '.join(SCORERS)}"
            " or a function of your own, package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"scorer {name!r}: module {module_name!r} does not import ({error}):"
            " install it or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # other people's code: a syntax error, or whatever it raises
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


def require_scorer(settings: Settings) -> None:
    """Can the chosen scorer work? Asked before a window is claimed.

    Raises:
        ConfigError: there is no such scorer, or a setting that it needs is missing; it says which.
    """
    load_scorer(settings.scoring.scorer)
    if settings.scoring.scorer in ASKING_A_JUDGE:
        require_judge(settings)
    elif settings.scoring.scorer == "art-ruler":
        require_art_judge(settings)
