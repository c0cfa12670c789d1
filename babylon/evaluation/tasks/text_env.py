"""Gymnasium environments with text observations and actions, as an evaluator."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from random import Random

import gymnasium
from openai import BadRequestError

from babylon.core.errors import ArenaError
from babylon.core.trajectories import Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore, exceeds_context


class TextEnv:
    """An evaluator of ``env``, whose ``reset`` and ``step`` take and return text.

    The score is the sum of the rewards, cut to ``lowest`` and ``highest``. ``info["malformed"]``
    marks a reply that could not be used. A world is the seed of ``reset``.

        evaluator = TextEnv(lambda: gymnasium.make("MyText-v0"), lowest=0, highest=1)
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[str, str]],
        *,
        lowest: float,
        highest: float,
        unit: str = "reward",
        system: str = "",
        max_tokens: int = 256,
    ) -> None:
        self.unit, self.lowest, self.highest = unit, lowest, highest
        self.guardrails: Mapping[str, float] = {}
        self._make, self._system, self._max_tokens = make, system, max_tokens

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[int]:
        random = Random(seed)
        return [random.getrandbits(31) for _ in range(count)]

    async def play(self, world: int, policy: Endpoint, seed: int) -> PlayScore:
        """Play until the environment ends; it must have a limit of steps.

        Raises:
            ArenaError: An observation is no text.
        """
        with closing(self._make()) as env:
            return await self._played(env, world, policy, seed)

    async def _played(
        self, env: gymnasium.Env[str, str], world: int, policy: Endpoint, seed: int
    ) -> PlayScore:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        observation, info = await asyncio.to_thread(env.reset, seed=world)
        total, ended, malformed = 0.0, False, False
        while not ended:
            if not isinstance(observation, str):
                raise ArenaError(
                    f"an observation of {type(env.unwrapped).__name__} is a"
                    f" {type(observation).__name__}: turn it into text, for example with"
                    " gymnasium.wrappers.TransformObservation"
                )
            messages.append({"role": "user", "content": observation})
            try:
                answer = await policy.client.chat.completions.create(
                    model=policy.model,
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=self._max_tokens,
                    seed=seed + len(messages),
                )
            except BadRequestError as error:
                if exceeds_context(error):  # the policy wrote too much
                    malformed = True
                    break
                raise
            reply = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
            observation, reward, over, cut, info = await asyncio.to_thread(env.step, reply)
            total, ended = total + float(reward), over or cut
            malformed = malformed or bool(info.get("malformed"))
        return PlayScore(value=min(max(total, self.lowest), self.highest), malformed=malformed)
