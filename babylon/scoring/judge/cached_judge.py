"""The judge with its cache: a block's scores are found in the cache, or bought and stored.

An unusable reply is sent back once with its problem. Then the block is split, because fewer
trajectories are easier to judge. A block that cannot be split fails the stage. A score is never
invented. Every reply is stored before anything else happens, unusable ones as well, so that a
repeated run does not buy it again.

The budget limits tokens and US dollars of a window and of a UTC day. Each request reserves an upper
estimate before it is sent, and settles its real cost afterwards. Requests in flight in other
processes do not count, so several processes may together exceed the day's limit by those requests.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from babylon.core.errors import ScoringError, WindowNotReadyError
from babylon.scoring.judge.group_prompts import Block, GroupPrompts
from babylon.scoring.judge.judge_client import JudgeAnswer, JudgeClient, PromptTooLongError
from babylon.scoring.judge.prompt import (
    SCHEMAS,
    JudgeReply,
    Prompt,
    UnusableReplyError,
    count_tokens,
    one_line,
    parse_reply,
    repair_messages,
)
from babylon.store.judgments import Purchase, Spent


class BudgetSpentError(WindowNotReadyError):
    """The judge's budget does not allow the next request.

    The window waits. A later run with more budget reuses the judgments that were bought.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Maximum tokens and US dollars. None means no limit."""

    tokens: int | None = None
    usd: float | None = None

    def allow(self, spent: Spent) -> bool:
        within_tokens = self.tokens is None or spent.tokens <= self.tokens
        return within_tokens and (self.usd is None or spent.usd <= self.usd)


@dataclass(slots=True)
class Reservation:
    """The reserved estimate. The caller replaces ``cost`` with the real cost."""

    cost: Spent


class Budget:
    """The budget of one window: limits of the window and the day, and the amounts spent before."""

    def __init__(
        self,
        window: BudgetLimits | None = None,
        day: BudgetLimits | None = None,
        *,
        spent_on_window: Spent | None = None,
        spent_today: Spent | None = None,
    ) -> None:
        self._limits = {"window": window or BudgetLimits(), "day": day or BudgetLimits()}
        self._before = {"window": spent_on_window or Spent(), "day": spent_today or Spent()}
        self.spent = Spent()  # in this run, reservations included

    def fits(self, cost: Spent) -> bool:
        """Return True if the cost stays within every limit."""
        return self._exceeded(cost) is None

    @contextmanager
    def reserve(self, estimate: Spent) -> Iterator[Reservation]:
        """Reserve an estimate while a request runs. The caller sets ``cost`` to the real cost.

        Raises:
            BudgetSpentError: the estimate does not fit.
        """
        if (limit := self._exceeded(estimate)) is not None:
            raise BudgetSpentError(
                f"the judge's budget of the {limit} is spent: {self._used(limit)}; the next request"
                f" costs up to {estimate.tokens} tokens and ${estimate.usd:.4f}; raise"
                f" JUDGE_{limit.upper()}_TOKENS or JUDGE_{limit.upper()}_USD, or wait"
            )
        reservation = Reservation(estimate)
        self.spent = plus(self.spent, estimate)
        try:
            yield reservation
        except BaseException:
            reservation.cost = Spent()
            raise
        finally:
            released = Spent(tokens=-estimate.tokens, usd=-estimate.usd)
            self.spent = plus(plus(self.spent, released), reservation.cost)

    def _exceeded(self, cost: Spent) -> str | None:
        for name, limits in self._limits.items():
            if not limits.allow(plus(plus(self._before[name], self.spent), cost)):
                return name
        return None

    def _used(self, name: str) -> str:
        limits, spent = self._limits[name], plus(self._before[name], self.spent)
        parts = [] if limits.tokens is None else [f"{spent.tokens} of {limits.tokens} tokens"]
        parts += [] if limits.usd is None else [f"${spent.usd:.4f} of ${limits.usd:g}"]
        return ", ".join(parts)


def plus(one: Spent, other: Spent) -> Spent:
    """Return the sum of tokens and US dollars."""
    return Spent(tokens=one.tokens + other.tokens, usd=one.usd + other.usd)


T = TypeVar("T")
_ANSWER_TOKENS = 50  # expected in a reply for each trajectory, plus once for the frame


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVerdict:
    """The judge's ``scores`` and ``explanations`` of a block, in the block's order."""

    block: Block
    scores: tuple[float, ...]
    explanations: tuple[str, ...]


class JudgmentCache(Protocol):
    """Store of bought judgments: such as ``babylon.store.judgments.StoredJudgments``."""

    async def find(self, key: str) -> Purchase | None: ...

    async def keep(self, purchase: Purchase) -> None: ...


class CachedJudge:
    """One judge with its cache and its budget. ``requests`` counts the replies that it buys."""

    def __init__(self, client: JudgeClient, cache: JudgmentCache, budget: Budget) -> None:
        self._client, self._cache, self._budget = client, cache, budget
        self.requests = 0

    async def judge(
        self, group: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0
    ) -> list[BlockVerdict]:
        """Judge all blocks, several at a time.

        ``repeat`` numbers deliberate repetitions of a prompt. If a block fails, the replies on
        their way are still awaited and stored.

        Raises:
            ScoringError: a block could not be judged.
            BudgetSpentError: the budget does not allow the next request.
        """
        verdicts = await await_all([self._block(group, block, repeat) for block in blocks])
        return [verdict for parts in verdicts for verdict in parts]

    async def cost(self, group: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0) -> Spent:
        """Return an upper estimate of the cost of the blocks that are not in the cache."""
        total = Spent()
        for block in blocks:
            prompt = group.prompt(block, repeat)
            if await self._cache.find(self._key(prompt, repeat)) is None:
                total = plus(total, self._estimate(prompt))
        return total

    async def _block(self, group: GroupPrompts, block: Block, repeat: int) -> list[BlockVerdict]:
        prompt = group.prompt(block, repeat)
        halves = _split(block)
        known = await self._cache.find(self._key(prompt, repeat))
        if known is not None and known.problem is None:
            return [_verdict(block, known)]
        problem = known.problem if known is not None and halves else None
        if problem is None:
            try:
                return [_verdict(block, await self._buy(group, block, prompt, repeat))]
            except UnusableReplyError as error:
                problem = str(error)
        if not halves:
            names = ", ".join(group.shown[item].trajectory_id for item in block)
            raise ScoringError(
                f"judge {self._client.name} gave no usable judgment of {names} (scenario"
                f" {group.scenario_id}), even after a repair: {problem}; earlier judgments are"
                " stored: run the window again, or use another JUDGE_MODEL"
            )
        return [v for half in halves for v in await self._block(group, half, repeat)]

    async def _buy(
        self, group: GroupPrompts, block: Block, prompt: Prompt, repeat: int
    ) -> Purchase:
        """Ask the judge, and ask once more if the reply cannot be used."""
        draft = Purchase(
            key=self._key(prompt, repeat),
            scenario_id=group.scenario_id,
            judge=self._client.name,
            method=prompt.method,
            rubric=group.config.rubric.version,
            prompt_hash=prompt.hash,
            trajectory_ids=tuple(group.shown[item].trajectory_id for item in block),
        )
        messages = list(prompt.messages)
        limit = group.config.completion_tokens
        try:
            answer = await self._ask(messages, prompt, limit)
            try:
                return await self._keep(draft, answer, parse_reply(prompt, answer.text))
            except UnusableReplyError as error:
                messages = repair_messages(prompt, answer.text, str(error))
                problem = f"asked for a repair: {error}"
            # Another key, because after a crash here the repair must still be asked for.
            await self._keep(replace(draft, key=f"{draft.key}/repaired"), answer, problem)
            answer = await self._ask(messages, prompt, limit)
        except PromptTooLongError as error:
            await self._cache.keep(replace(draft, problem=str(error)))
            raise UnusableReplyError(str(error)) from error
        try:
            return await self._keep(draft, answer, parse_reply(prompt, answer.text))
        except UnusableReplyError as error:
            await self._keep(draft, answer, str(error))
            raise

    async def _ask(
        self, messages: Sequence[dict[str, str]], prompt: Prompt, limit: int
    ) -> JudgeAnswer:
        with self._budget.reserve(self._estimate(prompt)) as reservation:
            answer = await self._client.ask(messages, SCHEMAS[prompt.method], max_tokens=limit)
            paid = (answer.prompt_tokens, answer.completion_tokens)
            reservation.cost = self._client.price.of(*paid)
        self.requests += 1
        return answer

    async def _keep(
        self, draft: Purchase, answer: JudgeAnswer, outcome: JudgeReply | str
    ) -> Purchase:
        if isinstance(outcome, JudgeReply):
            draft = replace(draft, scores=outcome.scores, explanations=outcome.explanations)
        else:
            draft = replace(draft, problem=one_line(outcome))
        purchase = replace(
            draft,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            usd=self._client.price.of(answer.prompt_tokens, answer.completion_tokens).usd,
        )
        await self._cache.keep(purchase)
        return purchase

    def _estimate(self, prompt: Prompt) -> Spent:
        asked = sum(count_tokens(message["content"]) for message in prompt.messages)
        return self._client.price.of(asked, _ANSWER_TOKENS * (1 + len(prompt.labels)))

    def _key(self, prompt: Prompt, repeat: int) -> str:
        parts = (self._client.name, str(self._client.temperature), prompt.hash, str(repeat))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


async def await_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once, each to its end before the first error, so that no bought reply is lost."""
    results = await asyncio.gather(*work, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


def _split(block: Block) -> list[Block]:
    """Return two halves that share one trajectory, or nothing for fewer than three items."""
    if len(block) < 3:
        return []
    middle = len(block) // 2
    return [block[: middle + 1], block[middle:]]


def _verdict(block: Block, purchase: Purchase) -> BlockVerdict:
    return BlockVerdict(block=block, scores=purchase.scores, explanations=purchase.explanations)
