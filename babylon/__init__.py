"""Continuous reinforcement learning for fleets of live LLM agents.

``import babylon`` loads nothing and changes nothing. Each public name loads its module when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from babylon.art.backend import Backend
    from babylon.core.settings import Settings
    from babylon.core.settings_loading import load_settings
    from babylon.recorder import (
        AsyncPlayClient,
        MarketOutcomesTracker,
        PlayClient,
        TrajectoryRecorder,
    )
    from babylon.store import open_store

    __version__: str

__all__ = [
    "AsyncPlayClient",
    "Backend",
    "MarketOutcomesTracker",
    "PlayClient",
    "Settings",
    "TrajectoryRecorder",
    "__version__",
    "load_settings",
    "open_store",
]
_MODULES = {
    "AsyncPlayClient": "babylon.recorder",
    "Backend": "babylon.art.backend",
    "MarketOutcomesTracker": "babylon.recorder",
    "PlayClient": "babylon.recorder",
    "Settings": "babylon.core.settings",
    "TrajectoryRecorder": "babylon.recorder",
    "load_settings": "babylon.core.settings_loading",
    "open_store": "babylon.store",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("babylon-rl")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
