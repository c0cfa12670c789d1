"""The model that training starts from: ``BASE_MODEL``, or a tiny one made from a seed.

The tiny one is the embedded model. This module imports torch only when it makes or loads a model:
a base model that exists is found at once.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from babylon.core.errors import ModelError
from babylon.policies.checkpoint_files import local_directory

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModelRecipe:
    """Every input of the embedded model. Different recipes have different names."""

    seed: int = 0
    vocab_size: int = 1024
    hidden_size: int = 96
    layers: int = 3
    heads: int = 3
    steps: int = 450
    batch_size: int = 32
    learning_rate: float = 3e-3
    tokenizer_chats: int = 2000

    @property
    def name(self) -> str:
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:6]
        return f"embedded-{self.hidden_size}x{self.layers}-seed{self.seed}-{digest}"


def resolve_base(
    name: str | None, models: Path, seed: int, progress: Progress | None = None
) -> Path | str:
    """The base model ``name`` (local path or hub id), or else the embedded model of a seed.

    Args:
        name: ``BASE_MODEL``.
        models: directory of embedded models. A missing one is made.
        seed: of the embedded model.

    Raises:
        ModelError: ``BASE_MODEL`` does not load, or it has no chat template.
    """
    if name:
        local = local_directory(name)
        base = local.resolve() if local else name
        _check_base(base, name)
        return base
    return make_embedded_model(EmbeddedModelRecipe(seed=seed), models, progress=progress)


def _check_base(base: Path | str, name: str) -> None:
    """Load the base model once, so that a bad one fails here and not in engine or trainer."""
    from babylon.policies.load import load_policy

    remedy = "BASE_MODEL names a directory that save_pretrained wrote, or a Hugging Face model id"
    try:
        _, tokenizer = load_policy(base)
    except ModelError as error:
        raise ModelError(f"BASE_MODEL={name!r}: {error}: {remedy}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"BASE_MODEL={name!r} has no chat template: use an instruct model")


def make_embedded_model(
    recipe: EmbeddedModelRecipe, directory: Path, *, progress: Progress | None = None
) -> Path:
    """Train and save the embedded model, or return its directory if it exists."""
    target = directory / recipe.name
    if target.exists():
        return target
    from babylon.training.embedded_model import train_embedded_model

    model, tokenizer = train_embedded_model(recipe, progress)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=directory, prefix=f".{recipe.name}-"))
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        os.rename(temporary, target)
    except OSError:  # another process has made the same model
        if not target.exists():
            raise
        shutil.rmtree(temporary)
    return target
