import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import APIConnectionError, AsyncOpenAI, BadRequestError

from babylon.core.errors import ArenaError, ConfigError
from babylon.core.llm_calls import Message
from babylon.core.trajectories import Call, Trajectory
from babylon.evaluation.arena.confidence import paired_sequence
from babylon.evaluation.tasks import task_match
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore, load_evaluator
from babylon.evaluation.tasks.recorded_prompts import PROMPTS, RecordedPrompts
from babylon.evaluation.tasks.task_match import play_task
from babylon.evaluation.tasks.text_env import TextEnv

POLICY = Endpoint(client=AsyncOpenAI(api_key="none"), model="0.5")


class Coin:
    """A world is a number; a policy named 0.7 wins in 70 % of the worlds."""

    unit, lowest, highest = "wins", 0.0, 1.0

    def __init__(self) -> None:
        self.guardrails: Mapping[str, float] = {"refunds": 0.05}

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[str]:
        return [f"{seed}-{number}" for number in range(count)]

    async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
        chance, _, refunds = policy.model.partition("/")
        won = Random(world).random() < float(chance)
        refunded = Random(f"refunds {world}").random() < float(refunds or 0)
        return PlayScore(value=float(won), guardrails={"refunds": float(refunded)})


def named(model: str) -> Endpoint:
    return Endpoint(client=POLICY.client, model=model)


@pytest.mark.parametrize(
    ("challenger", "ruling", "reason"),
    [
        ("0.7", "promote", "is a gain"),
        ("0.3", "reject", "is a loss"),
        ("0.5", "insufficient", "insufficient evidence: wins: difference +0 ["),
        ("0.9/0.2", "reject", "refunds rose from 0 to 0."),
        ("0.9/0.11", "reject", "; the limit is 0.05 more"),  # it only seems so, to the last world
        ("0.9/0.03", "promote", "is a gain"),
    ],
)
async def test_a_task_promotes_gains_and_no_harms(
    challenger: str, ruling: str, reason: str
) -> None:
    coin = Coin()
    match = await play_task(coin, POLICY, named(challenger), coin.worlds("s", 512, []))
    assert match.ruling == ruling and reason in match.reason, match.reason


async def test_a_score_out_of_bounds_and_a_task_without_worlds_fail_the_gate() -> None:
    """The bound of the error rate rests on the bounds of the score."""
    coin = Coin()
    coin.highest = 0.5
    with pytest.raises(ArenaError, match=r"score 1\.0 is not between 0\.0 and 0\.5"):
        await play_task(coin, POLICY, named("0.9"), coin.worlds("s", 64, []))
    with pytest.raises(ArenaError, match="made no worlds"):
        await play_task(coin, POLICY, POLICY, [])


async def test_worlds_may_be_an_array() -> None:
    match = await play_task(Coin(), POLICY, POLICY, np.arange(64).astype(str))  # type: ignore[arg-type]
    assert len(match.champion) == 64


async def test_no_play_goes_on_once_one_has_failed() -> None:
    """Plays may call a paid judge, and the policies' engine is about to end."""
    begun: list[str] = []

    class Broken(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            begun.append(world)
            if len(begun) == 3:
                raise ArenaError("the judge is away")
            await asyncio.sleep(0)
            return await super().play(world, policy, seed)

    coin = Broken()
    with pytest.raises(ArenaError, match="the judge is away"):
        await play_task(coin, POLICY, POLICY, coin.worlds("s", 512, []))
    known = len(begun)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(begun) == known < 64


async def test_a_misspelt_harm_fails_the_gate() -> None:
    coin = Coin()
    coin.guardrails = {"refund": 0.05}
    with pytest.raises(
        ArenaError, match="reports refunds, but the evaluator's guardrails are refu"
    ):
        await play_task(coin, POLICY, named("0.9/0.2"), coin.worlds("s", 64, []))


@pytest.mark.parametrize("harm", [math.nan, math.inf, None])
async def test_a_harm_of_the_champion_that_is_no_number_rejects_no_challenger(harm: Any) -> None:
    class Odd(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            score = await super().play(world, policy, seed)
            return replace(score, guardrails={"refunds": harm}) if policy is POLICY else score

    with pytest.raises(ArenaError, match=f"world 0: the harm refunds is {harm}: report a number"):
        await play_task(Odd(), POLICY, named("0.9"), [f"s-{number}" for number in range(64)])


async def test_an_evaluator_that_exits_does_not_end_the_worker() -> None:
    class Exits(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            raise SystemExit(2)

    with pytest.raises(ArenaError, match=r"world 0: .* called sys\.exit: raise an error"):
        await play_task(Exits(), POLICY, POLICY, ["w"])
    with pytest.raises(ConfigError, match=r"SystemExit\(3\); give a class or function"):
        load_evaluator(f"{__name__}:exits")


async def test_an_error_of_a_play_names_its_world_and_no_value() -> None:
    class Breaks(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            if world == "s-7":
                raise KeyError("the right answer")
            return await super().play(world, policy, seed)

    with pytest.raises(ArenaError, match=r"^world 7: .* raised KeyError at \S+\.py:\d+") as raised:
        await play_task(Breaks(), POLICY, POLICY, [f"s-{number}" for number in range(64)])
    assert "right answer" not in str(raised.value)


async def test_an_evaluator_that_cancels_its_own_helper_does_not_cancel_the_run() -> None:
    class Cancels(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            helper = asyncio.ensure_future(asyncio.sleep(10))
            helper.cancel()
            await helper
            raise AssertionError

    with pytest.raises(ArenaError, match=r"world 0: .* awaited a task that was cancelled: catch"):
        await play_task(Cancels(), POLICY, POLICY, ["w"])


def exits() -> Coin:
    raise SystemExit(3)


async def test_a_bare_number_is_no_score() -> None:
    class Bare(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            return 1.0  # type: ignore[return-value]

    with pytest.raises(ArenaError, match=r"world 0: .* returned a float: return PlayScore\(value"):
        await play_task(Bare(), POLICY, POLICY, ["w"])


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (PlayScore(value=None), "score is a NoneType: give a float"),  # type: ignore[arg-type]
        (PlayScore(value="1"), "score is a str: give a float"),  # type: ignore[arg-type]
        (PlayScore(value=1.0, malformed=None), "its malformed a NoneType"),  # type: ignore[arg-type]
        (PlayScore(value=1.0, guardrails=[]), "guardrails are a list"),  # type: ignore[arg-type]
    ],
)
async def test_a_score_of_wrong_types_names_them(score: PlayScore, problem: str) -> None:
    class Odd(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            return score

    with pytest.raises(ArenaError, match=f"world 0: .*{problem}"):
        await play_task(Odd(), POLICY, POLICY, ["w"])


async def test_scores_without_a_sign_are_compared_as_numbers() -> None:
    class Bytes(Coin):
        highest = 255.0

        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            return PlayScore(value=np.uint8(200 if policy is POLICY else 199))  # type: ignore[arg-type]

    match = await play_task(Bytes(), POLICY, named("other"), [f"w{n}" for n in range(128)])
    assert match.difference.mean == -1 and match.ruling != "promote"


async def test_a_play_without_async_is_named() -> None:
    class Plain(Coin):
        def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:  # type: ignore[override]
            return PlayScore(value=1.0)

    with pytest.raises(ArenaError, match="play is no coroutine: write async def play"):
        await play_task(Plain(), POLICY, POLICY, ["w"])


@pytest.mark.parametrize("value", [math.nan, 1.5])
async def test_a_score_that_is_no_number_or_beyond_the_bounds_names_its_world(value: Any) -> None:
    class Odd(Coin):
        async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
            return PlayScore(value=value)

    with pytest.raises(ArenaError, match=f"world 0: the evaluator's score {value} is not between"):
        await play_task(Odd(), POLICY, POLICY, ["w"])


def test_an_evaluator_is_found_by_name_or_refused_with_the_reason() -> None:
    assert load_evaluator(f"{__name__}:Coin").unit == "wins"
    with pytest.raises(ConfigError, match="has no unit, lowest"):
        load_evaluator(f"{__name__}:POLICY")
    for name in ("nowhere.at_all:thing", ":thing"):
        with pytest.raises(ConfigError, match="importable from PYTHONPATH"):
            load_evaluator(name)
    for name in (f"{__name__}:PlayScore", f"{RecordedPrompts.__module__}:RecordedPrompts"):
        with pytest.raises(ConfigError, match=r"TypeError.*give a class or function without argu"):
            load_evaluator(name)


@pytest.mark.parametrize(
    "bounds",
    [(0.0, math.inf), (-math.inf, 1.0), (0.0, math.nan), (1.0, 1.0), (None, 1.0), ("0", "1")],
    ids=str,
)
def test_scores_without_bounds_are_refused(
    bounds: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bet has a size then: every gate would end with insufficient evidence."""
    monkeypatch.setattr(Coin, "lowest", bounds[0])
    monkeypatch.setattr(Coin, "highest", bounds[1])
    with pytest.raises(ConfigError, match=r"lowest .* and highest .* cut the scores to bounds"):
        load_evaluator(f"{__name__}:Coin")


@pytest.mark.parametrize(
    "limits", [["refunds"], {"refunds": math.nan}, {"refunds": "5 %"}], ids=str
)
def test_guardrails_without_limits_are_refused(
    limits: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited(Coin):
        def __init__(self) -> None:
            self.guardrails = limits  # type: ignore[assignment]

    monkeypatch.setitem(globals(), "limited", Limited())
    with pytest.raises(ConfigError, match=r"guardrails .*: map each harm's name to a number"):
        load_evaluator(f"{__name__}:limited")


PLAYED = {
    **{"trajectory_id": "t", "agent_id": "a", "window_id": "w", "scenario_id": "w"},
    **{"start": "2025-11-14T09:00:00Z", "end": "2025-11-14T10:00:00Z", "pnl_usd": 0.0},
    **{"wins": 0, "trades": 0, "actions": 1, "steps": 1},
    "calls": [
        {
            "step": 0,
            "messages": [{"role": "user", "content": "NVDA?"}],
            "response": "I do not know.",
            "temperature": 0.7,
            "tools": [{"type": "function", "function": {"name": "price"}}],
        }
    ],
}


class Guess(gymnasium.Env[str, str]):
    """The agent must repeat a number twice."""

    open = 0

    def __init__(self) -> None:
        Guess.open += 1

    def close(self) -> None:
        Guess.open -= 1

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict]:  # type: ignore[type-arg,override]
        self.left, self.told = 2, str((seed or 0) % 10)
        return self.told, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        self.left -= 1
        malformed = not action.isdigit()
        return (
            self.told,
            0.5 * (action == self.told),
            self.left == 0,
            False,
            {"malformed": malformed},
        )


async def test_a_text_environment_is_played_through_the_endpoint() -> None:
    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        said = asked["messages"][-1]["content"] if asked["model"] == "parrot" else "what?"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    evaluator = TextEnv(Guess, lowest=0.0, highest=1.0)
    async with (
        TestServer(app) as server,
        AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none", max_retries=0) as client,
    ):
        parrot, mute = (Endpoint(client=client, model=name) for name in ("parrot", "mute"))
        world = evaluator.worlds("s", 1, [])[0]
        assert await evaluator.play(world, parrot, 0) == PlayScore(value=1.0)
        assert await evaluator.play(world, mute, 0) == PlayScore(value=0.0, malformed=True)
    with pytest.raises(APIConnectionError):
        await evaluator.play(world, parrot, 0)
    assert Guess.open == 0


async def test_an_environment_with_dict_observations_is_told_to_turn_them_into_text() -> None:
    class Lights(Guess):
        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            return {"colour": "red"}, {}

    client = AsyncOpenAI(base_url="http://localhost:9", api_key="none", max_retries=0)
    async with client:
        policy = Endpoint(client=client, model="any")
        with pytest.raises(ArenaError, match="of Lights is a dict: turn it into text"):
            await TextEnv(Lights, lowest=0, highest=1).play(1, policy, 0)


async def test_a_prompt_that_fills_the_context_fails_no_gate() -> None:
    """Both policies leave out a recorded one; one that a policy filled itself ends its play."""
    said = "This model's maximum context length is 10 tokens. However, you requested 300 tokens."

    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        if len(asked["messages"]) > 1:
            error = {"message": said if asked["model"] == "long" else "no tools", "code": 400}
            return web.json_response({"error": error}, status=400)
        choice = {"index": 0, "message": {"role": "assistant", "content": "9"}}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice]})

    async def prefers(messages: Sequence[Message], reply: str, recorded: str) -> float:
        return float(reply == "9")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    user: Message = {"role": "user", "content": "?"}
    short, long = (
        Call(step=0, messages=(user,) * count, response="", temperature=1.0) for count in (1, 2)
    )
    prompts, game = RecordedPrompts(prefers), TextEnv(Guess, lowest=0.0, highest=1.0)
    async with (
        TestServer(app) as server,
        AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none", max_retries=0) as client,
    ):
        policy, other = (Endpoint(client=client, model=name) for name in ("long", "other"))
        assert await prompts.play([short, long], policy, 0) == PlayScore(value=1.0)
        assert await prompts.play([long], policy, 0) == PlayScore(value=0.0)
        assert (await game.play(1, policy, 0)).malformed
        with pytest.raises(BadRequestError, match="no tools"):
            await prompts.play([long], other, 0)
    assert Guess.open == 0


async def test_recorded_prompts_are_answered_anew_and_judged_beside_the_recorded_reply() -> None:
    tool = {"type": "function", "function": {"name": "price"}}
    made = {"id": "c", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    asked: list[dict[str, object]] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append(await request.json())
        message = {"role": "assistant", "content": None, "tool_calls": [made]}
        if asked[-1]["model"] == "mute":
            message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice]})

    async def prefers(messages: Sequence[Message], reply: str, recorded: str) -> float:
        assert (messages[0]["content"], recorded) == ("NVDA?", "I do not know.")
        return float(reply == "price({})")

    recorded = msgspec.convert(PLAYED, Trajectory)
    evaluator = RecordedPrompts(prefers)
    (world,) = evaluator.worlds("s", 5, [recorded])  # all that there are
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with (
        TestServer(app) as server,
        AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none") as client,
    ):
        caller, mute = (Endpoint(client=client, model=name) for name in ("caller", "mute"))
        assert await evaluator.play(world, caller, 7) == PlayScore(value=1.0)
        assert await evaluator.play(world, mute, 7) == PlayScore(value=0.0, malformed=True)
    assert asked[0]["tools"] == [tool] and asked[0]["temperature"] == 0.7


def test_recorded_prompts_of_one_scenario_are_one_piece_of_evidence() -> None:
    recorded = [
        msgspec.convert(PLAYED | {"scenario_id": f"s{number % 3}"}, Trajectory)
        for number in range(30)
    ]

    async def prefers(messages: Sequence[Message], reply: str, recorded: str) -> float:
        return 1.0

    worlds = RecordedPrompts(prefers).worlds("s", 99, recorded)
    assert [len(world) for world in worlds] == [PROMPTS] * 3
    assert len(RecordedPrompts(prefers).worlds("s", 2, recorded)) == 2


def test_a_harm_that_is_no_number_is_a_harm() -> None:
    fair, odd = (PlayScore(value=1.0, guardrails={"refunds": share}) for share in (0.0, math.nan))
    limits = {"refunds": 0.05}
    for budget in (64, None):
        assert task_match._harm(limits, [fair] * 2, [fair] * 2, budget) is None
        assert "refunds" in (task_match._harm(limits, [fair] * 2, [odd] * 2, budget) or "")


def test_a_harm_is_no_reason_to_reject_until_it_is_sure() -> None:
    fair, harmful = (PlayScore(value=1.0, malformed=bad) for bad in (False, True))
    before, after = [fair] * 64, [fair] * 61 + [harmful] * 3
    assert task_match._harm({}, before, after, 2048) is None
    assert "malformed" in (task_match._harm({}, before, after) or "")
    assert "malformed" in (task_match._harm({}, before * 16, after * 16, 2048) or "")


def test_one_world_shows_no_harm_surely() -> None:
    assert task_match._harm({}, [PlayScore(value=0.0)], [PlayScore(value=1.0)], 64) is None


def test_a_harm_at_its_limit_is_rarely_called_sure_at_any_of_32_looks() -> None:
    """An interval for one look condemns 15 % of these policies, whose refunds rise as allowed."""
    random, condemned = np.random.default_rng(0), 0
    for _ in range(400):
        before, after = (random.random(2048) < share for share in (0.10, 0.15))
        looks = (paired_sequence(before[:n], after[:n], 2048).low for n in range(64, 2049, 64))
        condemned += max(looks) > 0.05
    assert condemned <= 0.025 * 400
