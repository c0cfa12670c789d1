"""A taskset of verifiers: find an order's state with a tool, and say it. Also its tool server."""

from collections.abc import Iterator

import verifiers.v1 as vf

STATES = ("shipped", "delayed", "cancelled")


class OrderData(vf.TaskData):
    order: int


class Shop(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def state_of(self, order: int) -> str:
        """Return the state of an order."""
        return STATES[order % 3]


class OrderTask(vf.Task[OrderData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def says_the_state(self, task: OrderData, trace: vf.Trace) -> float:
        return float(STATES[task.order % 3] in (trace.last_reply or ""))


class OrdersTaskset(vf.Taskset[OrderTask, vf.TasksetConfig]):
    def load(self) -> Iterator[OrderTask]:
        for order in range(100):
            yield OrderTask(OrderData(prompt=f"Where is order {order}?", order=order))


__all__ = ["OrdersTaskset"]

if __name__ == "__main__":
    Shop.run()
