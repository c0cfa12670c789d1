from random import Random

from babylon.core.types import Rejection
from babylon.quality.quality_page import quality_markdown, reason_lines
from babylon.store.rejections import SAMPLES, RejectedFor, RejectionTally


def rejection(name, reason="no_llm_call", detail="3 steps"):
    return Rejection(trajectory_id=name, reason=reason, detail=detail)


def test_a_tally_counts_all_and_keeps_the_first_few_by_id_whatever_the_order():
    everyone = [rejection(f"t{number}") for number in range(9)]
    Random(0).shuffle(everyone)
    tally = RejectionTally()
    for one in (rejection("z", "no_response"), *everyone):
        tally.add(one)
    assert tally.reasons() == [
        RejectedFor(
            reason="no_llm_call",
            count=9,
            samples=tuple(rejection(f"t{number}") for number in range(SAMPLES)),
        ),
        RejectedFor(reason="no_response", count=1, samples=(rejection("z", "no_response"),)),
    ]


def test_the_page_has_a_line_a_sample_and_foreign_text_makes_no_column():
    page = quality_markdown(
        "2025-11-14T09:00",
        12,
        [
            RejectedFor(
                reason="malformed_json",
                count=7,
                samples=(
                    rejection("a|b", "malformed_json", "stepsJson: `x`\n| y"),
                    rejection("c", "malformed_json", ""),
                ),
            )
        ],
    )
    assert page.splitlines() == [
        "# 2025-11-14T09:00: 12 trajectories accepted, 7 rejected",
        "",
        "| reason | rejected | for example | detail |",
        "|---|---:|---|---|",
        "| malformed_json | 7 | `a¦b` | `stepsJson: 'x' ¦ y` |",
        "|  |  | `c` |  |",
    ]
    assert quality_markdown("w", 3, []) == "# w: 3 trajectories accepted, 0 rejected\n"


def test_a_terminal_gets_a_line_a_reason_and_one_a_sample():
    samples = (rejection("a"), rejection("b\nc", detail="key '\x1b[2J' twice"))
    assert reason_lines([RejectedFor(reason="no_llm_call", count=5, samples=samples)]) == [
        "5 no_llm_call",
        "    a: 3 steps",
        "    b c: key '\ufffd[2J' twice",
    ]
