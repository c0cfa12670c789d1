"""Speed of answers with and without a grammar, side by side in one process.

    python -m benchmarks.grammar [--threads 1] [--turns 3] [--tokens 64]

Prints a Markdown table: tokens per second of processor time, which other programs hardly change, of
a running batch of free and of constrained rows in turns, for a model of the demo's size with 1,000
tokens and one of 25 million weights beside its embedding with 50,000 and with the 151,936 of Qwen's
models; and the time of a mask, of a schema's compilation and of the tokenizer's preparation. The
grammar is that of a tool call with a long text, so every answer has its full length. A
vocabulary is that of the most frequent pieces of the installed packages' code.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from babylon.serving.engine.answer_grammar import answer_grammar
from babylon.serving.engine.grammar import Grammars, mask
from babylon.serving.engine.running_batch import generate
from babylon.serving.engine.sampling import Request, Sampling
from babylon.serving.openai_wire import parse_chat

ROWS, PROMPT = (1, 32), range(5, 105)
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 9999}}}
SIZES = {
    1000: {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3},
    50_000: {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    151_936: {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
}
TEXT_BYTES = 80_000_000
END = "<|im_end|>"
_PIECE = re.compile(r" ?[A-Za-z0-9_]{2,16}| {2,16}|[!-/:-@]{2,6}")


def vocabulary_of(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of all bytes and the most frequent pieces of the installed packages' code.

    Raises:
        ValueError: there are too few pieces.
    """
    counts = Counter(piece for text in _texts() for piece in _PIECE.findall(text))
    letters = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces = (piece.replace(" ", "\u0120") for piece, _ in counts.most_common())
    names = list(dict.fromkeys([*letters, *pieces]))[:size]
    if len(names) < size:
        raise ValueError(f"{len(names)} pieces, not {size}: install more code")
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END
    )


def _texts() -> Iterator[str]:
    left = TEXT_BYTES
    for path in sorted(Path(torch.__file__).parents[1].glob("**/*.py")):
        yield (text := path.read_text(errors="replace"))
        if (left := left - len(text)) < 0:
            return


def grammar() -> str:
    function = {"name": "say", "parameters": TEXT | {"required": ["text"]}}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    written = answer_grammar(parse_chat(asked))
    assert written
    return written


def measure(vocabulary: int, turns: int, tokens: int) -> None:
    tokenizer, size = vocabulary_of(vocabulary), SIZES[vocabulary]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, **size}
    sizes["head_dim"] = size["hidden_size"] // 8
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes))
    model.eval()
    begun = time.process_time()
    grammars = Grammars(tokenizer, len(tokenizer), [0])
    built, begun = time.process_time() - begun, time.process_time()
    start = grammars.start(grammar())
    compiled = time.process_time() - begun
    sampling = Sampling(max_tokens=tokens)
    for rows in ROWS:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(turns + 1):
            for constrained, seen in rates.items():
                requests = [
                    Request(PROMPT, sampling, start.copy() if constrained else None)
                    for _ in range(rows)
                ]
                begun = time.process_time()
                done = generate(model, requests, eos_token_ids=(), pad_token_id=0)
                took = time.process_time() - begun
                assert {len(one.token_ids) for one in done} == {tokens}
                if turn:
                    seen.append(rows * tokens / took)
        free, with_grammar = median(rates[False]), median(rates[True])
        ratio = median(c / f for f, c in zip(rates[False], rates[True], strict=True))
        begun = time.process_time()
        for _ in range(20):
            mask(torch.zeros(rows, len(tokenizer)), {row: start.copy() for row in range(rows)})
        masked = (time.process_time() - begun) / 20
        print(
            f"| {size['hidden_size']} x {size['num_hidden_layers']} | {len(tokenizer):,} | {rows}"
            f" | {free:,.0f} | {with_grammar:,.0f}"
            f" | {ratio:.2f} | {1e3 * masked:.2f} | {1e3 * compiled:.0f} | {1e3 * built:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "| model | vocabulary | rows | free, tokens/s | constrained | ratio | mask, ms a step"
        " | schema, ms | first use, ms |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for vocabulary in options.vocabularies:
        measure(vocabulary, options.turns, options.tokens)


if __name__ == "__main__":
    main()
