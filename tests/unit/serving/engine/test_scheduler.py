import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from babylon.serving.engine import scheduler as scheduling
from babylon.serving.engine.loaded_policies import LoadedPolicy, load
from babylon.serving.engine.sampling import Request, Sampling
from babylon.serving.engine.scheduler import Job, Scheduler
from babylon.serving.openai_wire import RequestError
from tests.tiny_policy import save_tiny_policy


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedPolicy]:
    root = tmp_path_factory.mktemp("policies")
    paths = [str(save_tiny_policy(root / f"{seed}", seed)) for seed in range(2)]
    return [replace(load("p", path, 0), eos_token_ids=frozenset()) for path in paths]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[scheduling._Lane, int]]:
    """Policies in the order of their turns, one entry per step, and how many requests joined."""
    seen: list[tuple[scheduling._Lane, int]] = []
    original = scheduling._Lane.turn

    def noted(self: scheduling._Lane, arrived: Sequence[Job]) -> list[Job]:
        seen.append((self, len(arrived)))
        return original(self, arrived)

    monkeypatch.setattr(scheduling._Lane, "turn", noted)
    return seen


def request(seed: int, max_tokens: int, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(prompt, Sampling(max_tokens=max_tokens, seed=seed))


def submitted(
    scheduler: Scheduler, policy: LoadedPolicy, asked: Request, *, every_step: bool
) -> Job:
    (job,) = scheduler.submit(policy, [asked], every_step=every_step)
    return job


async def whole(job: Job) -> list[int]:
    return [token async for tokens, _, _ in job.tokens() for token in tokens]


async def test_many_answers_of_one_policy_never_keep_another_from_its_turn(
    policies: list[LoadedPolicy], turns: list[tuple[scheduling._Lane, int]]
) -> None:
    scheduler = Scheduler()
    busy, other = policies
    crowd = [submitted(scheduler, busy, request(seed, 60), every_step=True) for seed in range(80)]
    alone = submitted(scheduler, other, request(1, 20), every_step=False)
    await asyncio.gather(*map(whole, [*crowd, alone]))
    await scheduler.close()
    lanes = [lane for lane, _ in turns]
    begun = max(lanes.index(lane) for lane in set(lanes))
    ended = len(lanes) - lanes[::-1].index(lanes[begun])
    assert all(one is not two for one, two in pairwise(lanes[begun:ended]))


async def test_a_short_answer_joins_a_long_one_and_is_done_long_before(
    policies: list[LoadedPolicy], turns: list[tuple[scheduling._Lane, int]]
) -> None:
    scheduler = Scheduler()
    policy = policies[0]
    long = submitted(scheduler, policy, request(1, 400), every_step=True)
    tokens = long.tokens()
    await anext(tokens)
    short = submitted(scheduler, policy, request(2, 3), every_step=False)
    await whole(short)
    async for _ in tokens:
        pass
    await scheduler.close()
    assert len({lane for lane, _ in turns}) == 1  # one batch
    assert len(turns) < 400 + 3


async def test_prompts_are_read_in_portions_between_which_others_go_on(
    policies: list[LoadedPolicy],
    turns: list[tuple[scheduling._Lane, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "_READ_TOKENS", 300)
    scheduler = Scheduler()
    with scheduler._changed:  # they come together
        jobs = [
            submitted(scheduler, policies[0], request(seed, 4, [7] * 140), every_step=False)
            for seed in range(7)
        ]
        huge = submitted(scheduler, policies[0], request(9, 4, [7] * 400), every_step=False)
    await asyncio.gather(*map(whole, [*jobs, huge]))
    await scheduler.close()
    assert [count for _, count in turns if count] == [2, 2, 2, 1, 1]


async def test_long_rows_are_few_because_all_rows_of_a_batch_are_as_long(
    policies: list[LoadedPolicy],
    turns: list[tuple[scheduling._Lane, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "_BATCH_TOKENS", 300)
    scheduler = Scheduler()
    with scheduler._changed:  # they come together
        jobs = [
            submitted(scheduler, policies[0], request(seed, 4, [7] * length), every_step=False)
            for seed, length in enumerate([46] * 6 + [496, 46])
        ]
    await asyncio.gather(*map(whole, jobs))
    await scheduler.close()
    assert [count for _, count in turns if count] == [6, 1, 1]  # the long one waits, then is alone


async def test_a_policy_that_cannot_be_sampled_fails_its_requests_and_no_others(
    policies: list[LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = policies
    original = scheduling._Lane.__init__

    def refusing(self: scheduling._Lane, policy: LoadedPolicy) -> None:
        if policy is bad:
            raise MemoryError("no room")
        original(self, policy)

    monkeypatch.setattr(scheduling._Lane, "__init__", refusing)
    scheduler = Scheduler()
    failing = submitted(scheduler, bad, request(1, 5), every_step=False)
    going = submitted(scheduler, good, request(2, 5), every_step=False)
    with pytest.raises(RequestError, match="no room"):
        await whole(failing)
    assert len(await whole(going)) == 5
    await scheduler.close()


async def test_an_engine_whose_device_failed_ends(
    policies: list[LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an assertion on a GPU all calls of the process fail. Its supervisor starts it again."""
    codes: list[int] = []

    def failing(self: scheduling._Lane, arrived: Sequence[Job]) -> list[Job]:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(scheduling._Lane, "turn", failing)
    monkeypatch.setattr(scheduling.os, "_exit", codes.append)
    scheduler = Scheduler()
    with pytest.raises(RequestError, match="device-side assert"):
        await whole(submitted(scheduler, policies[0], request(1, 4), every_step=False))
    await scheduler.close()
    assert codes == [1]


async def test_a_policy_is_let_go_with_its_last_answer(policies: list[LoadedPolicy]) -> None:
    scheduler, policy = Scheduler(), replace(policies[0])
    gone = weakref.ref(policy)
    job = submitted(scheduler, policy, request(1, 40), every_step=False)
    del policy
    assert len(await whole(job)) == 40
    del job
    await scheduler.close()
    gc.collect()
    assert gone() is None


async def test_closing_ends_those_who_run_and_those_who_wait(policies: list[LoadedPolicy]) -> None:
    scheduler = Scheduler()
    jobs = [submitted(scheduler, policies[0], request(s, 400), every_step=False) for s in range(70)]
    await scheduler.close()
    assert {job.completion.finish_reason for job in jobs} == {"abort"}
    assert all(job.wake.is_set() for job in jobs)
