import json

import pytest

from babylon.scoring.judge.judgment import load_rubric
from babylon.scoring.judge.prompt import Shown, UnusableReplyError, build_prompt, parse_reply


def prompt(form="list", count=3):
    shown = [Shown(trajectory_id=f"t{i}", text="played") for i in range(count)]
    rubric = load_rubric("trading-v1")
    return build_prompt(form, rubric, truth="", common="", shown=shown, seed="s")


THREE = prompt()
A, B, C = THREE.labels


def listed(*entries):
    return json.dumps({"scores": [{"id": i, "explanation": "why", "score": s} for i, s in entries]})


def test_scores_go_by_id_whatever_their_order():
    reply = parse_reply(THREE, listed((C, 0.9), (A, 0.1), (B, 0.5)))
    assert reply.scores == (0.1, 0.5, 0.9)
    assert reply.explanations == ("why",) * 3


@pytest.mark.parametrize(
    "around", ["```json\n{}\n```", "<think>{{a}}</think> {}", "Sure! {} Anything else?"]
)
def test_what_stands_around_the_object_is_no_fault(around):
    body = listed((A, 0), (B, 1), (C, 0.5))
    text = around.replace("{{a}}", "{a}").replace("{}", body, 1)
    assert parse_reply(THREE, text).scores == (0.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON object"),
        ("<think>" + listed((A, 0.1), (B, 0.2), (C, 0.5)), "no JSON object"),
        ("<Thinking>so " + listed((A, 0.1), (B, 0.2), (C, 0.5)) + " or", "no JSON object"),
        ("<think>a</think><think>" + listed((A, 0.1), (B, 0.2), (C, 0.5)), "no JSON object"),
        ("I cannot judge.", "no JSON object"),
        (listed((A, 0.1), (B, 0.2))[:-3] + "}", "not have the requested form"),
        (listed((A, 0.1), (B, 0.2)), "not one for each of"),
        (listed((A, 0.1), (B, 0.2), (B, 0.3)), "not one for each of"),
        (listed((A, 0.1), (B, 0.2), (C, 0.3), (C, 0.3)), "not one for each of"),
        (listed((A, 0.1), (B, 0.2), ("X", 0.3)), "not one for each of"),
        (listed((A, 0.1), (B, 0.2), (C, 7.5)), f"score 7.5 of {C} is not between 0 and 1"),
        (listed((A, -0.1), (B, 0.2), (C, 0.5)), f"score -0.1 of {A}"),
        (listed((A, float("nan")), (B, 0.2), (C, 0.5)), "not have the requested form"),
        (listed((A, True), (B, 0.2), (C, 0.5)), "not have the requested form"),
        (listed((A, "0.5"), (B, 0.2), (C, 0.5)), "not have the requested form"),
        ('{"scores": ' + "[" * 5000 + "}", "not have the requested form"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_for_has_a_reason_and_no_scores(text, reason):
    with pytest.raises(UnusableReplyError, match=reason):
        parse_reply(THREE, text)


def test_the_reason_quotes_nothing_of_the_reply():
    for text in ("SECRET", '{"SECRET": 1}', listed(("SECRET", 0.5)), '{"scores": ["SECRET"]}'):
        with pytest.raises(UnusableReplyError) as refused:
            parse_reply(THREE, text)
        assert "SECRET" not in str(refused.value) and refused.value.__cause__ is None


def test_alone_a_trajectory_has_its_score():
    one = prompt("one", 1)
    assert parse_reply(one, '{"score": 0.25, "explanation": ""}').scores == (0.25,)
    with pytest.raises(UnusableReplyError, match="not between"):
        parse_reply(one, '{"score": 1.01}')


def test_labels_differ_and_depend_on_the_seed():
    shown = [Shown(trajectory_id=f"t{i}", text="") for i in range(6)]
    labels = {
        build_prompt(
            "list", load_rubric("trading-v1"), truth="", common="", shown=shown, seed=s
        ).labels
        for s in "abc"
    }
    assert len(labels) == 3 and all(len(set(six)) == 6 for six in labels)


def test_a_long_reply_is_read():
    """A reply is read beside the lease's heartbeat. A megabyte once took a quarter of an hour."""
    words = json.dumps({"score": 0.25, "explanation": "</ " + "x" * 1_000_000})
    assert parse_reply(prompt("one", 1), words).scores == (0.25,)
