"""The protocol of evaluators: worlds, play through an endpoint, a bounded score, guardrails.

``EVALUATOR=package.module:name`` names an evaluator, or a class or function that returns one. The
gate makes its worlds, lets champion and challenger play each of them, and compares the scores as it
does P&L: a challenger that is no better passes at most 2.5 % of the gates.

    class Desk:
        unit, lowest, highest = "solved tickets", 0.0, 1.0
        guardrails = {"refunds": 0.05}

        def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[Ticket]: ...

        async def play(self, world: Ticket, policy: Endpoint, seed: int) -> PlayScore:
            reply = await policy.client.chat.completions.create(model=policy.model, seed=seed, ...)
            return PlayScore(value=float(solves(world, reply)))
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from numbers import Real
from typing import Protocol, TypeVar

from openai import AsyncOpenAI, BadRequestError

from babylon.core.errors import ConfigError
from babylon.core.trajectories import Trajectory

World = TypeVar("World")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A policy behind an OpenAI-compatible endpoint."""

    client: AsyncOpenAI
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayScore:
    """The result of one play.

    ``value`` lies between the evaluator's ``lowest`` and ``highest``. ``guardrails``: harms by the
    evaluator's names, higher is worse; a harm without a value counts as 0. ``malformed``: some
    reply could not be used.
    """

    value: float
    malformed: bool = False
    guardrails: Mapping[str, float] = field(default_factory=dict)


class Evaluator(Protocol[World]):
    """A task. ``guardrails``: the largest rise of each harm's mean that a challenger may cause."""

    unit: str
    lowest: float
    highest: float
    guardrails: Mapping[str, float]

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> Sequence[World]:
        """Return at most ``count`` worlds.

        They follow from the seed, or from recorded play of hours on which the challenger's line was
        not trained. With none of either, the challenger is not promoted.
        """
        ...

    async def play(self, world: World, policy: Endpoint, seed: int) -> PlayScore:
        """Play a world once. Both policies play it with the same seed.

        An error fails the gate: return a low score for a bad reply, and raise for a broken task.
        """
        ...


def exceeds_context(error: BadRequestError) -> bool:
    """Return whether the engine refused a prompt for its length; vLLM says so in words only."""
    return error.code == "context_length_exceeded" or "context length" in error.message


def load_evaluator(name: str) -> Evaluator[object]:
    """Return the evaluator ``package.module:name``.

    Raises:
        ConfigError: It cannot be imported, or lacks a part of the protocol.
    """
    evaluator = _found(name)
    parts = ("unit", "lowest", "highest", "guardrails", "worlds", "play")
    if missing := [part for part in parts if not hasattr(evaluator, part)]:
        raise ConfigError(f"EVALUATOR={name} has no {', '.join(missing)}: see docs/evaluators.md")
    bounds = evaluator.lowest, evaluator.highest
    # no bet has a size without bounds
    if not all(isinstance(one, Real) for one in bounds) or not -inf < bounds[0] < bounds[1] < inf:
        raise ConfigError(
            f"EVALUATOR={name}: lowest {bounds[0]!r} and highest {bounds[1]!r} must be"
            " numbers in this order: cut the scores to bounds of your choice"
        )
    limits = evaluator.guardrails
    # No rise is within a limit of NaN, so every challenger would be rejected.
    if not isinstance(limits, Mapping) or any(
        not isinstance(limit, int | float) or isnan(limit) for limit in limits.values()
    ):
        raise ConfigError(
            f"EVALUATOR={name}: guardrails {limits!r:.80}: map each harm's name to a number, the"
            " largest rise of its mean"
        )
    return evaluator


def _found(name: str) -> Evaluator[object]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made: Evaluator[object] = found() if isinstance(found, Callable) else found  # type: ignore[arg-type]
    except (ImportError, AttributeError, ValueError) as error:  # ":name" is a ValueError
        raise ConfigError(
            f"EVALUATOR={name}: {error}; give package.module:name, importable from PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(
            f"EVALUATOR={name}: {error!r}; give a class or function without arguments, or an"
            " instance, in a module that imports"
        ) from error
    return made
