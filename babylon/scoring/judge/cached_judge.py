"""The judge with its ledger: a block's scores are found there, or bought and stored.

An unusable reply is sent back once with its problem. A block without a usable reply is split, again
and again down to single trajectories: fewer are easier to judge, and the one that the server or the
model refuses is found. That one is lost, with a reason. A score is never invented. If requests stay
without an answer, a request without any trajectory tells whether the server or the block is to
blame. A judge whose replies are never usable fails the stage.

Every request is in the ledger before it is sent (``babylon.scoring.judge.budget``), so that no
reply is bought again, and none is forgotten in the account.
"""

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from random import random
from typing import Any, TypeVar

from babylon.core.errors import ScoringError
from babylon.quality.decode import Reason
from babylon.scoring.judge.budget import Budget, InFlight, JudgeLedger, plus
from babylon.scoring.judge.group_prompts import Block, GroupPrompts
from babylon.scoring.judge.judge_client import (
    JudgeAnswer,
    JudgeClient,
    PromptTooLongError,
    RequestRefusedError,
    RetryLaterError,
)
from babylon.scoring.judge.judgment import METHOD
from babylon.scoring.judge.pace import Pace
from babylon.scoring.judge.prompt import (
    SCHEMAS,
    Prompt,
    Schema,
    UnusableReplyError,
    count_tokens,
    parse_reply,
    repair_messages,
)
from babylon.store.judgments import Purchase, Spent

T = TypeVar("T")
Messages = Sequence[dict[str, str]]

RETRIES = 6
_ANSWER_TOKENS = 50  # expected in a reply for each trajectory, plus once for the frame
_MESSAGE_TOKENS = 16  # around a message, at most, in a server's chat template
_USELESS = 30  # unusable replies in a row that show that the judge is at fault
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 8.0
LONGEST_WAIT_S = 300.0  # by ``Retry-After``; the window's own time runs meanwhile
_PROBE = ({"role": "user", "content": "Answer with the JSON object {} alone."},)
_PROBE_TOKENS = 64
_UNANSWERED = "sent, and not answered"
_NO_ANSWER = "the judge's server gives no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVerdict:
    """The judge's ``scores`` and ``explanations`` of a block, in the block's order."""

    block: Block
    scores: tuple[float, ...]
    explanations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LostItem:
    """Reason why a trajectory cannot be judged. ``detail`` quotes nothing of it."""

    reason: Reason
    detail: str

    @property
    def stored(self) -> str:
        """The text under which the ledger keeps it."""
        return f"{self.reason}: {self.detail}"


@dataclass(slots=True)
class Verdicts:
    """The verdicts of several blocks, and the items that cannot be judged.

    ``wasted`` is the number of trajectories in prompts without a usable reply.
    """

    given: list[BlockVerdict] = field(default_factory=list)
    lost: dict[int, LostItem] = field(default_factory=dict)
    wasted: int = 0

    def add(self, other: "Verdicts") -> None:
        self.given += other.given
        self.lost |= other.lost
        self.wasted += other.wasted


class _FailedBlockError(Exception):
    """No usable judgment of a block. ``loss`` is the reason."""

    def __init__(self, loss: LostItem) -> None:
        super().__init__(loss.detail)
        self.loss = loss


class CachedJudge:
    """One judge with its ledger and its budget. Judges of one panel share ``in_flight``.

    ``bought`` is the cost of this run, and its ``requests`` are the replies.
    """

    def __init__(
        self,
        client: JudgeClient,
        ledger: JudgeLedger,
        budget: Budget,
        *,
        retries: int = RETRIES,
        pace: Pace | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        self._client, self._ledger, self._budget = client, ledger, budget
        self._retries, self._pace = retries, pace or Pace()
        self.bought = Spent()
        self._in_flight = in_flight or InFlight()
        self._useless = 0
        self._silent = ""  # the last failure of a server that answers nothing
        self._tried: set[str] = set()  # prompts that had no usable reply when they were needed
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def judge(
        self, group: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0
    ) -> Verdicts:
        """Judge all blocks, several at a time.

        ``repeat`` numbers deliberate repetitions of a prompt. If a block fails, the replies on
        their way are still awaited and stored.

        Raises:
            ScoringError: the judge cannot be asked, or never gives a usable reply.
            BudgetSpentError: the budget does not allow the next request.
        """
        verdicts = Verdicts()
        for part in await await_all([self._block(group, block, repeat) for block in blocks]):
            verdicts.add(part)
        # Parts of two failed blocks may be the same block, asked once.
        verdicts.given = list({verdict.block: verdict for verdict in verdicts.given}.values())
        return verdicts

    async def read(self, group: GroupPrompts, block: Block, *, repeat: int) -> BlockVerdict | None:
        """Judge one block whole. Return None if no reply about it can be used."""
        try:
            return _verdict(block, await self._purchase(group, block, repeat))
        except _FailedBlockError:
            return None

    async def fits(self, group: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0) -> bool:
        """Return True if the budget allows the expected cost of the blocks that are not stored."""
        return self._budget.fits(
            await self._ledger.spent(), await self.expected_cost(group, blocks, repeat=repeat)
        )

    async def require(self, work: Sequence[tuple[GroupPrompts, Sequence[Block]]]) -> None:
        """Check the expected cost of all blocks of all groups, beside other judges' requests.

        Raises:
            BudgetSpentError: it does not fit.
        """
        costs = [await self.expected_cost(group, blocks) for group, blocks in work]
        cost = reduce(plus, costs, Spent())

        async def check() -> None:
            self._budget.require(await self._ledger.spent(), cost)

        await self._in_flight.until_it_fits(check)

    async def expected_cost(
        self, group: GroupPrompts, blocks: Sequence[Block], *, repeat: int = 0
    ) -> Spent:
        """Return the cost of the blocks that are not stored: all expected, and one at its worst."""
        total, reserve = Spent(), Spent()
        for block in blocks:
            prompt = group.prompt(block, repeat)
            if await self._ledger.find(self._key(prompt, repeat)) is None:
                asked, written = _count(prompt.messages), _ANSWER_TOKENS * (1 + len(block))
                expected = self._client.price.of(asked, written)
                schema, limit = SCHEMAS[prompt.form], self._limit(group, prompt)
                worst = self._client.price.of(*_worst(prompt.messages, schema, limit))
                total = plus(total, expected)
                reserve = Spent(
                    tokens=max(reserve.tokens, worst.tokens - expected.tokens),
                    usd=max(reserve.usd, worst.usd - expected.usd),
                )
        return plus(total, reserve)

    async def forget_problems(self) -> None:
        """Let a later run ask again what had no usable reply, because the server is at fault."""
        await self._ledger.forget(self._tried)

    async def _block(self, group: GroupPrompts, block: Block, repeat: int) -> Verdicts:
        loss: LostItem
        try:
            return Verdicts([_verdict(block, await self._purchase(group, block, repeat))])
        except _FailedBlockError as error:
            loss = error.loss
        if len(block) == 1:
            return Verdicts(lost={block[0]: loss}, wasted=1)
        verdicts = Verdicts(wasted=len(block))
        for half in _split(block):
            # One after the other: what the first half lost does not spoil the second.
            rest = tuple(item for item in half if item not in verdicts.lost)
            if rest:
                verdicts.add(await self._block(group, rest, repeat))
        return verdicts

    async def _purchase(self, group: GroupPrompts, block: Block, repeat: int) -> Purchase:
        """Return the stored reply, or buy it.

        Raises:
            _FailedBlockError: no reply can be used.
        """
        prompt = group.prompt(block, repeat)
        key = self._key(prompt, repeat)
        async with self._locks[key]:
            known = await self._ledger.find(key)
            if known is not None and known.problem is None:
                return known
            tried = key in self._tried
            self._tried.add(key)
            if known is not None:
                loss = _remembered(known)
                # A single trajectory without a usable reply is asked again in a later run, but not
                # one without any answer: each of its attempts is charged at its worst case.
                later = loss.reason == Reason.NO_JUDGMENT and not loss.detail.startswith(_NO_ANSWER)
                if len(block) > 1 or not later or tried:
                    raise _FailedBlockError(loss)
            return await self._buy(group, block, prompt, repeat)

    async def _buy(
        self, group: GroupPrompts, block: Block, prompt: Prompt, repeat: int
    ) -> Purchase:
        """Ask the judge, and ask once more if the reply cannot be used."""
        draft = Purchase(
            key=self._key(prompt, repeat),
            scenario_id=group.scenario_id,
            judge=self._client.name,
            method=METHOD,
            rubric=group.config.rubric.version,
            prompt_hash=prompt.hash,
            trajectory_ids=tuple(group.shown[item].trajectory_id for item in block),
        )
        limit = self._limit(group, prompt)
        # Another key, because after a crash here the repair must still be asked for.
        sent_back = replace(draft, key=f"{draft.key}/repaired")
        answer, purchase = await self._ask(
            draft, prompt.messages, prompt, limit, lambda a: _read(prompt, a, draft, sent_back)
        )
        if purchase.problem is not None and purchase.key == sent_back.key:
            self._require_allowance(group, answer)
            self._count_useless(purchase.problem)
            said = "" if answer.cut else answer.text
            messages = repair_messages(prompt, said, _remembered(purchase).detail)
            answer, purchase = await self._ask(
                draft, messages, prompt, limit, lambda a: _read(prompt, a, draft, draft)
            )
        if purchase.problem is None:
            self._useless = 0
            return purchase
        self._count_useless(purchase.problem)
        raise _FailedBlockError(_remembered(purchase))

    def _require_allowance(self, group: GroupPrompts, answer: JudgeAnswer) -> None:
        if answer.cut and answer.thought and not group.config.reasoning_tokens:
            raise ScoringError(
                f"judge {self._client.name} thinks before it answers, and its reply ended after"
                f" {answer.completion_tokens} tokens: set JUDGE_REASONING_TOKENS to the tokens that"
                " its thoughts may take"
            )

    async def _ask(
        self,
        draft: Purchase,
        messages: Messages,
        prompt: Prompt,
        limit: int,
        read: Callable[[JudgeAnswer], Purchase],
    ) -> tuple[JudgeAnswer, Purchase]:
        """Send a request until it is answered, as many times as are allowed.

        Raises:
            _FailedBlockError: the server refuses the prompt, or answers only others.
            ScoringError: the server cannot be asked.
        """
        for attempt in range(self._retries + 1):
            try:
                return await self._send(draft, messages, SCHEMAS[prompt.form], limit, read)
            except RetryLaterError as error:
                failure = error
            except (PromptTooLongError, RequestRefusedError) as error:
                self._count_useless(str(error))
                raise _FailedBlockError(_loss(error)) from None
            wait_s = failure.after_s
            if wait_s is not None and wait_s > LONGEST_WAIT_S:  # a spent quota, and no burst
                raise self._client.failure(f"{failure}; it asks for a wait of {wait_s:.0f} s")
            if wait_s is None:
                longest_s = min(_BACKOFF_S * 2**attempt, _LONGEST_BACKOFF_S)
                wait_s = longest_s * (0.75 + random() / 4)
            if failure.limited:  # all requests wait, because the limit is one for all
                self._pace.hold(asyncio.get_running_loop().time() + wait_s)
            elif attempt < self._retries:
                await asyncio.sleep(wait_s)
        if failure.limited or not await self._server_answers(draft):
            self._silent = str(failure)
            raise self._client.failure(self._silent)
        loss = LostItem(Reason.NO_JUDGMENT, f"{_NO_ANSWER}: {failure}")
        # It costs nothing, so no budget forbids it. Without it a later run would ask all again.
        await self._ledger.enter(replace(draft, problem=loss.stored), Budget())
        raise _FailedBlockError(loss)

    async def _server_answers(self, draft: Purchase) -> bool:
        """Return True if the server answers a request without any trajectory."""
        draft = replace(draft, key="probe", prompt_hash="", trajectory_ids=())
        try:
            await self._send(draft, _PROBE, SCHEMAS["one"], _PROBE_TOKENS, lambda answer: draft)
        except RetryLaterError:
            return False
        except (PromptTooLongError, RequestRefusedError):
            pass
        return True

    async def _send(
        self,
        draft: Purchase,
        messages: Messages,
        schema: Schema,
        limit: int,
        read: Callable[[JudgeAnswer], Purchase],
    ) -> tuple[JudgeAnswer, Purchase]:
        """Enter one request into the ledger, send it, and settle the entry by its answer.

        Without an answer the entry stays as it is: the request is charged at its worst case.
        """
        sent = replace(draft, key=f"{draft.key}/sent", problem=_UNANSWERED)
        async with self._client.turn:
            if self._silent:  # the stage fails: no other block need wait as long for nothing
                raise self._client.failure(self._silent)
            await self._wait(messages)
            entry = self._priced(sent, *_worst(messages, schema, limit))
            number = await self._enter(entry)
            try:
                answer = await self._client.ask(messages, schema, max_tokens=limit)
                bought = replace(read(answer), cached_tokens=answer.cached_tokens)
                purchase = self._priced(bought, answer.prompt_tokens, answer.completion_tokens)
                await self._ledger.settle(number, purchase)
            except RetryLaterError as error:
                if error.charged:
                    self.bought = plus(self.bought, _cost(entry, requests=0))
                else:
                    await self._ledger.settle(number, replace(sent, problem=str(error)))
                raise
            except (PromptTooLongError, RequestRefusedError) as error:
                # Some providers charge a prompt that their filter refuses.
                paid = _count(messages) if isinstance(error, RequestRefusedError) else 0
                refused = self._priced(replace(draft, problem=_loss(error).stored), paid, 0)
                await self._ledger.settle(number, refused)
                self.bought = plus(self.bought, _cost(refused, requests=0))
                raise
            except ScoringError as error:
                await self._ledger.settle(number, replace(sent, problem=str(error)))
                raise
            finally:
                async with self._in_flight.settled:
                    self._in_flight.count -= 1
                    self._in_flight.settled.notify_all()
        self.bought = plus(self.bought, _cost(purchase, requests=1))
        return answer, purchase

    async def _wait(self, messages: Messages) -> None:
        loop = asyncio.get_running_loop()
        start = self._pace.start(loop.time(), _count(messages))
        while (left_s := max(start, self._pace.held_until) - loop.time()) > 0:
            await asyncio.sleep(left_s)

    async def _enter(self, entry: Purchase) -> int:
        """Enter a request at its worst case, if need be after those in flight are settled."""

        async def enter() -> int:
            number = await self._ledger.enter(entry, self._budget)
            self._in_flight.count += 1
            return number

        return await self._in_flight.until_it_fits(enter)

    def _count_useless(self, problem: str) -> None:
        self._useless += 1
        if self._useless >= _USELESS:
            raise self._client.failure(
                f"{_USELESS} replies in a row cannot be used, the last because of: {problem}"
            )

    def _priced(self, purchase: Purchase, asked: int, written: int) -> Purchase:
        usd = self._client.price.of(asked, written).usd
        return replace(purchase, prompt_tokens=asked, completion_tokens=written, usd=usd)

    def _limit(self, group: GroupPrompts, prompt: Prompt) -> int:
        return group.config.completion_tokens(len(prompt.labels))

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


def _read(prompt: Prompt, answer: JudgeAnswer, final: Purchase, sent_back: Purchase) -> Purchase:
    """Return the purchase of an answer: ``final``, or ``sent_back`` if a repair may help."""
    if answer.refused:
        return replace(final, problem=LostItem(Reason.JUDGE_REFUSED, "the judge declines").stored)
    if answer.cut:
        cut = LostItem(
            Reason.NO_JUDGMENT, f"it ended at its limit of {answer.completion_tokens} tokens"
        )
        return replace(sent_back, problem=cut.stored)
    try:
        reply = parse_reply(prompt, answer.text)
    except UnusableReplyError as error:
        return replace(sent_back, problem=LostItem(Reason.NO_JUDGMENT, str(error)).stored)
    return replace(final, scores=reply.scores, explanations=reply.explanations)


def _loss(error: PromptTooLongError | RequestRefusedError) -> LostItem:
    too_long = isinstance(error, PromptTooLongError)
    return LostItem(Reason.TOO_LONG_FOR_JUDGE if too_long else Reason.JUDGE_REFUSED, str(error))


def _remembered(purchase: Purchase) -> LostItem:
    """Return the loss that a stored problem names."""
    name, _, detail = (purchase.problem or "").partition(": ")
    known = name in (Reason.TOO_LONG_FOR_JUDGE, Reason.JUDGE_REFUSED, Reason.NO_JUDGMENT)
    return LostItem(Reason(name), detail) if known else LostItem(Reason.NO_JUDGMENT, name)


def _cost(purchase: Purchase, *, requests: int) -> Spent:
    tokens = purchase.prompt_tokens + purchase.completion_tokens
    return Spent(tokens=tokens, usd=purchase.usd, requests=requests)


def _count(messages: Messages) -> int:
    return sum(count_tokens(message["content"]) for message in messages)


def _worst(messages: Messages, schema: Schema, limit: int) -> tuple[int, int]:
    """Return the most tokens of prompt and reply. No token is shorter than one byte."""
    asked = sum(len(message["content"].encode()) + _MESSAGE_TOKENS for message in messages)
    return asked + len(json.dumps(schema)), limit


def _split(block: Block) -> list[Block]:
    """Return two halves that share one trajectory; of a pair, each by itself."""
    middle = len(block) // 2
    return [block[: middle + 1], block[middle:]] if len(block) > 2 else [(item,) for item in block]


def _verdict(block: Block, purchase: Purchase) -> BlockVerdict:
    return BlockVerdict(block=block, scores=purchase.scores, explanations=purchase.explanations)
