"""What agents import to have their play recorded as the game's own rows. Needs no torch.

recorder = TrajectoryRecorder(store)
trajectory_id = recorder.start("agent-7")
recorder.step(trajectory_id, environment_state={...}, llm_calls=[...], action=..., reward=0.1)
await recorder.finish(trajectory_id, final_balance=1012.5, final_pnl=12.5)
"""

from babylon.recorder.outcomes import MarketOutcomesTracker
from babylon.recorder.records import Action, LlmCall, ProviderAccess
from babylon.recorder.trajectory import TrajectoryRecorder

__all__ = ["Action", "LlmCall", "MarketOutcomesTracker", "ProviderAccess", "TrajectoryRecorder"]
