import random

import pytest

from babylon.serving.engine.text_stream import TextStream
from tests.tiny_policy import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def pieces(text_or_ids: str | list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """Push one token at a time; the pieces and how many tokens were used."""
    ids = TOKENIZER.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    stream, given, total = TextStream(decode, stops), [], 0
    for position, token in enumerate(ids):
        piece, used = stream.push([token], last=position == len(ids) - 1)
        given.append(piece)
        total += used
        if stream.stopped:
            break
    return given, total


def test_a_character_comes_whole_with_its_last_byte() -> None:
    assert pieces("aé€🙂b")[0] == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b"]


def test_bytes_that_are_no_character_add_up_to_the_text_of_the_whole() -> None:
    generator = random.Random(0)
    few = TOKENIZER.encode("aé€🙂")  # which make longer runs
    for of_any in range(500):
        ids = generator.choices(range(259) if of_any % 10 == 0 else few, k=30)
        assert "".join(pieces(ids)[0]) == decode(ids)


def test_a_run_of_broken_characters_is_decoded_a_few_tokens_at_a_time() -> None:
    most = 0

    def decode_counted(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode(ids)

    half = TOKENIZER.encode("🙂")[:2]  # a policy may repeat it until its limit
    stream = TextStream(decode_counted)
    given = [stream.push([token])[0] for token in half * 100]
    given += stream.push(TOKENIZER.encode("🙂"), last=True)[0]
    assert "".join(given) == "\ufffd" * 100 + "🙂" == decode(half * 100 + TOKENIZER.encode("🙂"))
    assert most < 20


def test_an_answer_cut_inside_a_character_ends_with_the_replacement() -> None:
    assert "".join(pieces(TOKENIZER.encode("ab€")[:-1])[0]) == "ab\ufffd"


@pytest.mark.parametrize(
    ("stops", "expected", "used"),
    [
        (("END",), "hello ", 9),
        (("zzz", "lo E"), "hel", 7),
        (("h",), "", 1),
        (("ENX",), "hello END of", 12),
    ],
)
def test_nothing_after_the_stop_is_sent(stops: tuple[str, ...], expected: str, used: int) -> None:
    given, total = pieces("hello END of", stops)
    assert ("".join(given), total) == (expected, used)


def test_what_might_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ("END",))
    assert stream.push(TOKENIZER.encode("abEN"))[0] == "ab"
    assert stream.push(TOKENIZER.encode("x"))[0] == "E"
    assert stream.push((), last=True)[0] == "Nx"


def test_many_tokens_at_once_give_the_same_as_one_by_one() -> None:
    ids = TOKENIZER.encode("größe🙂 und")
    assert TextStream(decode).push(ids, last=True) == ("größe🙂 und", len(ids))
    assert TextStream(decode, ("und",)).push(ids, last=True) == ("größe🙂 ", len(ids))
