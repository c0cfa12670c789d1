"""The model that training starts from: ``BASE_MODEL``, or a tiny one made from a seed.

The tiny one is the embedded model. This module imports torch only when it makes or loads a model:
a base model that exists is found at once.
"""

import asyncio
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from babylon.core.errors import ModelError
from babylon.core.home import make_home, sync
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
    game: Literal["starter", "hour"] = field(default="starter", repr=False)  # in the name itself
    # Of the steps, the first with teachers who follow every headline, and of these the first with
    # short prompts. A model without such lessons keeps the name that it had before there were any.
    reading_steps: int = field(default=0, repr=False)
    short_steps: int = field(default=0, repr=False)
    edition: int = field(default=0, repr=False)  # of prompts and teachers: of the frozen suite

    @property
    def name(self) -> str:
        lessons = (self.reading_steps, self.short_steps, self.edition)
        inputs = repr(self) + (repr(lessons) if any(lessons) else "")
        digest = hashlib.sha256(inputs.encode()).hexdigest()[:6]
        game = "" if self.game == "starter" else f"-{self.game}"
        return f"embedded{game}-{self.hidden_size}x{self.layers}-seed{self.seed}-{digest}"


EMBEDDED = "embedded:"
RECIPES: dict[str, Callable[[int], EmbeddedModelRecipe]] = {
    "starter": lambda seed: EmbeddedModelRecipe(seed=seed),
    "hour": lambda seed: EmbeddedModelRecipe(
        seed=seed,
        game="hour",
        vocab_size=2048,
        steps=850,
        short_steps=200,
        reading_steps=650,
        tokenizer_chats=1000,
        edition=6,
    ),
}
"""Recipes by the game whose prompts the model knows: ``BASE_MODEL=embedded:hour``."""


def resolve_base(
    name: str | None, models: Path, seed: int, progress: Progress | None = None
) -> Path | str:
    """The base model ``name``, or else the embedded model of a seed that knows the small game.

    Args:
        name: ``BASE_MODEL``: a local path, a hub id, or ``embedded:`` and the name of a game.
        models: directory of embedded models. A missing one is made.
        seed: of the embedded model.

    Raises:
        ModelError: ``BASE_MODEL`` does not load, it has no chat template, or no such game exists.
    """
    if name and f"{name}:".startswith(EMBEDDED) and local_directory(name) is None:
        recipe = RECIPES.get(game := name[len(EMBEDDED) :])
        if recipe is None:
            known = " or ".join(f"{EMBEDDED}{one}" for one in RECIPES)
            raise ModelError(f"BASE_MODEL={name!r}: no game {game!r}: choose {known}")
        return make_embedded_model(recipe(seed), models, progress=progress)
    if name:
        local = local_directory(name)
        base = local.resolve() if local else name
        _check_base(base, name)
        return base
    return make_embedded_model(RECIPES["starter"](seed), models, progress=progress)


async def resolve_base_in_a_thread(
    name: str | None, models: Path, seed: int, progress: Progress | None = None
) -> Path | str:
    """``resolve_base``, which stops making a model at its next step when this is cancelled.

    Otherwise a command that got SIGTERM would wait for the model, which takes a minute.
    """
    cancelled = threading.Event()

    def note(done: int, steps: int) -> None:
        if cancelled.is_set():
            raise ModelError(f"stopped after {done} of {steps} steps")  # nobody awaits it
        if progress is not None:
            progress(done, steps)

    try:
        return await asyncio.to_thread(resolve_base, name, models, seed, note)
    except asyncio.CancelledError:
        cancelled.set()
        raise


def _check_base(base: Path | str, name: str) -> None:
    """Load the base model once, so that a bad one fails here and not in engine or trainer."""
    from babylon.policies.load import load_policy

    remedy = "BASE_MODEL names a directory that save_pretrained wrote, or a Hugging Face model id"
    try:
        _, tokenizer = load_policy(base, precision="bf16", device="cpu")
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
    from babylon.policies.durable import written
    from babylon.training.embedded_model import train_embedded_model

    model, tokenizer = train_embedded_model(recipe, progress)
    make_home(directory.parent)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=directory, prefix=f".{recipe.name}-"))
    with written(temporary):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
    try:
        os.rename(temporary, target)
    except OSError:  # another process has made the same model
        if not target.exists():
            raise
        shutil.rmtree(temporary)
    return target
