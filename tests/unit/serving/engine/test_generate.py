import math
from collections.abc import Sequence

import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import PreTrainedModel

from babylon.serving.engine.grammar import Constraint
from babylon.serving.engine.running_batch import generate
from babylon.serving.engine.sampling import Completion, Draw, Request, Sampling
from tests.tiny_policy import plain_logprobs, tiny_model, tiny_tokenizer

EOS, PAD = 258, 256
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 7, 7, 7])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(seed=1)


def seeded(prompt: Sequence[int], seed: int = 0, **options: float) -> Request:
    return Request(
        prompt, Sampling(max_tokens=int(options.pop("max_tokens", 24)), seed=seed, **options)
    )


def sample(
    model: PreTrainedModel, *requests: Request, eos: Sequence[int] = (EOS,)
) -> list[Completion]:
    return generate(model, requests, eos_token_ids=eos, pad_token_id=PAD)


def recomputed(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """A greedy request's logprobs are those of temperature 1."""
    temperature = request.sampling.temperature or 1.0
    return plain_logprobs(
        model, request.prompt_token_ids, completion.token_ids, temperature=temperature
    )


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_logprobs_equal_a_plain_forward_pass(model: PreTrainedModel, temperature: float) -> None:
    requests = [
        seeded(prompt, seed, temperature=temperature) for seed, prompt in enumerate(PROMPTS)
    ]
    for request, completion in zip(requests, sample(model, *requests), strict=True):
        expected = recomputed(model, request, completion)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0
        )


def test_seed_gives_a_longer_answer_the_same_beginning(model: PreTrainedModel) -> None:
    short = sample(model, seeded(PROMPTS[0], 3, max_tokens=5), eos=())[0]
    long = sample(model, seeded(PROMPTS[0], 3, max_tokens=50), eos=())[0]
    assert long.token_ids[:5] == short.token_ids


def test_identical_prompts_share_all_but_their_last_token(model: PreTrainedModel) -> None:
    requests = [seeded(PROMPTS[2], seed) for seed in range(3)]
    together = sample(model, *requests)
    assert [c.token_ids for c in together] == [sample(model, r)[0].token_ids for r in requests]
    assert len({tuple(c.token_ids) for c in together}) == 3


def test_greedy_takes_the_most_likely_token_beside_sampled_rows(model: PreTrainedModel) -> None:
    greedy = Request(PROMPTS[0], Sampling(max_tokens=8, temperature=0))
    completion = sample(model, seeded(PROMPTS[1]), greedy)[1]
    ids = list(PROMPTS[0])
    for token in completion.token_ids:
        with torch.inference_mode():
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_greedy_takes_no_nucleus_for_among_equals_it_might_hold_another() -> None:
    greedy = Request([1], Sampling(max_tokens=1, temperature=0, top_p=0.01))
    draw = Draw([greedy], torch.device("cpu"))
    token, logprob, _ = draw(torch.zeros(1, 50), [0.5])
    assert 0 <= int(token) < 50
    assert float(logprob) == pytest.approx(-math.log(50), abs=1e-5)


def test_a_grammar_in_one_row_leaves_the_other_rows_as_they_are() -> None:
    tokens = from_tokenizer(tiny_tokenizer(), n_vocab=300)
    constraint = Constraint(LLMatcher(tokens, LLMatcher.grammar_from_lark('start: "a" | "b"')))
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    free = [Request([1], Sampling(max_tokens=1))] * 3
    one = [free[0], Request([1], Sampling(max_tokens=1), constraint), free[2]]
    drawn = [Draw(rows, torch.device("cpu"))(logits.clone(), [0.3] * 3) for rows in (free, one)]
    for plain, masked in zip(*(step[:2] for step in drawn), strict=True):
        assert torch.equal(plain[::2], masked[::2])
    assert tiny_tokenizer().decode(drawn[1].tokens[1]) in ("a", "b")
    assert drawn[1].logprobs[1] > drawn[0].logprobs[1]


def test_end_of_sequence_is_part_of_the_completion_and_ends_it(model: PreTrainedModel) -> None:
    free = sample(model, seeded(PROMPTS[0], 4), eos=())[0]
    stop = free.token_ids[6]
    cut = free.token_ids.index(stop) + 1
    stopped = sample(model, seeded(PROMPTS[0], 4), eos=(stop,))[0]
    assert stopped.token_ids == free.token_ids[:cut]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")


def test_nucleus_draws_from_the_smallest_set_reaching_top_p(
    model: PreTrainedModel,
) -> None:
    top_p = 0.5
    requests = [
        Request(PROMPTS[0], Sampling(max_tokens=1, top_p=top_p, seed=seed)) for seed in range(200)
    ]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    ordered, order = torch.softmax(logits, -1).sort(descending=True)
    size = int((ordered.cumsum(-1) < top_p).sum()) + 1
    mass = float(ordered[:size].sum())
    nucleus = {
        int(t): math.log(float(p) / mass) for t, p in zip(order[:size], ordered, strict=False)
    }
    for completion in sample(model, *requests):
        assert completion.logprobs[0] == pytest.approx(nucleus[completion.token_ids[0]], abs=1e-4)


def test_draws_follow_the_distribution(model: PreTrainedModel) -> None:
    count = 4000
    requests = [Request(PROMPTS[0], Sampling(max_tokens=1, seed=seed)) for seed in range(count)]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected = torch.softmax(logits, -1)
    drawn = torch.tensor([c.token_ids[0] for c in sample(model, *requests)])
    share = torch.bincount(drawn, minlength=len(expected)) / count
    assert float((share - expected).abs().sum() / 2) < 0.1  # total variation


def test_bad_sampling_names_the_values() -> None:
    for bad in ({"max_tokens": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match="choose max_tokens >= 1"):
            Sampling(**{"max_tokens": 8, **bad})
    for temperature in (-1.0, 1e-6, math.inf, math.nan):
        with pytest.raises(ValueError, match="choose temperature 0"):
            Sampling(max_tokens=8, temperature=temperature)
    with pytest.raises(ValueError, match="at least one prompt token"):
        Request([], Sampling(max_tokens=1))


def test_model_in_training_mode_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"model\.eval"):
        sample(tiny_model(seed=2).train(), seeded(PROMPTS[0]))


def test_no_requests_give_no_completions(model: PreTrainedModel) -> None:
    assert sample(model) == []
