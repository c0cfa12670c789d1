"""A tiny random Qwen3 policy with a byte-level tokenizer and a chat template, on disk.

Bytes are tokens, so one character of a reply may span several of them. Different seeds give
policies that answer differently.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then ``<|pad|>``, ``<|im_start|>`` and ``<|im_end|>`` (end of sequence)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(seed: int, *, max_positions: int = 512) -> Qwen3ForCausalLM:
    """Random weights, scaled up so that the distribution is far from uniform."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(tiny_config(max_positions)).eval()


def tiny_config(max_positions: int, **changes: int) -> Qwen3Config:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        **(heads | changes),
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        initializer_range=0.2,
    )


def plain_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Logprobs ``[T]`` of a completion by one plain forward pass over the whole sequence."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].double()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def save_tiny_policy(directory: Path, seed: int) -> Path:
    """``save_pretrained`` of model and tokenizer; returns the directory."""
    tiny_model(seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
