"""The embedded model: tiny, trained from a seed to imitate scripted agents of mixed skill.

It has the Qwen3 architecture, a byte-level tokenizer of its own and a chat template. It is saved
with ``save_pretrained``, so transformers and vLLM load it like any other causal LM.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from babylon.game.market.levels import LEVELS
from babylon.game.market.scenario import HOUR, STARTER, Rules
from babylon.game.market.transcripts import HOUR_MIXTURE, Choices, scripted_chats, varied_choices
from babylon.game.market.words import TICKERS
from babylon.policies.tokenizer import render_prompt, train_tokenizer
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import Values

if TYPE_CHECKING:
    from babylon.training.base_model import EmbeddedModelRecipe, Progress

logger = logging.getLogger(__name__)
REPLIES = 8  # to each long prompt: they cost little, because the prompt is forwarded once
SHORT = [STARTER]
LONG = [LEVELS["L2"].rules(0), LEVELS["L1"].rules(0), LEVELS["L2"].rules(0), HOUR]
READERS = {"news": 1.0}
LONG_READERS = {"news": 0.4, "counter": 0.3, "mover": 0.3}
SHARPER = 1.5  # factor of its logits: in few steps it keeps a tenth of its mass on stray tokens
INITIALIZER_RANGE = 0.08  # with the usual 0.02, a model this narrow learns five times slower


def train_embedded_model(
    recipe: "EmbeddedModelRecipe", progress: "Progress | None"
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train tokenizer and model. ``progress`` gets the steps done and their number."""
    names = TICKERS if recipe.game == "hour" else ()
    tokenizer = train_tokenizer(_tokenizer_texts(recipe), recipe.vocab_size, names)
    return _imitate(_blank_model(recipe, tokenizer), tokenizer, recipe, progress), tokenizer


def _tokenizer_texts(recipe: "EmbeddedModelRecipe") -> Iterator[str]:
    if recipe.game == "starter":
        chats = scripted_chats(recipe.seed)
    else:
        both = zip(_choices(recipe, LONG, None), _choices(recipe, SHORT, None), strict=False)
        chats = (
            [*choices.prompt, {"role": "assistant", "content": choices.replies[0]}]
            for pair in both
            for choices in pair
        )
    for chat in itertools.islice(chats, recipe.tokenizer_chats):
        yield from (f"{message['role']}\n{message['content']}" for message in chat)


def _choices(
    recipe: "EmbeddedModelRecipe", worlds: Sequence[Rules], mixture: Mapping[str, float] | None
) -> Iterator[Choices]:
    return varied_choices(recipe.seed, worlds, REPLIES, mixture)


def _lessons(recipe: "EmbeddedModelRecipe") -> Iterator[Choices]:
    """Yield prompts with replies to imitate. For the hour, first short ones, last the mixture's.

    In the mixture a headline changes too few replies for a tiny model to learn to read them from
    long prompts. Where all teachers follow headlines, reading is most of what there is to learn.
    """
    if recipe.game == "starter":
        return (
            Choices(prompt, (reply["content"],)) for *prompt, reply in scripted_chats(recipe.seed)
        )
    short = recipe.short_steps * recipe.batch_size
    long = recipe.reading_steps * recipe.batch_size - short
    return itertools.chain(
        itertools.islice(_choices(recipe, SHORT, READERS), short),
        itertools.islice(_choices(recipe, LONG, LONG_READERS), long),
        _choices(recipe, LONG, HOUR_MIXTURE),
    )


def _blank_model(
    recipe: "EmbeddedModelRecipe", tokenizer: PreTrainedTokenizerFast
) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),  # can be less than recipe.vocab_size
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=1,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=8192,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: "EmbeddedModelRecipe",
    progress: "Progress | None",
) -> Qwen3ForCausalLM:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    gradients = _gradients(model, tokenizer, recipe)
    for step in range(recipe.steps):
        loss = next(gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(step + 1, recipe.steps)
    if recipe.game == "hour":
        model.model.norm.weight.data.mul_(SHARPER)
    logger.info("embedded model %s: final loss %.3f", recipe.name, loss)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _gradients(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: "EmbeddedModelRecipe"
) -> Iterator[float]:
    """Accumulate the gradient of a batch of replies, again and again, and yield their loss.

    Prompts share a prefix, which the trainer's tree forwards once.
    """
    lessons, forward = _lessons(recipe), PolicyForward(model)
    model.train()
    while True:
        calls = [
            CallTokens(
                prompt=render_prompt(tokenizer, choices.prompt),
                completion=[*tokenizer.encode(reply), tokenizer.eos_token_id],
                logprobs=None,
            )
            for choices in itertools.islice(lessons, recipe.batch_size)
            for reply in choices.replies
        ]
        tokens = sum(len(call.completion) for call in calls)
        losses: list[float] = []

        forward.accumulate(compile_tree(calls), partial(_loss, tokens, losses))
        yield sum(losses)


def _loss(tokens: int, noted: list[float], _: Sequence[int], values: Values) -> torch.Tensor:
    """Return a portion's part of the mean loss of a batch of ``tokens``, and note it."""
    mean = -values.logprobs.sum() / tokens
    noted.append(mean.item())
    return mean
