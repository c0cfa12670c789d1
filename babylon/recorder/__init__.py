"""The recorder: agents import it to have their play stored as the game's rows. It needs no torch.

``docs/recorder.md`` has a first program.
"""

from babylon.core.llm_calls import LlmCall
from babylon.recorder.client import AsyncPlayClient, PlayClient, PlayRefusedError
from babylon.recorder.market_outcomes import MarketOutcomesTracker
from babylon.recorder.trajectory import Action, ProviderAccess, TrajectoryRecorder

__all__ = [
    "Action",
    "AsyncPlayClient",
    "LlmCall",
    "MarketOutcomesTracker",
    "PlayClient",
    "PlayRefusedError",
    "ProviderAccess",
    "TrajectoryRecorder",
]
