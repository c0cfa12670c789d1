"""Tasksets of verifiers 0.4 as an evaluator.

verifiers starts a chat loop as a program that installs packages from the net. Here the loop runs in
this process, which verifiers allows if every model call goes through its proxy. The taskset's tool
servers, stops, rewards and judges work as they do there. Needs ``babylon-rl[verifiers]``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from random import Random
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils import mcp
from verifiers.v1.runtimes import ProgramResult, Runtime

from babylon.core.errors import ArenaError
from babylon.core.trajectories import Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore

# verifiers takes keys from the environment only. It hides variables with API_KEY in their name from
# a taskset's tool servers.
KEY_VARIABLE = "BABYLON_EVALUATOR_API_KEY"


class VerifiersTasks:
    """An evaluator of a taskset whose tasks need no container.

    The score is the trace's reward, cut to ``lowest`` and ``highest``. A world is a task: the
    seed's choice of a bounded taskset, or the next tasks of an infinite one from a place that the
    seed chooses. ``sampling`` is added to each request.

        evaluator = VerifiersTasks(MyTaskset(MyConfig(id="my_taskset")), lowest=0, highest=1)
    """

    def __init__(
        self,
        taskset: vf.Taskset[Any, Any],
        *,
        lowest: float,
        highest: float,
        unit: str = "reward",
        max_turns: int = 16,
        sampling: Mapping[str, object] | None = None,
    ) -> None:
        self.unit, self.lowest, self.highest = unit, lowest, highest
        self.guardrails: Mapping[str, float] = {}
        self._taskset, self._max_turns = taskset, max_turns
        self._sampling = {"max_tokens": 256} | dict(sampling or {})

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[vf.Task]:
        random = Random(seed)
        if not self._taskset.bounded:
            return [*islice(self._taskset.skip(random.randrange(10_000)), count)]
        tasks = [*self._taskset]
        return random.sample(tasks, min(count, len(tasks)))

    async def play(self, world: vf.Task, policy: Endpoint, seed: int) -> PlayScore:
        """Play a task until the policy calls no more tools.

        Raises:
            ArenaError: verifiers reports an error, which is never a low score.
        """
        os.environ[KEY_VARIABLE] = policy.client.api_key
        agent = vf.Agent(
            vf.AgentConfig(
                model=policy.model,
                client=vf.EvalClientConfig(
                    base_url=str(policy.client.base_url),
                    api_key_var=KEY_VARIABLE,
                ),
                sampling=vf.SamplingConfig.model_validate({**self._sampling, "seed": seed}),
                runtime=vf.SubprocessConfig(),
                max_turns=self._max_turns,
            )
        )
        agent.harness = _ChatLoop(agent.harness.config)
        trace = await agent.run(world)
        if not trace.ok:
            reasons = ", ".join(sorted({error.type for error in trace.errors}))
            raise ArenaError(
                f"a task of {type(self._taskset).__name__} ended with {reasons or 'no result'}:"
                " run it with verifiers' own `eval` to see why"
            )
        return PlayScore(value=min(max(trace.reward, self.lowest), self.highest))


class _ChatLoop(NullHarness):  # type: ignore[misc]
    """verifiers' chat loop in this process."""

    async def setup(self, runtime: Runtime) -> None:
        pass

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        try:
            await _chat(endpoint, secret, ctx.model, messages, mcp_urls)
        except APIStatusError as error:  # the proxy ends a play by refusing its next call
            return ProgramResult(exit_code=1, stdout="", stderr=f"status {error.status_code}")
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _chat(
    endpoint: str, secret: str, model: str, messages: list[Any], mcp_urls: Mapping[str, str]
) -> None:
    """Ask until an answer calls no tool."""
    servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
    async with (
        AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
        AsyncExitStack() as stack,
    ):
        tools, dispatch, connected = await mcp.connect_mcp(servers, stack)
        while True:
            offered: dict[str, Any] = {"tools": tools} if tools else {}
            answer = await client.chat.completions.create(model=model, messages=messages, **offered)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = await _result(call, dispatch, connected)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def _result(call: Any, dispatch: dict[str, Any], connected: dict[str, Any]) -> object:
    """Call a tool. A call that cannot be made is answered with the reason."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if call.function.name not in dispatch or not isinstance(arguments, dict):
        return "error: no such tool, or its arguments are no JSON object"
    return await mcp.call_mcp(connected, dispatch, call.function.name, arguments)
