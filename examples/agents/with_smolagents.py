"""smolagents: Chat Completions. It ends with a call of its own tool ``final_answer``."""

from smolagents import OpenAIModel, Tool, ToolCallingAgent, tool
from task import INSTRUCTIONS, MODEL, TURNS, Order, run


def play(order: Order) -> None:
    @tool
    def buy(ticker: str) -> str:
        """Buy one share of a stock.

        Args:
            ticker: the stock's ticker, NVDA or TSLA.
        """
        return order.buy(ticker)

    tools: list[Tool] = [buy]
    # smolagents asks for tool_choice "required", which constrains the sampling.
    model = OpenAIModel(MODEL, tool_choice="auto", client_kwargs={"default_headers": order.headers})
    ToolCallingAgent(
        tools, model, instructions=INSTRUCTIONS, max_steps=TURNS, verbosity_level=0
    ).run(order.text)


run("smolagents", play)
