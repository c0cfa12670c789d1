"""What every stage after validation reads: trajectories and the calls inside them.

A ``Call`` is one LLM request with the tokens that the policy really saw and wrote. Calls that the
gateway recorded carry token ids and behaviour logprobs; calls known only from the game's log
carry text alone, are *retokenized* by the trainer and marked so.
"""

from datetime import datetime

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message as it was sent."""

    role: str
    content: str


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLM request inside a step.

    ``logprobs`` ``[T]``: natural log, of the distribution that was sampled from (after
    temperature), one for each of the T completion tokens.
    """

    step: int
    messages: tuple[Message, ...]
    response: str
    temperature: float = 1.0
    top_p: float = 1.0
    policy_version: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None

    @property
    def retokenized(self) -> bool:
        """True when the exact tokens are unknown and the trainer must tokenise the text itself."""
        return self.completion_token_ids is None


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's ordered steps in one window, reduced to what scoring and training need.

    ``pnl_usd`` is the profit inside this window, not the agent's lifetime P&L. ``wins`` of
    ``trades`` closed or resolved in profit; ``actions`` counts successful steps other than HOLD.
    """

    trajectory_id: str
    agent_id: str
    window_id: str
    scenario_id: str
    start: datetime
    end: datetime
    pnl_usd: float
    wins: int
    trades: int
    actions: int
    steps: int
    calls: tuple[Call, ...]

    @property
    def win_rate(self) -> float:
        """Share of decided trades that made money, 0 when there was none."""
        return self.wins / self.trades if self.trades else 0.0
