"""LangGraph with LangChain's OpenAI model: Chat Completions."""

from contextlib import suppress

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


def play(order: Order) -> None:
    model = ChatOpenAI(model=MODEL, default_headers=order.headers)
    agent = create_agent(model, [tool(order.buy)], system_prompt=INSTRUCTIONS)
    with suppress(GraphRecursionError):
        agent.invoke({"messages": order.text}, {"recursion_limit": 2 * TURNS})


run("langgraph", play)
