"""The first program of README.md: an agent plays one trajectory through the gateway."""

import asyncio

from openai import AsyncOpenAI

from babylon import TrajectoryRecorder, load_settings, open_store
from babylon.recorder import Action, LlmCall

SYSTEM = 'You trade. Answer {"action": "hold"} or {"action": "trade", "trade": {...}}.'


async def main() -> None:
    settings = load_settings()
    key = (settings.home.root / "local.key").read_text().strip()
    client = AsyncOpenAI(base_url=f"{settings.serving.endpoint}/v1", api_key=key)
    async with open_store(settings) as store:
        recorder = TrajectoryRecorder(store)
        trajectory = recorder.start("agent-7")
        for step in range(5):
            question = f"Step {step}. YES costs 0.40. Your balance is $1000."
            answer = await client.chat.completions.create(
                model="babylon",
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": question},
                ],
                max_tokens=64,
                extra_headers={
                    "x-babylon-agent": "agent-7",
                    "x-babylon-trajectory": trajectory,
                    "x-babylon-step": str(step),
                },
            )
            call = LlmCall(
                model=answer.model,
                system_prompt=SYSTEM,
                user_prompt=question,
                response=answer.choices[0].message.content or "",
                temperature=1.0,
                max_tokens=64,
                purpose="action",
                call_id=answer.id,
            )
            recorder.step(
                trajectory,
                environment_state={"agentBalance": 1000, "agentPnL": 0, "openPositions": 0},
                llm_calls=[call],
                action=Action(action_type="HOLD", success=True, parameters={}),
                reward=0.0,
            )
        await recorder.finish(trajectory, final_balance=1000, final_pnl=0)
    print(f"recorded {trajectory}")


asyncio.run(main())
