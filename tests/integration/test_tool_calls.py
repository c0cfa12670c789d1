"""Agents with tools: from their calls through gateway and engine to the trainer's batch."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from babylon.core.llm_calls import LlmCall
from babylon.core.settings import Settings
from babylon.core.trajectories import TrainingRow, read_trajectories
from babylon.core.types import Artifact
from babylon.core.windows import parse_window_id
from babylon.formats.export_files import export_traces, read_window_traces
from babylon.formats.format_names import Written
from babylon.formats.import_files import import_files
from babylon.policies.load import load_policy
from babylon.recorder import Action, TrajectoryRecorder
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.evidence import read_evidence
from babylon.stages.collect import collect_window
from babylon.stages.validate import validate_window
from babylon.store import Store
from babylon.store.windows import claim_window
from babylon.training.call_tokens import scored_trajectories
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_window import compile_window
from tests.calling_policy import CALL, save_calling_policy
from tests.integration.test_serving import Stack, register, running_stack, until_healthy
from tests.tiny_policy import plain_logprobs

WINDOW = parse_window_id("2025-11-14T09:00")
AGENTS, STEPS = 3, 3  # with two calls a step: 18 calls
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "strict": True,  # without it, the SDK's stream helper refuses the tool
        "parameters": {"properties": {"ticker": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calling_policy(tmp_path_factory.mktemp("policy") / "v0")


@pytest.fixture
async def stack(store: Store, settings: Settings, checkpoint: Path) -> AsyncIterator[Stack]:
    await register(store, [checkpoint])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        yield stack


async def ask(client: AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """Stream one answer, and return its id, message and finish reason, as an SDK adds them up."""
    async with client.chat.completions.stream(**asked) as stream:
        completion = await stream.get_final_completion()
    choice = completion.choices[0]
    return {"id": completion.id, "message": choice.message, "finish": choice.finish_reason}


async def play(client: AsyncOpenAI, recorder: TrajectoryRecorder, agent: int) -> None:
    """Two calls a step: the first whole, the second streamed with the results of the tools."""
    trajectory = recorder.start(
        f"agent-{agent}", "shard", at=WINDOW.start, trajectory_id=f"t{agent}"
    )
    for step in range(STEPS):
        messages: list[Any] = [
            {"role": "system", "content": [{"type": "text", "text": "You trade."}]},
            {"role": "user", "content": f"Tick {step} of agent {agent}."},
        ]
        calls = []
        for stream in (False, True):
            asked = {
                "model": "babylon",
                "messages": messages,
                "tools": [PRICE],
                "tool_choice": "auto",
                "max_tokens": 64,
                "seed": 100 * agent + 10 * step + stream,
                "extra_headers": {
                    "x-babylon-agent": f"agent-{agent}",
                    "x-babylon-trajectory": trajectory,
                },
            }
            if stream:
                answer = await ask(client, **asked)
            else:
                whole = await client.chat.completions.create(**asked)
                message, finish = whole.choices[0].message, whole.choices[0].finish_reason
                answer = {"id": whole.id, "message": message, "finish": finish}
            message = answer["message"]
            assert answer["finish"] == ("tool_calls" if message.tool_calls else "stop")
            calls.append(
                LlmCall.of_messages(messages, response=message.content or "", call_id=answer["id"])
            )
            messages = [*messages, message.model_dump(exclude_none=True)]
            for wanted in message.tool_calls or ():
                assert json.loads(wanted.function.arguments) == {"ticker": "NVDA"}
                messages.append(
                    {"role": "tool", "tool_call_id": wanted.id, "content": f"costs {step}.5"}
                )
        recorder.step(
            trajectory,
            environment_state={"agentBalance": 1000, "agentPnL": 0, "openPositions": 0},
            llm_calls=calls,
            action=Action(action_type="BUY", success=True, parameters={}),
            reward=0.0,
            at=WINDOW.start + timedelta(minutes=step),
        )
    end = WINDOW.start + timedelta(minutes=STEPS)
    await recorder.finish(trajectory, final_balance=1000, final_pnl=0, at=end)


async def validated(store: Store, settings: Settings) -> Artifact:
    quality = settings.quality.model_copy(update={"min_actions": STEPS})
    settings = settings.model_copy(update={"quality": quality})
    claim = await claim_window(store, WINDOW, owner="test", lease_s=60)
    collected = await collect_window(store, settings.home, claim, WINDOW)
    result = await validate_window(store, settings, collected)
    assert (result.agents, result.rejected) == (AGENTS, {})
    return result.artifact


async def test_every_call_of_three_agents_with_tools_reaches_the_trainers_batch(
    stack: Stack, settings: Settings, checkpoint: Path, tmp_path: Path
) -> None:
    recorder = TrajectoryRecorder(stack.store)
    await asyncio.gather(*(play(stack.client, recorder, agent) for agent in range(AGENTS)))
    rows = {row["call_id"]: row for row in await stack.rows()}
    assert len(rows) == AGENTS * STEPS * 2
    assert {row["untrainable_reason"] for row in rows.values()} == {None}
    called = [row for row in rows.values() if row["answer"]]
    assert 0 < len(called) < len(rows)  # some answers are text only
    assert any(row["response"] == "" for row in called)  # and some are tool calls only

    artifact = await validated(stack.store, settings)
    trajectories = read_trajectories(settings.home, artifact)
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    assert [call.retokenized for call in calls] == [False] * len(rows)
    assert sum(bool(call.tool_calls) for call in calls) == len(called)
    assert all(call.tools == (PRICE,) for call in calls)
    second = calls[1::2]
    assert any(message["role"] == "tool" for call in second for message in call.messages)
    assert all(call.messages[0]["content"] == [{"type": "text", "text": "You trade."}]
               for call in calls)  # fmt: skip

    model, tokenizer = load_policy(checkpoint, frozen=True)
    for call in calls:
        prompt, completion = call.prompt_token_ids or (), call.completion_token_ids or ()
        said = tokenizer.decode(completion)
        assert said.count(CALL) == len(call.tool_calls)
        assert said.replace(CALL, "").replace("<|im_end|>", "").strip() == call.response.strip()
        assert tokenizer.decode(prompt).count("costs") == sum(
            message["role"] == "tool" for message in call.messages
        )
        exact = plain_logprobs(model, prompt, completion)
        assert torch.allclose(exact, torch.tensor(call.logprobs, dtype=torch.float64), atol=1e-4)

    scored = [
        TrainingRow(
            trajectory_id=one.trajectory_id,
            agent_id=one.agent_id,
            scenario_id=one.scenario_id,
            score=score,
            calls=one.calls,
        )
        for one, score in zip(trajectories, (0.0, 0.2, 1.0), strict=True)
    ]
    batch, excluded = scored_trajectories(tokenizer, scored, 2048)
    window = compile_window(batch, TrainerConfig(iterations=1))
    assert len(window.calls) == len(rows) and set(asdict(excluded).values()) == {0}
    trained, _ = load_policy(checkpoint)
    before = trained.get_output_embeddings().weight.detach().clone()
    report = train_on_window(trained, torch.optim.AdamW(trained.parameters(), lr=1e-3), window)
    assert report.calls == len(rows)
    assert not torch.equal(before, trained.get_output_embeddings().weight)

    judged, *_ = read_evidence(settings.home, artifact)
    text = condense(judged[0], (), 10_000)
    assert '| BUY called price({"ticker":"NVDA"})' in text
    assert "tool result: costs 0.5" in text

    trace = [one async for one in read_window_traces(stack.store, WINDOW)]
    assert sum(len(step.tokens) for one in trace for step in one.steps) == len(rows)
    for format in Written.ATIF, Written.CHAT:
        file = tmp_path / format
        await export_traces(stack.store, WINDOW, format, file)
        written = file.read_text()
        assert '"tool_calls"' in written and "costs 0.5" in written
    await stack.store.pool.execute("TRUNCATE trajectories, llm_call_logs, babylon.calls")
    await import_files(stack.store, [tmp_path / Written.ATIF])
    back = [one async for one in read_window_traces(stack.store, WINDOW)]
    assert [[s.tokens for s in one.steps] for one in back] == [
        [s.tokens for s in one.steps] for one in trace
    ]


async def test_tools_are_offered_parsed_and_refused_as_asked(stack: Stack) -> None:
    asked: dict[str, Any] = {"tools": [PRICE], "max_tokens": 64, "seed": 1}
    row = (await stack.chat(**asked, tool_choice="none")).parse().choices[0]
    assert row.message.tool_calls is None and row.finish_reason in ("stop", "length")
    for seed in range(20):
        one = await stack.chat(**{**asked, "seed": seed}, parallel_tool_calls=False)
        assert len(one.parse().choices[0].message.tool_calls or ()) <= 1
    broken = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]
    with pytest.raises(BadRequestError, match="send a function with a name and JSON arguments"):
        await stack.chat(messages=broken)
    prompts = {row["parameters"]: row["prompt_token_ids"] for row in await stack.rows()}
    lengths = {'"tool_choice":"none"' in fields: len(ids) for fields, ids in prompts.items()}
    assert lengths[True] + 50 < lengths[False]  # the tools are not in the prompt


async def test_a_forced_call_is_recorded_with_its_reason_and_an_unforced_one_is_trainable(
    stack: Stack,
) -> None:
    parameters = {**PRICE["function"]["parameters"], "required": ["ticker"]}
    price = {"type": "function", "function": {**PRICE["function"], "parameters": parameters}}
    asked: dict[str, Any] = {"tools": [price], "max_tokens": 64, "seed": 3, "temperature": 1}
    named = {"type": "function", "function": {"name": "price"}}
    ways: dict[str, dict[str, Any]] = {
        "tool_choice": {"tool_choice": named, "parallel_tool_calls": False},
        "response_format": {"response_format": {"type": "json_object"}},
        "": {"tool_choice": "auto"},
    }
    ids = dict[str, str]()
    for constrained, way in ways.items():
        answer = (await stack.chat(**asked, **way)).parse()
        ids[answer.id] = constrained
        for call in answer.choices[0].message.tool_calls or ():
            assert json.loads(call.function.arguments) == {"ticker": "NVDA"}
    for row in await stack.rows():
        constrained = ids[row["call_id"]]
        assert row["trainable"] == (not constrained)
        reason = f"the sampling distribution was changed by {constrained}"
        assert row["untrainable_reason"] == (reason if constrained else None)
        # a token that the grammar leaves no choice has the logprob 0
        assert all(score <= 0 for score in row["logprobs"])
        if constrained == "tool_choice":
            assert row["logprobs"].count(0) > len(row["logprobs"]) / 2
