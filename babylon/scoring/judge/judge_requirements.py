"""Checks of the judge's settings, before a window is claimed or a judgment is bought."""

from collections import Counter
from collections.abc import Sequence

from babylon.core.discretion import shown_url
from babylon.core.errors import ConfigError
from babylon.core.settings import JudgeSettings
from babylon.scoring.judge.judgment import load_rubric
from babylon.scoring.judge.panel_members import panel_members

_OPENAI = "api.openai.com"
_CONFIGS = ("config.json", "adapter_config.json")


def require_judge(scorer: str, judge: JudgeSettings) -> None:
    """Check the settings of ``ruler``.

    Raises:
        ConfigError: no judge or two judges are named, or a checkpoint, rubric, key or price is
            missing. Or two judges of a panel have the same name.
    """
    if judge.model is None and judge.model_path is None:
        raise ConfigError(
            f"scorer {scorer!r} needs a judge: set JUDGE_MODEL to a model of the server at"
            f" JUDGE_BASE_URL ({shown_url(judge.base_url)}), or JUDGE_MODEL_PATH to a checkpoint"
            " directory; --scorer heuristic needs no judge"
        )
    if judge.model is not None and judge.model_path is not None:
        raise ConfigError(
            f"JUDGE_MODEL={judge.model!r} and JUDGE_MODEL_PATH="
            f"{str(judge.model_path)!r} name two judges: unset one of them"
        )
    load_rubric(judge.rubric)
    own, *others = panel_members(judge)
    _require_names([own, *others])
    _require_reachable(own, "JUDGE_MODEL_PATH", "OPENAI_API_KEY")
    for other in others:
        elsewhere = other.base_url != judge.base_url
        key = "JUDGE_PANEL_API_KEY" if elsewhere else "OPENAI_API_KEY"
        _require_reachable(other, "JUDGE_PANEL", key)
    _require_prices(own, others)


def require_art_judge(judge: JudgeSettings) -> None:
    """Check the settings of ``art-ruler``.

    Raises:
        ConfigError: no ``JUDGE_MODEL`` is named; a rubric or key is missing; a budget is set, which
            ART's requests would not keep.
    """
    if judge.model is None:
        raise ConfigError(
            "art-ruler: JUDGE_MODEL is not set: name a model of the server at JUDGE_BASE_URL"
            f" ({shown_url(judge.base_url)}); ART cannot use a checkpoint at JUDGE_MODEL_PATH"
        )
    load_rubric(judge.rubric)
    _require_key(judge, "OPENAI_API_KEY")
    limits = (judge.window_tokens, judge.window_usd, judge.day_tokens, judge.day_usd)
    if any(limit is not None for limit in limits):
        raise ConfigError(
            "art-ruler: ART keeps no account of its requests, so that no budget holds: unset"
            " JUDGE_WINDOW_TOKENS, JUDGE_WINDOW_USD, JUDGE_DAY_TOKENS and JUDGE_DAY_USD, or choose"
            " the scorer ruler"
        )


def _require_reachable(judge: JudgeSettings, setting: str, key: str) -> None:
    if (path := judge.model_path) is None:
        _require_key(judge, key)
    elif not any((path / name).exists() for name in _CONFIGS):
        raise ConfigError(
            f"{setting}={str(path)!r} holds no model ({' or '.join(_CONFIGS)}): name the directory"
            " of a checkpoint"
        )


def _require_names(members: Sequence[JudgeSettings]) -> None:
    """Require a name of its own for each judge, because judgments are found by it.

    Two servers of one model's name would answer for each other, and their opinions would be one.
    """
    names = Counter(one.model or str(one.model_path) for one in members)
    name, times = names.most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f"JUDGE_PANEL: {name!r} is named twice, in it or beside the judge itself: leave one"
            " out, or serve one of them under another name"
        )


def _require_key(judge: JudgeSettings, key: str) -> None:
    if _OPENAI in judge.base_url and judge.api_key is None:
        raise ConfigError(
            f"judge: {shown_url(judge.base_url)} needs a key: set {key}, or set"
            " JUDGE_BASE_URL to another OpenAI-compatible server"
        )


def _require_prices(own: JudgeSettings, others: Sequence[JudgeSettings]) -> None:
    """Require the prices of every model that may be asked, if dollars are limited.

    A model without prices would spend without end within such a limit. Checkpoints cost nothing.
    """
    if own.window_usd is None and own.day_usd is None:
        return
    missing = []
    if own.model is not None and not (own.prompt_usd or own.completion_usd):
        missing.append("set JUDGE_PROMPT_USD_PER_MTOK and JUDGE_COMPLETION_USD_PER_MTOK")
    if own.cheaper_model and not (own.cheaper_prompt_usd or own.cheaper_completion_usd):
        missing.append(
            "set JUDGE_CHEAPER_PROMPT_USD_PER_MTOK and JUDGE_CHEAPER_COMPLETION_USD_PER_MTOK"
        )
    missing += [
        f"write JUDGE_PANEL={one.model}=PROMPT/COMPLETION with US dollars per million tokens"
        for one in others
        if one.model is not None and not (one.prompt_usd or one.completion_usd)
    ]
    if missing:
        raise ConfigError(
            f"judge: a limit in US dollars needs prices: {'; '.join(missing)}; or limit tokens"
            " instead"
        )
