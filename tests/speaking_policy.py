"""A tiny policy that can say one letter only, so that every token of an answer names its policy."""

from pathlib import Path

import torch

from tests.tiny_policy import tiny_model, tiny_tokenizer

_LOUD = 6.0  # in units of the final hidden state, which is about 8: no other token is ever drawn


def save_speaking_policy(directory: Path, letter: str) -> Path:
    """The first hidden unit is the same after every token; the head makes ``letter`` of it."""
    model, tokenizer = tiny_model(0), tiny_tokenizer()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(letter), 0] = _LOUD
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
