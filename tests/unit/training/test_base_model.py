import asyncio
import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from babylon.core.errors import ModelError
from babylon.evaluation.arena.suite import SUITES
from babylon.game.market.scenario import HOUR
from babylon.game.market.transcripts import varied_choices
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.training.base_model import (
    RECIPES,
    EmbeddedModelRecipe,
    make_embedded_model,
    resolve_base,
    resolve_base_in_a_thread,
)

QUICK = EmbeddedModelRecipe(seed=3, steps=2, tokenizer_chats=200)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedded_model(QUICK, tmp_path_factory.mktemp("models"))


def test_the_embedded_model_loads_like_any_causal_lm(embedded: Path) -> None:
    model, tokenizer = load_policy(embedded)
    assert model.config.model_type == "qwen3"
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "News on m1: a leak says yes."}])
    logits = model(input_ids=torch.tensor([prompt])).logits
    assert logits.shape == (1, len(prompt), len(tokenizer))
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize("text", ["m1 buys $150.", "déjà vu – 市場 🚀", "\x00\n\t", ""])
def test_the_tokenizer_takes_any_text_and_gives_it_back(embedded: Path, text: str) -> None:
    _, tokenizer = load_policy(embedded)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_marks_who_speaks(embedded: Path) -> None:
    _, tokenizer = load_policy(embedded)
    rendered = tokenizer.decode(
        render_prompt(
            tokenizer, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        )
    )
    assert rendered == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_same_seed_makes_the_same_model(embedded: Path, tmp_path: Path) -> None:
    again = make_embedded_model(QUICK, tmp_path)
    weights = [(path / "model.safetensors").read_bytes() for path in (embedded, again)]
    assert weights[0] == weights[1]
    assert (embedded / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_a_made_model_is_not_made_again(embedded: Path) -> None:
    before = (embedded / "model.safetensors").stat().st_mtime_ns
    assert make_embedded_model(QUICK, embedded.parent) == embedded
    assert (embedded / "model.safetensors").stat().st_mtime_ns == before


def test_a_full_disk_leaves_no_part_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt would leave another one, and keep the disk full."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        make_embedded_model(QUICK, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_recipe_is_another_model() -> None:
    fields = [field.name for field in dataclasses.fields(QUICK)]
    others = [dataclasses.replace(QUICK, **{name: 7}) for name in fields]
    assert len({QUICK.name, *(other.name for other in others)}) == 1 + len(fields)


def test_a_game_has_an_embedded_model_of_its_own_and_an_unknown_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataclasses.replace(RECIPES["hour"](3), steps=1, tokenizer_chats=100)
    monkeypatch.setitem(RECIPES, "hour", lambda seed: dataclasses.replace(quick, seed=seed))
    made = Path(resolve_base("embedded:hour", tmp_path, 3))
    assert made.name.startswith("embedded-hour-96x3-seed3-")
    _, tokenizer = load_policy(made)
    prompt = next(varied_choices(3, [HOUR], 1)).prompt
    short = len(render_prompt(tokenizer, prompt))
    assert short < len(prompt[0]["content"] + prompt[1]["content"]) / 3  # its words are tokens
    assert EmbeddedModelRecipe(seed=3).name == RECIPES["starter"](3).name
    assert RECIPES["hour"](3).edition == SUITES["hour"].version  # else an old base would be kept
    for name, game in {"embedded:chess": "chess", "embedded": ""}.items():
        with pytest.raises(ModelError, match=f"no game '{game}': choose embedded:starter or"):
            resolve_base(name, tmp_path, 0)


async def test_a_cancelled_call_stops_making_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = dataclasses.replace(QUICK, steps=10**6)
    monkeypatch.setitem(RECIPES, "starter", lambda _: endless)
    begun = threading.Event()
    making = asyncio.create_task(
        resolve_base_in_a_thread(None, tmp_path, 0, lambda done, steps: begun.set())
    )
    assert await asyncio.to_thread(begun.wait, 120)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    async with asyncio.timeout(60):
        await asyncio.get_running_loop().shutdown_default_executor()  # waits for the thread
    assert not list(tmp_path.iterdir())


def test_base_model_replaces_the_embedded(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_base(str(embedded), embedded.parent, 0) == embedded
    loaded, given = load_policy(embedded), []

    def load(_: str, **options: str) -> Any:
        given.append(options)
        return loaded

    monkeypatch.setattr("babylon.policies.load.load_policy", load)
    assert resolve_base("Qwen/Qwen2.5-0.5B", embedded.parent, 0) == "Qwen/Qwen2.5-0.5B"
    assert given == [{"precision": "bf16", "device": "cpu"}]  # the GPU may be an engine's


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_an_unloadable_base_model_is_refused_clearly(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"BASE_MODEL='{tmp_path}'") as refused:
        resolve_base(str(tmp_path), tmp_path, 0)
    assert "\n" not in str(refused.value) and "save_pretrained" in str(refused.value)


def test_a_base_model_with_a_wrong_path_is_not_sought_on_the_hub(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=r"^BASE_MODEL=.*: no such directory: /nope: "):
        resolve_base("/nope", tmp_path, 0)
