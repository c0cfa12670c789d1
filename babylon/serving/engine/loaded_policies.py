"""The policies that an engine holds: model, tokenizer and version under an immutable name.

A name never changes its meaning, so every answer can be attributed; a new version gets a new name.
An unloaded policy finishes the answers that it has begun.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from babylon.core.errors import ModelError
from babylon.core.learning_settings import Precision
from babylon.policies.load import load_policy, products
from babylon.policies.tokenizer import render_prompt, render_text
from babylon.serving.engine.grammar import Constraint, Grammars
from babylon.serving.engine.running_batch import generate
from babylon.serving.engine.sampling import Completion, Request, Sampling
from babylon.serving.engine.tool_calls import template_message
from babylon.serving.engine_protocol import name_taken
from babylon.serving.openai_wire import JsonObject, RequestError

Rendered = TypeVar("Rendered", list[int], str)
_PARAMETERS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedPolicy:
    """A loaded policy. ``context``: the most tokens of prompt and answer together.

    ``precision``: of the weights below an adapter, and so of the products in its passes.
    """

    name: str
    version: int
    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    eos_token_ids: frozenset[int]
    pad_token_id: int
    precision: Precision
    _token_texts: dict[int, str] = field(default_factory=dict)

    def prompt(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject] | None = None,
        variables: JsonObject | None = None,
    ) -> list[int]:
        """Encode messages and tools as prompt tokens by the chat template and its variables.

        Raises:
            RequestError: 400, a message is malformed, the template refuses it or has no tools, or a
                variable is none that a template may be given.
        """
        return self._rendered(render_prompt, messages, tools, variables)

    def prompt_text(
        self,
        messages: list[JsonObject],
        tools: list[JsonObject] | None = None,
        variables: JsonObject | None = None,
    ) -> str:
        """Return the text of a prompt, which takes a small part of the time; see ``prompt``."""
        return self._rendered(render_text, messages, tools, variables)

    def _rendered(
        self,
        render: Callable[..., Rendered],
        messages: list[JsonObject],
        tools: list[JsonObject] | None,
        variables: JsonObject | None,
    ) -> Rendered:
        if taken := _PARAMETERS.intersection(variables or {}):
            raise RequestError(400, f"chat_template_kwargs: leave out {', '.join(sorted(taken))}")
        plain = [template_message(message) for message in messages]
        template = str(self.tokenizer.chat_template)
        needed = {"tools": bool(tools), "tool_calls": any("tool_calls" in one for one in plain)}
        for word, used in needed.items():
            if used and word not in template:  # it would leave them out without a word
                raise RequestError(
                    400,
                    f"the chat template of {self.name!r} has no {word}: train a base with tools",
                )
        try:
            return render(self.tokenizer, plain, tools, variables)
        except Exception as error:  # a template is a program, which a client's values may break
            raise RequestError(
                400,
                f"the chat template refuses the messages: {error!s:.300}: change them, tools or"
                " chat_template_kwargs",
            ) from error

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests as one batch. Blocking.

        Raises:
            ModelError: its logits are not finite.
        """
        with products(self.model, self.precision):
            return generate(
                self.model,
                requests,
                eos_token_ids=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
            )

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the special tokens that the tokenizer puts before every text."""
        return list(self.tokenizer.encode(text))

    @cached_property
    def longest_token(self) -> int:
        """Most characters of one token."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return cast(int, self.model.get_input_embeddings().num_embeddings)

    def constraint(self, grammar: str) -> Constraint:
        """Return the start of a grammar in Lark's syntax.

        Raises:
            RequestError: 400, the grammar is invalid, or the tokenizer supports none.
        """
        return self._grammars.start(grammar)

    def prepare_grammars(self) -> None:
        """Do at load what would stop all answers at the first constrained call."""
        with suppress(RequestError):  # a tokenizer that takes no grammar: each such call says so
            _ = self._grammars

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocabulary, sorted(self.eos_token_ids))

    def decode(self, token_ids: list[int]) -> str:
        tokenizer: Any = self.tokenizer
        fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        if fast and not tokenizer.clean_up_tokenization_spaces:
            tokenizer = tokenizer.backend_tokenizer  # the same text, without a Python loop over ids
        return cast(str, tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Decode one token, special ones included, as ``logprobs`` shows it."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = cast(str, self.tokenizer.decode([token_id]))
        return self._token_texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in UTF-8, which may be a part of a character."""
        text = self.token_text(token_id)
        if "\ufffd" in text:
            with suppress(RequestError):  # a tokenizer of another kind
                return self._grammars.bytes_of(token_id)
        return text.encode()


class Policies:
    """The loaded policies by name."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedPolicy] = {}
        self._lock = asyncio.Lock()

    def __iter__(self) -> Iterator[LoadedPolicy]:
        return iter(self._loaded.values())

    def get(self, name: str) -> LoadedPolicy:
        try:
            return self._loaded[name]
        except KeyError:
            raise RequestError(
                404,
                f"model {name!r} is not loaded; loaded: {', '.join(self._loaded) or 'none'}",
                code="model_not_found",
            ) from None

    async def load(self, name: str, path: str, version: int) -> LoadedPolicy:
        """Load a checkpoint directory under a new name. The same again is a no-op.

        Raises:
            RequestError: 409, the name stands for another checkpoint.
            ModelError: the checkpoint does not load, or cannot answer.
        """
        async with self._lock:
            known = self._loaded.get(name)
            if known and (known.path, known.version) != (path, version):
                raise name_taken(name, known.version, known.path, path)
            if not known:
                known = await asyncio.to_thread(load, name, path, version)
                self._loaded[name] = known
            return known

    def unload(self, name: str) -> None:
        self.get(name)
        del self._loaded[name]


def load(name: str, path: str, version: int, precision: Precision = "fp32") -> LoadedPolicy:
    """Load a checkpoint directory, and draw one token from it.

    Raises:
        ModelError: the checkpoint does not load, or cannot answer.
    """
    model, tokenizer = load_policy(path, frozen=True, precision=precision)
    if not tokenizer.chat_template:
        raise ModelError(f"{path} has no chat template: save its tokenizer with one")
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        raise ModelError(
            f"{path} has no max_position_embeddings, which bounds the embedded engine's answers:"
            " serve it with ENGINE=vllm"
        )
    policy = LoadedPolicy(
        name=name,
        version=version,
        path=path,
        model=model,
        tokenizer=tokenizer,
        context=context,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id or 0,
        precision=precision,
    )
    # A checkpoint that cannot answer must fail to load.
    prompt = policy.prompt([{"role": "user", "content": "hello"}])
    policy.generate([Request(prompt, Sampling(max_tokens=1))])
    policy.prepare_grammars()
    return policy


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    config = model.generation_config
    given = config.eos_token_id if config else None
    ids = given if isinstance(given, list) else [given]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))
