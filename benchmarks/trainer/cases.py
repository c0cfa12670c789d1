"""The logged windows of the benchmark: token ids, loss mask, mu, advantages, from a seed.

The calls of 10 agents over some ticks, all in one optimiser step. A prompt consists of the system
prompt (shared by all calls), the market (shared by the agents of a tick) and the agent's private
state. The cases differ in the lengths and the sharing of these segments:

- ``high``: 12 ticks; system 256, market 640, private 96, response 40 tokens.
- ``low``: 6 ticks, all segments half as long, and the private state before the market, so that only
  the system prompt is a shared prefix. It shows the cost of a bad prompt order.
- ``zero``: as ``low``, and no token is shared.
- ``skew``: 12 ticks, shared as in ``high``; system 64, market 32 to 1,024 by tick, private 16 to
  256, response 4 to 160, all log-uniform: the longest call is over ten times the shortest.
- ``long``, for GPUs: 12 ticks; system 1,024, market 2,560, private 512, response 160 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

AGENTS = 10
CASES = {"high": 12, "low": 6, "zero": 6, "skew": 12}  # name → ticks
LONG = {"long": 12}
_TICKS = CASES | LONG
PADDING = 0  # never drawn as a token, because some peers recognise padding by its id
_EQUAL = {  # system, market, private, response
    "high": (256, 640, 96, 40),
    "low": (128, 320, 48, 20),
    "zero": (128, 320, 48, 20),
    "long": (1024, 2560, 512, 160),
}
_MU_NOISE = 0.01  # nats

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One logged request. ``mu`` ``[T]`` are the sampling policy's logprobs, None for its own."""

    prompt: Ints
    completion: Ints
    mu: Floats | None
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The calls of one optimiser step; every trained token weighs ``1 / trained_tokens``."""

    name: str
    calls: Sequence[Call]

    @property
    def trained_tokens(self) -> int:
        return sum(len(call.completion) for call in self.calls)

    @property
    def longest(self) -> int:
        return max(len(call) for call in self.calls)

    def head(self, calls: int) -> "Window":
        """The first calls, by tick. The advantages of every ``AGENTS`` calls sum to zero."""
        return replace(self, calls=self.calls[:calls])

    def on_policy(self) -> "Window":
        """The window without mu: trainers use their own logprobs, and all ratios are 1."""
        return replace(self, calls=[replace(call, mu=None) for call in self.calls])


def make_window(name: str, *, vocab: int, seed: int) -> Window:
    """Make a window. The same name, vocabulary and seed give the same window."""
    random = np.random.default_rng([seed, list(_TICKS).index(name)])
    shared: dict[tuple[object, ...], Ints] = {}

    def segment(length: int, *key: object) -> Ints:
        if key not in shared:
            shared[key] = random.integers(PADDING + 1, vocab, length)
        return shared[key]

    lengths = _lengths(name, random)
    scores = random.normal(size=AGENTS)
    calls = []
    for tick in range(_TICKS[name]):
        for agent in range(AGENTS):
            alone = (tick, agent) if name == "zero" else ()
            system = segment(lengths.system, "system", *alone)
            market = segment(lengths.market[tick], "market", tick, *alone)
            private = segment(lengths.private[tick, agent], "private", tick, agent)
            parts = [system, private, market] if name == "low" else [system, market, private]
            response = segment(lengths.response[tick, agent], "response", tick, agent)
            noise = random.normal(0.0, _MU_NOISE, len(response))
            calls.append(
                Call(
                    prompt=np.concatenate(parts),
                    completion=response,
                    mu=(noise - np.log(vocab)).astype(np.float32),
                    advantage=float(scores[agent] - scores.mean()),
                )
            )
    return Window(name=name, calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    system: int
    market: Ints  # [ticks]
    private: Ints  # [ticks, agents]
    response: Ints  # [ticks, agents]


def _lengths(name: str, random: np.random.Generator) -> _Lengths:
    ticks = _TICKS[name]
    if name == "skew":
        calls = ticks * AGENTS
        return _Lengths(
            system=64,
            market=_log_uniform(32, 1024, ticks, random),
            private=_log_uniform(16, 256, calls, random).reshape(ticks, AGENTS),
            response=_log_uniform(4, 160, calls, random).reshape(ticks, AGENTS),
        )
    system, market, private, response = _EQUAL[name]
    return _Lengths(
        system=system,
        market=np.full(ticks, market),
        private=np.full((ticks, AGENTS), private),
        response=np.full((ticks, AGENTS), response),
    )


def _log_uniform(low: int, high: int, count: int, random: np.random.Generator) -> Ints:
    """Values evenly spaced on a logarithmic scale, both ends included, in random order."""
    return random.permutation(np.geomspace(low, high, count).round().astype(np.int64))


def save_window(window: Window, path: Path) -> None:
    """One npz: tokens and loss_mask of all calls end to end, lengths, mu and advantages."""
    trained = [call.mu for call in window.calls if call.mu is not None]
    np.savez(
        path,
        name=window.name,
        tokens=np.concatenate([[*call.prompt, *call.completion] for call in window.calls]),
        loss_mask=np.concatenate([np.arange(len(c)) >= len(c.prompt) for c in window.calls]),
        lengths=np.array([len(call) for call in window.calls]),
        mu=np.concatenate(trained),
        advantages=np.array([call.advantage for call in window.calls]),
    )


def load_window(path: Path) -> Window:
    with np.load(path) as arrays:
        ends = arrays["lengths"].cumsum()[:-1]
        tokens = np.split(arrays["tokens"], ends)
        masks = np.split(arrays["loss_mask"], ends)
        mu = np.split(arrays["mu"], np.cumsum([mask.sum() for mask in masks])[:-1])
        rows: zip[tuple[Any, ...]] = zip(tokens, masks, mu, arrays["advantages"], strict=True)
        calls = [
            Call(prompt=ids[~mask], completion=ids[mask], mu=logged, advantage=float(advantage))
            for ids, mask, logged, advantage in rows
        ]
        return Window(name=str(arrays["name"]), calls=calls)
