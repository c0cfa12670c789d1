"""Constrained decoding: the tokens that a grammar allows next, by llguidance.

https://github.com/guidance-ai/llguidance. A mask needs only the tokens drawn so far, so it is
computed while a GPU still works on the forward pass.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from babylon.serving.openai_wire import RequestError

_LIMITS = LLParserLimits(verbose_errors=False)  # errors without the grammar and the answer
_KEPT = 4
_made: dict[tuple[bytes, int, tuple[int, ...]], LLTokenizer] = {}
_BITS = 2 ** torch.arange(8, dtype=torch.uint8)


class Grammars:
    """Grammars over the tokens of one policy.

    Raises:
        RequestError: 400, the policy's tokenizer is of another kind.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_token_ids: Sequence[int]
    ) -> None:
        try:
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer")
            self._tokens = _prepared(tokenizer, vocabulary, eos_token_ids)
        except ValueError as error:
            raise RequestError(
                400, f"this policy's tokens take no grammar ({error}): ask for free text"
            ) from error

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        return self._tokens.decode_bytes([token_id])

    def start(self, grammar: str) -> "Constraint":
        """Return the state before the first token.

        Args:
            grammar: in llguidance's variant of Lark's syntax.

        Raises:
            RequestError: 400, the grammar, or a JSON schema in it, is invalid or not supported.
        """
        matcher = LLMatcher(
            self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS
        )
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0].rpartition("compile ")[2]
            raise RequestError(400, f"not supported: {reason:.300}: send another schema")
        started = Constraint(matcher)
        tried = started.copy()  # some grammars prove too complex only with the first token
        tried.advance(_lowest_bit(tried.bitmask()))
        if tried.problem:
            raise RequestError(400, f"not supported: {tried.problem}: send a smaller schema")
        return started


def _lowest_bit(bits: bytes) -> int:
    number = int.from_bytes(bits, "little")
    return (number & -number).bit_length() - 1


def _prepared(
    tokenizer: PreTrainedTokenizerFast, vocabulary: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """Return llguidance's tokenizer, one for all adapters of a base.

    To make it takes a second with a large vocabulary, in which no other thread runs.
    """
    written = sha256(tokenizer.backend_tokenizer.to_str().encode()).digest()
    key = (written, vocabulary, tuple(eos_token_ids))
    made = _made.get(key) or from_tokenizer(
        tokenizer, n_vocab=vocabulary, eos_token=list(eos_token_ids)
    )
    _made[key] = made
    if len(_made) > _KEPT:
        del _made[next(iter(_made))]
    return made


class Constraint:
    """A grammar, and how far one answer has come in it. ``problem``: why it cannot go on."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.problem: str | None = None

    def copy(self) -> "Constraint":
        """Return the same state for another answer."""
        return Constraint(self._matcher.deep_copy())

    def bitmask(self) -> bytes:
        """Return one bit per token, the lowest first: 1 if the token may come next."""
        return self._matcher.compute_bitmask()

    def advance(self, token_id: int) -> None:
        """Take an allowed token. Sets ``problem`` if the grammar has become too complex."""
        if not self._matcher.consume_token(token_id):
            self.problem = self._matcher.get_error().partition("\n")[0][:300]


def mask(logits: Tensor, constraints: Mapping[int, Constraint]) -> None:
    """Set the logits ``[B, V]`` of tokens that a row's grammar forbids to -inf, in place.

    Rows without a grammar are not touched.
    """
    bits = bytearray().join(one.bitmask() for one in constraints.values())
    packed = torch.frombuffer(bits, dtype=torch.uint8).view(len(constraints), -1, 1)
    allowed = (packed.to(logits.device) & _BITS.to(logits.device)).bool().flatten(1)
    rows = torch.tensor(list(constraints), device=logits.device)
    logits[rows] = logits[rows].masked_fill(~allowed[:, : logits.shape[-1]], float("-inf"))
