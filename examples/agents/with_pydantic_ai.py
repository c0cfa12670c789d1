"""Pydantic AI: Responses."""

from contextlib import suppress

from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


def play(order: Order) -> None:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(default_headers=order.headers))
    model = OpenAIResponsesModel(MODEL, provider=provider)
    agent = Agent(model, instructions=INSTRUCTIONS, tools=[order.buy])
    with suppress(UsageLimitExceeded):
        agent.run_sync(order.text, usage_limits=UsageLimits(request_limit=TURNS))


run("pydantic-ai", play)
