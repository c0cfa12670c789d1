from collections.abc import Sequence
from random import Random

import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from babylon.core.errors import ModelError
from babylon.serving.engine.running_batch import Batch, Row, generate
from babylon.serving.engine.sampling import Request, Sampling
from tests.tiny_policy import plain_logprobs, tiny_model

PAD = 256
SHARED = [index % 250 for index in range(7, 87)]


def windowed_model() -> PreTrainedModel:
    """Every other layer sees only the last eight tokens."""
    config = Qwen3Config(
        **{
            **tiny_model(seed=1).config.to_dict(),
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    )
    torch.manual_seed(1)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[lambda: tiny_model(seed=1), windowed_model])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made: PreTrainedModel = request.param()
    return made


def batch_of(model: PreTrainedModel) -> Batch:
    return Batch(model, eos_token_ids=(), pad_token_id=PAD)


def row(prompt: Sequence[int], seed: int, max_tokens: int = 24) -> Row:
    return Row(Request(prompt, Sampling(max_tokens=max_tokens, seed=seed)))


def assert_exact(model: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Rows sampled together equal rows sampled alone, with a plain forward pass's logprobs."""
    for one in rows:
        (alone,) = generate(model, [one.request], eos_token_ids=(), pad_token_id=PAD)
        assert one.completion.token_ids == alone.token_ids
        assert one.completion.finish_reason == alone.finish_reason == "length"
        torch.testing.assert_close(
            torch.tensor(one.completion.logprobs, dtype=torch.float64),
            plain_logprobs(model, one.prompt, one.completion.token_ids),
            atol=1e-4,
            rtol=0,
        )


def test_rows_come_and_go_at_any_step_and_stay_exact(model: PreTrainedModel) -> None:
    batch, rows = batch_of(model), list[Row]()
    arrivals = {
        0: [row([1, 2, 3], 0, 40), row([4, 5], 1, 3)],
        1: [row(list(range(200)), 2, 10)],  # longer than all that is held
        5: [row([index, 9], 10 + index, 4 + index) for index in range(20)],  # more rows, too
        9: [row([*SHARED, 1], 3, 150)],
        11: [row([8], 4, 1)],  # done with its first token
    }
    for step in range(200):
        if step in arrivals:
            batch.join(arrivals[step])
            rows += arrivals[step]
        batch.step()
    assert len(batch) == 0
    assert_exact(model, rows)


def test_shared_prefixes_stay_exact(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()
    original = type(model).forward

    def counted(self: PreTrainedModel, **fields: torch.Tensor) -> object:
        read.append(fields["input_ids"].numel())
        return original(self, **fields)

    batch = batch_of(model)
    rows = [row([*SHARED, 100 + index, 1], index) for index in range(9)]
    batch.join(rows[:4])
    while len(batch):
        batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counted)
        batch.join(rows[4:8])
        batch.join(rows[8:])  # alone
    windowed = model.config.use_sliding_window
    assert read == ([4 * 82, 82] if windowed else [4 * 2, 2])
    while len(batch):
        batch.step()
    assert_exact(model, rows)


def test_who_sets_the_finish_reason_ends_a_row_and_the_others_go_on(model: PreTrainedModel) -> None:
    batch, kept, ended = batch_of(model), row([1, 2], 1), row([3], 2)
    batch.join([ended, kept])
    batch.step()
    ended.completion.finish_reason = "abort"
    while len(batch):
        batch.step()
    assert len(ended.completion.token_ids) == 2
    assert_exact(model, [kept])


@pytest.mark.parametrize("seed", range(2))
def test_random_rows_stay_exact_beside_cancelled_ones(model: PreTrainedModel, seed: int) -> None:
    """Prompts share beginnings of any length, join in any number, and end or are ended."""
    random = Random(seed)
    beginnings = [[random.randrange(250) for _ in range(90)] for _ in range(2)]
    batch, rows, cancelled = batch_of(model), list[Row](), set[int]()
    for step in range(60):
        arrived = [
            row(
                [
                    *random.choice(beginnings)[: random.choice((0, 33, 60, 90))],
                    *(random.randrange(250) for _ in range(random.randint(1, 20))),
                ],
                seed=1000 * step + index,
                max_tokens=random.choice((1, 2, 5, 30)),
            )
            for index in range(random.choice((0, 0, 1, 6)))
        ]
        if arrived:
            batch.join(arrived)
        rows += arrived
        running = [index for index, one in enumerate(rows) if one.running]
        if running and random.random() < 0.3:
            cancelled.add(running[0])
            rows[running[0]].completion.finish_reason = "abort"
        batch.step()
    while len(batch):
        batch.step()
    assert cancelled
    assert_exact(model, [one for index, one in enumerate(rows) if index not in cancelled])


def test_a_prompt_fills_the_context_but_for_one_token(model: PreTrainedModel) -> None:
    context = model.config.max_position_embeddings
    batch, rows = batch_of(model), [row([1, 2], 1), row([7] * (context - 1), 2, max_tokens=1)]
    batch.join(rows)
    while len(batch):
        batch.step()
    assert_exact(model, rows)


def test_the_room_of_a_crowd_goes_while_one_row_still_runs(model: PreTrainedModel) -> None:
    def room() -> int:
        return sum(layer._buffer.nbytes for layer in batch._cache.layers)

    batch = batch_of(model)
    batch.join([row([1, 2, 3], 1, 300)])
    alone = room()
    batch.join([row([5, index], index, 2) for index in range(60)])
    assert room() > 4 * alone
    for _ in range(200):
        batch.step()
    assert len(batch) == 1
    assert room() < 2.5 * alone  # for it is longer now


def test_an_empty_batch_holds_no_keys_and_values(model: PreTrainedModel) -> None:
    batch = batch_of(model)
    batch.join([row([1, 2, 3], 1, 2)])
    assert batch._cache.get_seq_length() == 3
    batch.step()
    assert [layer.keys for layer in batch._cache.layers] == [None, None]


def test_model_that_keeps_something_else_than_keys_and_values_is_refused() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match="mamba"):
        batch_of(MambaForCausalLM(config).eval())
