"""Can the judge that the settings name be asked? Before a window is claimed or anything bought."""

from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.scoring.judge.rubrics import load_rubric

_OPENAI = "api.openai.com"
_CONFIGS = ("config.json", "adapter_config.json")


def require_judge(settings: Settings) -> None:
    """Of ``ruler``, ``preference`` and ``regression``.

    Raises:
        ConfigError: no judge is named, or two are; a checkpoint, rubric, key or price is missing.
    """
    if settings.judge.model is None and settings.judge.model_path is None:
        raise ConfigError(
            f"scorer {settings.scoring.scorer!r} asks a judge, and none is named: set JUDGE_MODEL,"
            f" a model of the server at JUDGE_BASE_URL ({settings.judge.base_url}), or"
            " JUDGE_MODEL_PATH, a checkpoint directory; or use --scorer heuristic, which needs none"
        )
    if settings.judge.model is not None and settings.judge.model_path is not None:
        raise ConfigError(
            f"JUDGE_MODEL={settings.judge.model!r} and JUDGE_MODEL_PATH="
            f"{str(settings.judge.model_path)!r} name two judges: unset one of them"
        )
    load_rubric(settings.judge.rubric)
    if settings.judge.model_path is not None:
        _require_checkpoint(settings.judge.model_path)
    else:
        _require_key(settings)
        _require_prices(settings)


def require_art_judge(settings: Settings) -> None:
    """Of ``art-ruler``.

    Raises:
        ConfigError: no ``JUDGE_MODEL`` is named; a rubric or key is missing.
    """
    if settings.judge.model is None:
        raise ConfigError(
            "art-ruler: JUDGE_MODEL is not set: name a model of the server at JUDGE_BASE_URL"
            f" ({settings.judge.base_url}); a checkpoint at JUDGE_MODEL_PATH is not asked by ART"
        )
    load_rubric(settings.judge.rubric)
    _require_key(settings)


def _require_checkpoint(path: Path) -> None:
    if not any((path / name).exists() for name in _CONFIGS):
        raise ConfigError(
            f"JUDGE_MODEL_PATH={str(path)!r} holds no model ({' or '.join(_CONFIGS)}): name the"
            " directory of a checkpoint"
        )


def _require_key(settings: Settings) -> None:
    if _OPENAI in settings.judge.base_url and settings.judge.api_key is None:
        raise ConfigError(
            f"judge: {settings.judge.base_url} asks for a key: set OPENAI_API_KEY, or"
            " JUDGE_BASE_URL to another OpenAI-compatible server"
        )


def _require_prices(settings: Settings) -> None:
    limits = (settings.judge.window_usd, settings.judge.day_usd)
    priced = settings.judge.prompt_usd or settings.judge.completion_usd
    if any(limit is not None for limit in limits) and not priced:
        raise ConfigError(
            "judge: a limit in US dollars needs prices: set JUDGE_PROMPT_USD_PER_MTOK and"
            " JUDGE_COMPLETION_USD_PER_MTOK, or limit tokens instead"
        )
