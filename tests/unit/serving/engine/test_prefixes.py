import torch

from babylon.serving.engine.prompt_reader import MAX_TOKENS, Prefixes, Tokens

SYSTEM = tuple(range(40))
PIECE = (torch.zeros(2, 1, 1, 1),)


def prompts(count: int, beginning: Tokens = SYSTEM) -> list[Tokens]:
    return [(*beginning, 1000 + index) for index in range(count)]


def test_what_four_prompts_begin_with_is_shared_also_over_time() -> None:
    prefixes = Prefixes()
    assert prefixes.shared(prompts(3)) == [()]
    assert prefixes.shared([(*SYSTEM, 2000)]) == [SYSTEM]


def test_the_longest_of_several_beginnings_is_found_for_each_prompt() -> None:
    longer = (*SYSTEM, *range(500, 540))
    found = Prefixes().shared([*prompts(4), *prompts(4, longer)])
    assert set(found) == {SYSTEM, longer}


def test_a_repeated_prompt_leaves_a_token_to_be_read() -> None:
    prefixes = Prefixes()
    assert prefixes.shared([SYSTEM] * 4) == [SYSTEM[:-1]]
    prefixes.keep(SYSTEM, PIECE)
    assert prefixes.longest(SYSTEM) == (PIECE, 39)


def test_a_part_of_what_is_kept_serves_too_but_not_a_few_tokens() -> None:
    prefixes = Prefixes()
    prefixes.keep(SYSTEM, PIECE)
    assert prefixes.longest((*SYSTEM[:35], 7, 7)) == (PIECE, 35)
    assert prefixes.longest((*SYSTEM[:20], 7, 7)) == ((), 0)


def test_the_least_used_is_forgotten_when_there_are_too_many_tokens() -> None:
    prefixes = Prefixes()
    size = MAX_TOKENS // 3
    first, second, third, fourth = ((index, *range(size - 1)) for index in range(4))
    for prefix in (first, second, third):
        prefixes.keep(prefix, PIECE)
    assert prefixes.longest((*first, 1))[1] == size
    prefixes.keep(fourth, PIECE)
    lengths = [prefixes.longest((*prefix, 1))[1] for prefix in (first, second, third, fourth)]
    assert lengths == [size, 0, size, size]


def test_a_longer_beginning_takes_the_place_of_a_shorter() -> None:
    prefixes, longer = Prefixes(), (torch.ones(2, 1, 1, 1),)
    prefixes.keep(SYSTEM, PIECE)
    prefixes.keep((*SYSTEM, 1, 2), longer)
    assert prefixes.longest((*SYSTEM, 3)) == (longer, 40)
