"""Tokens of chats, and the embedded model's tokenizer, which is byte-level and takes any text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

# Keep the bars of models that are loaded and saved out of our standard error.
disable_progress_bar()  # type: ignore[no-untyped-call]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Tools stand before the messages, calls and results where Hermes and Qwen write them.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n"
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, names: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts. Digits and line breaks are never merged with other text.

    Merges can span words, so the fixed parts of prompts and replies become a few tokens. ``names``
    are not merged with other text either, so that a model can copy them.
    """
    apart = "|".join([r"\d+|\n|buy_|sell", *names])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(apart), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that does not keep the words that it has split.

    tokenizers 0.23 keeps 10,000 of them for each tokenizer and thread, as long as the thread lives.
    A process that loads a policy every hour would grow for ever.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        model: Any = tokenizer.backend_tokenizer.model
        if hasattr(model, "_resize_cache"):  # not those without such a cache
            model._resize_cache(0)
    return tokenizer


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[dict[str, object]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Messages, tools and variables → prompt tokens, by the tokenizer's chat template."""
    return cast(list[int], _rendered(tokenizer, messages, tools, variables, tokenize=True))


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[dict[str, object]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of ``render_prompt``, before it is encoded."""
    return cast(str, _rendered(tokenizer, messages, tools, variables, tokenize=False))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[dict[str, object]] | None,
    variables: Mapping[str, Any] | None,
    *,
    tokenize: bool,
) -> object:
    return tokenizer.apply_chat_template(
        cast(list[dict[str, str]], list(messages)),
        tools=[*tools] if tools else None,
        add_generation_prompt=True,
        tokenize=tokenize,
        return_dict=False,
        **(variables or {}),
    )


def decoder(path: Path | str) -> Callable[[Sequence[int]], str]:
    """Return a function: token ids → text with special tokens, by the tokenizer at ``path``."""
    tokenizer = load_tokenizer(path)
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def prompt_length(path: str | Path) -> Callable[[Sequence[Mapping[str, object]]], int]:
    """Return a function: messages → number of prompt tokens of the checkpoint at ``path``."""
    tokenizer = load_tokenizer(path)
    return lambda messages: len(render_prompt(tokenizer, messages))
