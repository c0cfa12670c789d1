"""Members of a panel, as ``JUDGE_PANEL`` names them."""

import re
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.settings import JudgeSettings

_PRICES = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)")


def panel_members(judge: JudgeSettings) -> list[JudgeSettings]:
    """Return the settings of the judge and of each other judge that ``JUDGE_PANEL`` names.

    An entry is a model of the judge's own server, ``MODEL@URL`` of another one, or the directory of
    a checkpoint. ``=PROMPT/COMPLETION`` after a model are its prices in US dollars per million
    tokens; without them it costs nothing in the accounts. The judge's key is sent to no other
    server.

    Raises:
        ConfigError: prices cannot be read.
    """
    entries = filter(None, (part.strip() for part in judge.panel.split(",")))
    return [judge, *(_member(judge, entry) for entry in entries)]


def _member(judge: JudgeSettings, entry: str) -> JudgeSettings:
    if "/" in entry and (path := Path(entry).expanduser()).is_dir():
        return judge.model_copy(update={"model": None, "model_path": path})
    name, _, prices = entry.rpartition("=")
    found = _PRICES.fullmatch(prices)
    model, at, url = (name if found else entry).partition("@http")
    if "=" in model:  # one in a URL belongs to the URL, which may hold a key
        raise ConfigError(
            f"JUDGE_PANEL: {model.partition('=')[0]!r} has no prices after '=': write US dollars"
            " per million prompt and completion tokens, as in gpt-5-nano=0.05/0.4"
        )
    prompt_usd, completion_usd = map(float, found.groups()) if found else (0.0, 0.0)
    changes: dict[str, object] = {
        "model": model,
        "model_path": None,
        "prompt_usd": prompt_usd,
        "completion_usd": completion_usd,
    }
    if at:
        changes["base_url"] = f"http{url}"
        changes["api_key"] = judge.panel_api_key
    return judge.model_copy(update=changes)
