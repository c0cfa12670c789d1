"""A tiny policy whose replies are whole decisions, one token each, all equally likely."""

from pathlib import Path

import torch

from tests.tiny_policy import tiny_model, tiny_tokenizer

DECISIONS = (
    '{"action":"hold"}',
    '{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_yes","amount":50}}',
    '{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_no","amount":50}}',
)
_LOUD = 4.0


def save_deciding_policy(directory: Path) -> Path:
    """After every token a decision or the end comes next, each with about a quarter of the mass.

    Other hidden units tell them apart a little, so that training can prefer one.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(DECISIONS))
    model = tiny_model(0, vocab_size=len(tokenizer), max_position_embeddings=4096)
    said = [*tokenizer.convert_tokens_to_ids(list(DECISIONS)), tokenizer.eos_token_id]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[said, 1:] = 0.1 * torch.randn(len(said), model.config.hidden_size - 1)
        model.lm_head.weight[said, 0] = _LOUD
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
