"""The OpenAI Agents SDK: Responses, streamed."""

import asyncio
from contextlib import suppress

from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


async def stream(order: Order) -> None:
    async with AsyncOpenAI(default_headers=order.headers) as client:
        agent = Agent(
            name="trader",
            instructions=INSTRUCTIONS,
            model=OpenAIResponsesModel(MODEL, client),
            tools=[function_tool(order.buy)],
        )
        answer = Runner.run_streamed(agent, order.text, max_turns=TURNS)
        with suppress(MaxTurnsExceeded):
            async for _ in answer.stream_events():
                pass


disable_tracing(True)  # traces would go to OpenAI
run("openai-agents", lambda order: asyncio.run(stream(order)))
