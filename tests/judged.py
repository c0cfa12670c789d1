"""Trajectories with a known order, for judging without a database."""

from dataclasses import replace
from random import Random

import msgspec

from babylon.core.llm_calls import LlmCall
from babylon.core.trajectories import Call
from babylon.scoring.judge.judgment import JudgeConfig, JudgedTrajectory, load_rubric
from tests.trajectories import a_trajectory

SCALE = (-100.0, 100.0)  # of the P&L, for the loopback judge's mind


def step(number, *, said="", prompt="", action="HOLD", result=None, success=True, error=None):
    call = {"purpose": "action", "systemPrompt": "You trade.", "userPrompt": prompt}
    return {
        "stepNumber": number,
        "environmentState": {"agentBalance": 1000.0, "agentPnL": 0.0},
        "providerAccesses": [],
        "llmCalls": [{**call, "response": said}],
        "action": {
            "actionType": action,
            "parameters": {},
            "success": success,
            "result": result,
            "error": error,
        },
    }


def chat(name, turns, tool_calls=()):
    """A conversation without actions: the user's turns and the agent's replies."""
    messages, steps, calls = [{"role": "system", "content": "You help."}], [], []
    for number, (turn, reply) in enumerate(turns):
        messages = [*messages, {"role": turn[0], "content": turn[1]}]
        call = LlmCall.of_messages(messages, response=reply, tool_calls=tool_calls)
        action = {"actionType": "RESPONSE", "parameters": {}, "success": True}
        steps.append(
            {"stepNumber": number, "llmCalls": [msgspec.to_builtins(call)], "action": action}
        )
        calls.append(
            Call(step=number, messages=tuple(messages), response=reply, tool_calls=tool_calls)
        )
        messages = [*messages, {"role": "assistant", "content": reply}]
        tool_calls = ()
    own = judged(name, 0.0, steps)
    return replace(own, trajectory=msgspec.structs.replace(own.trajectory, calls=tuple(calls)))


def judged(name, pnl_usd, steps=(), *, scenario="s", knowledge=None):
    steps = steps or (step(0, said=f"I am {name}.", prompt="m1 Will it rain?\nYES price 0.40"),)
    return JudgedTrajectory(
        trajectory=a_trajectory(
            f"t-{name}",
            agent_id=f"a-{name}",
            scenario_id=scenario,
            pnl_usd=pnl_usd,
            wins=1,
            trades=2,
            actions=1,
            steps=len(steps),
        ),
        steps=tuple(steps),
        knowledge=knowledge or {},
    )


def ladder(count, seed=0):
    """``count`` trajectories of evenly spaced worth, in random order, and their worths."""
    low, high = SCALE
    worths = [low + (high - low) * rung / (count - 1) for rung in range(count)]
    Random(seed).shuffle(worths)
    return [judged(f"{i}", worth) for i, worth in enumerate(worths)], worths


def config(**changes):
    return JudgeConfig(rubric=load_rubric("trading-v1"), **changes)


def kendall(one, other):
    """Kendall's tau-b of two lists of numbers."""

    def sign(x):
        return (x > 0) - (x < 0)

    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(sign(one[i] - one[j]), sign(other[i] - other[j])) for i, j in pairs]
    untied = [sum(s[k] != 0 for s in signs) for k in (0, 1)]
    return sum(a * b for a, b in signs) / (untied[0] * untied[1]) ** 0.5 if all(untied) else 0.0
