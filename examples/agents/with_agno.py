"""Agno with Anthropic's client: Messages, streamed."""

from agno.agent import Agent
from agno.models.anthropic import Claude
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


def play(order: Order) -> None:
    model = Claude(id=MODEL, default_headers=order.headers)
    agent = Agent(
        model=model,
        tools=[order.buy],
        instructions=INSTRUCTIONS,
        tool_call_limit=TURNS,
        telemetry=False,
    )
    for _ in agent.run(order.text, stream=True):
        pass


run("agno", play)
