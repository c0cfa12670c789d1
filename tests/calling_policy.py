"""A tiny policy that calls a tool, speaks and stops, each by chance: an agent with tools.

One token is a whole tool call and another a whole reply, so that answers are short and varied.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from babylon.policies.tokenizer import CHAT_TEMPLATE
from tests.tiny_policy import tiny_model, tiny_tokenizer

CALL = '<tool_call>\n{"name": "price", "arguments": {"ticker": "NVDA"}}\n</tool_call>'
SAY = "BUY NVDA"
END = "<|im_end|>"
_FIRST = {CALL: 0.7, SAY: 0.3}
_LATER = {CALL: 0.2, SAY: 0.2, END: 0.6}
_NEVER = -20.0  # log chance of all other tokens


def save_calling_policy(
    directory: Path,
    first: Mapping[str, float] = _FIRST,
    later: Mapping[str, float] = _LATER,
    context: int = 2048,
) -> Path:
    """The second hidden unit tells whether a call or a reply came last; the head does the rest.

    ``first`` and ``later`` are the chances of each call and reply, and of the end.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([*first])
    tokenizer.chat_template = CHAT_TEMPLATE
    said = tokenizer.convert_tokens_to_ids([*first])
    # vLLM on a CPU has no kernel for heads of 16
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": context, "head_dim": 32}
    model = tiny_model(0, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.model.embed_tokens.weight[said, 1] = 10.0
        model.model.norm.weight.fill_(1.0)
        states = model.model(torch.tensor([[0, said[0]]])).last_hidden_state[0, :, :2]
        logits = torch.full((2, len(tokenizer)), _NEVER)  # at first, and after a call or a reply
        for row, chances in enumerate((first, later)):
            for text, chance in chances.items():
                logits[row, tokenizer.convert_tokens_to_ids(text)] = math.log(chance)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :2] = torch.linalg.solve(states, logits).T
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
