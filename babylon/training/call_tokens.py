"""Tokens of logged calls, and the reasons why a call cannot be trained."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from babylon.core.llm_calls import Message
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.tokenizer import render_prompt
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.teacher_prompt import teacher_prompt
from babylon.training.update_result import Excluded

log = logging.getLogger(__name__)
NO_WORDS: Mapping[tuple[str, int], str] = {}
_TRUNCATING = ("top_p", "top_k", "min_p")  # the gateway's names
_CUT = -9999.0  # nats: engines' minus infinity, which JSON lacks
COLDEST = 0.01  # temperature, as at the gateway: a colder gradient would drown all others


def sampling_obstacle(call: Call) -> str | None:
    """The field of ``Excluded`` that counts this call, or None.

    None means: the reply was sampled from the policy's whole distribution and nothing else.
    """
    if call.temperature < COLDEST:
        return "greedy"
    if call.top_p < 1 or any(cut in (call.untrainable or "") for cut in _TRUNCATING):
        return "truncated"
    if call.untrainable is not None or min(call.logprobs or (0.0,)) <= _CUT:
        return "untrainable"
    return None


def exact_tokens(call: Call) -> CallTokens | None:
    """The call's tokens if they and their behaviour logprobs are known exactly, else None."""
    if sampling_obstacle(call) or call.logprobs is None:
        return None
    if not call.prompt_token_ids or not call.completion_token_ids:
        return None
    return _call_tokens(call, call.prompt_token_ids, call.completion_token_ids)


def scored_trajectories(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TrainingRow],
    context: int,
    vocabulary: int | None = None,
    words: Mapping[tuple[str, int], str] = NO_WORDS,
) -> tuple[list[ScoredTrajectory], Excluded]:
    """Trajectories with the tokens of their trainable calls, and the number of other calls.

    Tokens are the logged ones where they are known. Otherwise the logged text is tokenised by the
    chat template.

    Args:
        context: longest call in tokens.
        vocabulary: token ids of the model. A call with another id is of another model.
        words: (trajectory id, place of the call) → feedback for the teacher of self-distillation.
    """
    counts = dict.fromkeys(Excluded.__slots__, 0)
    trajectories = []
    for row in rows:
        calls = []
        for place, call in enumerate(row.calls):
            tokens = _tokens(tokenizer, call, context)
            if isinstance(tokens, CallTokens):
                if vocabulary and not within(tokens, vocabulary):
                    counts["unknown_tokens"] += 1
                    continue
                if told := words.get((row.trajectory_id, place)):
                    room = context - len(tokens.completion)
                    hindsight = teacher_prompt(tokenizer, call, tokens.prompt, told, room)
                    tokens = replace(tokens, hindsight=hindsight)
                calls.append(tokens)
            else:
                counts[tokens] += 1
        # No token could carry its advantage, so it is left out of its group's baseline too.
        if calls:
            trajectories.append(
                ScoredTrajectory(
                    trajectory_id=row.trajectory_id,
                    group=row.scenario_id,
                    score=row.score,
                    calls=calls,
                    rewards=row.rewards,
                )
            )
    return trajectories, Excluded(**counts)


def log_left_out(calls: int, excluded: Excluded) -> None:
    """Log how many of the calls were left out, and why."""
    counts = {reason: count for reason, count in asdict(excluded).items() if count}
    if counts:
        told = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        log.warning("left out: %d of %d calls (%s)", sum(counts.values()), calls, told)


def _tokens(tokenizer: PreTrainedTokenizerBase, call: Call, context: int) -> CallTokens | str:
    """The call's tokens, or the field of ``Excluded`` that counts the call."""
    if reason := sampling_obstacle(call):
        return reason
    if call.prompt_token_ids is not None and call.completion_token_ids is not None:
        prompt, completion = call.prompt_token_ids, call.completion_token_ids
    elif call.tools or call.tool_calls or not all(map(_is_plain, call.messages)):
        return "untrainable"  # only the engine knows how it wrote tools and parts as tokens
    else:
        try:
            prompt, completion = _retokenize(tokenizer, call)
        except (TemplateError, TypeError):  # roles or an order that this model does not know
            return "untrainable"
    if not prompt or not completion:
        return "empty"
    if len(prompt) + len(completion) > context:
        return "too_long"
    return _call_tokens(call, prompt, completion)


def within(call: CallTokens, vocabulary: int) -> bool:
    """True if all of the call's tokens are the model's. Others are of another model."""
    ids = *call.prompt, *call.completion
    return min(ids) >= 0 and max(ids) < vocabulary


def _call_tokens(call: Call, prompt: Sequence[int], completion: Sequence[int]) -> CallTokens:
    return CallTokens(
        prompt=prompt,
        completion=completion,
        logprobs=call.logprobs,
        temperature=call.temperature,
        policy_version=call.policy_version,
        step=call.step,
    )


def _is_plain(message: Message) -> bool:
    return isinstance(message.get("content"), str) and "tool_calls" not in message


def _retokenize(
    tokenizer: PreTrainedTokenizerBase, call: Call
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt = render_prompt(tokenizer, call.messages)
    reply = tokenizer.encode(call.response, add_special_tokens=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(prompt), (*reply, *end)
