"""A review as a Markdown page."""

from collections.abc import Iterator

from babylon.evaluation.experiment.review_records import Comparison, Guardrail, Review, SampleRatio

WORDS = {
    "promote": "promote the challenger",
    "rollback": "roll back to the champion",
    "keep": "keep the champion, the experiment is over",
    "insufficient": "not enough evidence yet",
}
INTERFERENCE = (
    "Agents of one market move each other's prices, so some of an arm's gains may be the other"
    " arm's losses. The difference compares the arms side by side; it does not predict the P&L if"
    " all agents used one of them."
)

LEAST_SHARED = 0.1


def review_markdown(review: Review) -> str:
    return "\n".join(
        [
            f"# Experiment {review.experiment}: {WORDS[review.decision]}",
            "",
            f"{review.reason}.",
            "",
            f"Policy {review.challenger_version} against {review.champion_version}, {review.mode},"
            f" share {' → '.join(f'{share:.0%}' for share in review.shares)},"
            f" {review.hours:.1f} h from {review.began_at:%Y-%m-%d %H:%M}"
            f"{f' to {review.ended_at:%Y-%m-%d %H:%M}' if review.ended_at else ''} UTC,"
            f" {review.plays} plays, {review.calls} calls.",
            "",
            "| | champion | challenger | difference, 95 % at every look |",
            "| --- | ---: | ---: | ---: |",
            *_measures(review),
            "",
            *_told(review),
            "",
            "| guardrail | champion | challenger | change | bound | |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
            *map(_guardrail, review.guardrails),
            "",
            *_excluded(review),
            INTERFERENCE,
            f"Reviewed {review.reviewed_at:%Y-%m-%d %H:%M:%S} UTC.",
        ]
    )


def _measures(review: Review) -> Iterator[str]:
    for name, ratio in (
        ("agents", review.agents),
        ("agents with finished play", review.measured_agents),
    ):
        yield f"| {name} | {ratio.champion} | {ratio.challenger} | {_ratio(ratio)} |"
    for name, found, form in (
        ("P&L per play, $", review.raw_pnl, ".2f"),
        ("P&L per play, $, adjusted for history", review.pnl, ".2f"),
        ("score (decides nothing)", review.score, ".3f"),
    ):
        if found is not None:
            yield (
                f"| {name} | {found.champion:{form}} | {found.challenger:{form}}"
                f" | {_interval(found, form)} |"
            )


def _ratio(ratio: SampleRatio) -> str:
    verdict = "**broken**" if ratio.broken else "as split"
    return f"{ratio.expected:.1f} challengers expected, p = {ratio.p_value:.2g}: {verdict}"


def _interval(found: Comparison, form: str) -> str:
    return f"{found.difference:+{form}} [{found.low:+{form}}, {found.high:+{form}}]"


def _told(review: Review) -> Iterator[str]:
    if review.pnl is not None:
        yield (
            f"History explains {review.pnl.explained:.0%} of the variance; the evidence is worth"
            f" {review.pnl.information:.0f} independent plays in an even split."
        )
        if review.pnl.shared > LEAST_SHARED:
            yield (
                f"Luck that an arm's agents share in an hour is {review.pnl.shared:.0%} of the"
                " variance: more hours tell more than more agents."
            )
        if review.pnl.unseen:
            yield (
                f"The low ends of P&L are ${review.pnl.unseen:.2f} lower, for a loss that is too"
                " rare to have been seen."
            )
    if review.crossed:
        yield (
            f"{review.crossed} agents were in both arms, because the share changed. At each share,"
            " an agent counts in its first arm."
        )


def _guardrail(guard: Guardrail) -> str:
    if guard.change is None:
        return f"| {guard.name} | – | – | – | {guard.bound:g} | unknown |"
    if guard.name.startswith("latency"):
        cells = [f"{guard.champion:.0f} ms", f"{guard.challenger:.0f} ms"]
        # Between few agents the interval's end may have three hundred digits.
        high = f"{guard.high:.2f}"
        high = high if len(high) < 8 else f"{guard.high:.0e}"
        cells += [f"× {guard.change:.2f} [{guard.low:.2f}, {high}]", f"× {guard.bound:g}"]
    else:
        cells = [f"{guard.champion:.1%}", f"{guard.challenger:.1%}"]
        cells += [f"{guard.change:+.1%} [{guard.low:+.1%}, {guard.high:+.1%}]"]
        cells += [f"+{guard.bound:.0%}"]
    state = guard.state if guard.state == "passes" else f"**{guard.state}**"
    return f"| {guard.name} | {' | '.join(cells)} | {state} |"


def _excluded(review: Review) -> Iterator[str]:
    if review.excluded:
        yield "Left out: " + ", ".join(f"{why} {n}" for why, n in review.excluded.items()) + "."
        yield ""
