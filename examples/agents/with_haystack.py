"""Haystack: Chat Completions, streamed."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


def ignore(chunk: StreamingChunk) -> None:
    """Haystack streams if there is a function that takes the chunks."""


def play(order: Order) -> None:
    def buy(ticker: str) -> str:
        """Buy one share of a stock, NVDA or TSLA."""
        return order.buy(ticker)

    model = OpenAIChatGenerator(model=MODEL, http_client_kwargs={"headers": order.headers})
    agent = Agent(
        chat_generator=model,
        tools=[create_tool_from_function(buy)],
        system_prompt=INSTRUCTIONS,
        max_agent_steps=TURNS,
        streaming_callback=ignore,
    )
    agent.run(messages=[ChatMessage.from_user(order.text)])


run("haystack", play)
