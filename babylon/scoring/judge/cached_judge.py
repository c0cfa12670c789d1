"""Asking: a block's prompt → scores, from the cache or bought, kept before anything else happens.

A reply that cannot be used is sent back once with what is wrong. Then the block is split, because
fewer trajectories are easier; a block that cannot be split fails the stage. A score is never made
up. What failed is remembered like what succeeded, so that a repeated run does not buy it again.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from babylon.core.errors import ScoringError
from babylon.scoring.judge.budget import Budget
from babylon.scoring.judge.cached_judge import JudgmentCache
from babylon.scoring.judge.group_prompts import Block, GroupPrompts
from babylon.scoring.judge.judge_client import JudgeAnswer, JudgeClient, PromptTooLongError
from babylon.scoring.judge.judge_reply import JudgeReply, UnusableReplyError, parse_reply
from babylon.scoring.judge.prompt import SCHEMAS, Prompt, count_tokens, one_line, repair_messages
from babylon.store.judgments import Purchase, Spent

T = TypeVar("T")
_ANSWER_TOKENS = 50  # expected for each trajectory, and once more


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVerdict:
    """What the judge said of a block; ``scores`` and ``explanations`` in the block's order."""

    block: Block
    scores: tuple[float, ...]
    explanations: tuple[str, ...]


class CachedJudge:
    """One judge, its cache and its budget; counts what it buys."""

    def __init__(self, client: JudgeClient, cache: JudgmentCache, budget: Budget) -> None:
        self._client, self._cache, self._budget = client, cache, budget
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.usd = 0.0

    async def judge(
        self, sheet: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0
    ) -> list[BlockVerdict]:
        """All blocks, several at a time; every reply on its way is awaited and kept, whatever else
        fails. ``repeat`` tells apart prompts that are sent again on purpose.

        Raises:
            ScoringError: a block could not be judged.
            BudgetSpentError: the budget does not allow the next request.
        """
        verdicts = await await_all([self._block(sheet, block, repeat) for block in blocks])
        return [verdict for of_block in verdicts for verdict in of_block]

    async def cost(self, sheet: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0) -> Spent:
        """An upper estimate for the blocks that were not bought before."""
        total = Spent()
        for block in blocks:
            prompt = sheet.prompt(block, repeat)
            if await self._cache.find(self._key(prompt, repeat)) is None:
                one = self._estimate(prompt)
                total = Spent(tokens=total.tokens + one.tokens, usd=total.usd + one.usd)
        return total

    async def _block(self, sheet: GroupPrompts, block: Block, repeat: int) -> list[BlockVerdict]:
        prompt = sheet.prompt(block, repeat)
        halves = _split(block)
        known = await self._cache.find(self._key(prompt, repeat))
        if known is not None and known.problem is None:
            return [_verdict(block, known)]
        problem = known.problem if known is not None and halves else None
        if problem is None:
            try:
                return [_verdict(block, await self._buy(sheet, block, prompt, repeat))]
            except UnusableReplyError as error:
                problem = str(error)
        if not halves:
            names = ", ".join(sheet.shown[item].trajectory_id for item in block)
            raise ScoringError(
                f"judge {self._client.name} gave no usable judgment of {names} (scenario"
                f" {sheet.scenario_id}), not after a repair either: {problem}; what it judged"
                " before is kept: run the window again, or use another JUDGE_MODEL"
            )
        return [v for half in halves for v in await self._block(sheet, half, repeat)]

    async def _buy(
        self, sheet: GroupPrompts, block: Block, prompt: Prompt, repeat: int
    ) -> Purchase:
        """Ask, and once more where the reply cannot be used.

        Raises:
            UnusableReplyError: both replies cannot be used, or the prompt is too long.
        """
        draft = Purchase(
            key=self._key(prompt, repeat),
            scenario_id=sheet.scenario_id,
            judge=self._client.name,
            method=prompt.method,
            rubric=sheet.config.rubric.version,
            prompt_hash=prompt.hash,
            trajectory_ids=tuple(sheet.shown[item].trajectory_id for item in block),
        )
        messages = list(prompt.messages)
        limit = sheet.config.completion_tokens
        try:
            answer = await self._ask(messages, prompt, limit)
            try:
                return await self._keep(draft, answer, parse_reply(prompt, answer.text))
            except UnusableReplyError as error:
                messages = repair_messages(prompt, answer.text, str(error))
                problem = f"asked for a repair: {error}"
            # not under the block's key: a crash before the repair must not count as both failing
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
            cost = self._client.price.of(answer.prompt_tokens, answer.completion_tokens)
            reservation.cost = cost
        self.requests += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.usd += cost.usd
        return answer

    async def _keep(
        self, draft: Purchase, answer: JudgeAnswer, outcome: JudgeReply | str
    ) -> Purchase:
        usable = isinstance(outcome, JudgeReply)
        purchase = replace(
            draft,
            scores=outcome.scores if isinstance(outcome, JudgeReply) else (),
            explanations=outcome.explanations if isinstance(outcome, JudgeReply) else (),
            problem=None if usable else one_line(str(outcome)),
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
    """All at once; each runs to its end before the first error is raised, for it may be buying."""
    results = await asyncio.gather(*work, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


def _split(block: Block) -> list[Block]:
    """Two halves of at least two that share one trajectory; nothing where there are fewer than
    three."""
    if len(block) < 3:
        return []
    middle = len(block) // 2
    return [block[: middle + 1], block[middle:]]


def _verdict(block: Block, purchase: Purchase) -> BlockVerdict:
    return BlockVerdict(block=block, scores=purchase.scores, explanations=purchase.explanations)
