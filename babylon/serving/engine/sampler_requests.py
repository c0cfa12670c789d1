"""The sampler's requests for a chat or a completion: one for each choice."""

from dataclasses import replace

import msgspec

from babylon.serving.engine.grammar import Constraint
from babylon.serving.engine.loaded_policies import LoadedPolicy
from babylon.serving.engine.sampling import Request, Sampling
from babylon.serving.openai_wire import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    SamplingRequest,
)

CHAT_TOKENS = 1024  # if the client sets no limit: an endless answer would keep its batch row
COMPLETION_TOKENS = 16  # OpenAI's default


def chat_requests(
    policy: LoadedPolicy, chat: ChatRequest, constraint: Constraint | None = None
) -> list[Request]:
    """Return the sampler's requests for a chat.

    Raises:
        RequestError: 400, it does not fit into the policy's context, or a message is malformed.
    """
    return _requests(policy, prompt_of(policy, chat), chat, CHAT_TOKENS, constraint)


def prompt_of(policy: LoadedPolicy, chat: ChatRequest) -> list[int]:
    """Return the prompt's tokens.

    Raises:
        RequestError: 400, the chat template does not take the chat, or the prompt cannot fit.
    """
    sent = chat.messages, chat.usable_tools, chat.chat_template_kwargs
    # Tools, calls and variables are written too. Few chats are so long that it is worth a look.
    if len(msgspec.json.encode(sent)) > _most_characters(policy):
        _check_size(policy, len(policy.prompt_text(*sent)))
    return policy.prompt(*sent)


def _most_characters(policy: LoadedPolicy) -> int:
    return policy.context * policy.longest_token


def _check_size(policy: LoadedPolicy, characters: int) -> None:
    """Refuse a text that cannot fit before it is encoded, which may take seconds.

    Raises:
        RequestError: 400, it has more characters than any tokens that fit.
    """
    if characters > _most_characters(policy):
        raise RequestError(
            400,
            f"a prompt of {characters} characters does not fit into the context of"
            f" {policy.name!r}, {policy.context} tokens: send less",
            code="context_length_exceeded",
        )


def completion_requests(policy: LoadedPolicy, asked: CompletionRequest) -> list[Request]:
    """Return the sampler's requests for a completion: ``n`` for the first prompt, and so on.

    Raises:
        RequestError: 400, a prompt is empty, has unknown tokens or does not fit.
    """
    requests = list[Request]()
    _check_size(policy, max(len(prompt) for prompt in asked.prompts))
    for prompt in asked.prompts:
        ids = policy.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError(400, "the prompt has no tokens: send at least one")
        requests += _requests(policy, ids, asked, COMPLETION_TOKENS)
    return requests


def _requests(
    policy: LoadedPolicy,
    prompt: list[int],
    asked: SamplingRequest,
    usual_limit: int,
    constraint: Constraint | None = None,
) -> list[Request]:
    if max(prompt) >= policy.vocabulary:  # a tokenizer may have more words than the model
        raise RequestError(
            400,
            f"prompt token {max(prompt)} is outside the vocabulary of {policy.name!r}"
            f" ({policy.vocabulary} tokens): send ids of its own tokenizer, and no text of that"
            " token",
        )
    room = policy.context - len(prompt)
    if room < (asked.limit or 1):
        limit = "" if asked.limit is None else f" and max_tokens={asked.limit}"
        raise RequestError(
            400,
            f"a prompt of {len(prompt)} tokens{limit} does not fit into the context of"
            f" {policy.name!r}, {policy.context} tokens: send less",
            code="context_length_exceeded",
        )
    sampling = Sampling(
        max_tokens=asked.limit or min(room, usual_limit),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=asked.seed,
        top_logprobs=asked.likeliest,
    )
    first = Request(prompt, sampling, constraint)
    # One seed would give the same answer n times. The first choice is that of n=1, as in vLLM.
    return [first] + [
        replace(
            first,
            sampling=replace(sampling, seed=None if asked.seed is None else asked.seed + index),
            constraint=constraint and constraint.copy(),
        )
        for index in range(1, asked.n or 1)
    ]
