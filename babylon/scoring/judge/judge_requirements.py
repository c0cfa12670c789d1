"""Checks of the judge's settings, before a window is claimed or a judgment is bought."""

from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.scoring.judge.rubrics import load_rubric

_OPENAI = "api.openai.com"
_CONFIGS = ("config.json", "adapter_config.json")


def require_judge(settings: Settings) -> None:
    """Check the settings of ``ruler``, ``preference`` and ``regression``.

    Raises:
        ConfigError: no judge or two judges are named, or a checkpoint, rubric, key or price is
            missing.
    """
    if settings.judge_model is None and settings.judge_model_path is None:
        raise ConfigError(
            f"scorer {settings.scorer!r} needs a judge: set JUDGE_MODEL to a model of the server at"
            f" JUDGE_BASE_URL ({settings.judge_base_url}), or JUDGE_MODEL_PATH to a checkpoint"
            " directory; --scorer heuristic needs no judge"
        )
    if settings.judge_model is not None and settings.judge_model_path is not None:
        raise ConfigError(
            f"JUDGE_MODEL={settings.judge_model!r} and JUDGE_MODEL_PATH="
            f"{str(settings.judge_model_path)!r} name two judges: unset one of them"
        )
    load_rubric(settings.judge_rubric)
    if settings.judge_model_path is not None:
        _require_checkpoint(settings.judge_model_path)
    else:
        _require_key(settings)
        _require_prices(settings)


def require_art_judge(settings: Settings) -> None:
    """Check the settings of ``art-ruler``.

    Raises:
        ConfigError: no ``JUDGE_MODEL`` is named; a rubric or key is missing.
    """
    if settings.judge_model is None:
        raise ConfigError(
            "art-ruler: JUDGE_MODEL is not set: name a model of the server at JUDGE_BASE_URL"
            f" ({settings.judge_base_url}); ART cannot use a checkpoint at JUDGE_MODEL_PATH"
        )
    load_rubric(settings.judge_rubric)
    _require_key(settings)


def _require_checkpoint(path: Path) -> None:
    if not any((path / name).exists() for name in _CONFIGS):
        raise ConfigError(
            f"JUDGE_MODEL_PATH={str(path)!r} holds no model ({' or '.join(_CONFIGS)}): name the"
            " directory of a checkpoint"
        )


def _require_key(settings: Settings) -> None:
    if _OPENAI in settings.judge_base_url and settings.openai_api_key is None:
        raise ConfigError(
            f"judge: {settings.judge_base_url} needs a key: set OPENAI_API_KEY, or set"
            " JUDGE_BASE_URL to another OpenAI-compatible server"
        )


def _require_prices(settings: Settings) -> None:
    limits = (settings.judge_window_usd, settings.judge_day_usd)
    priced = settings.judge_prompt_usd or settings.judge_completion_usd
    if any(limit is not None for limit in limits) and not priced:
        raise ConfigError(
            "judge: a limit in US dollars needs prices: set JUDGE_PROMPT_USD_PER_MTOK and"
            " JUDGE_COMPLETION_USD_PER_MTOK, or limit tokens instead"
        )
