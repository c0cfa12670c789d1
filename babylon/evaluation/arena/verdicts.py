"""The verdict on a match, and on play that nobody can repeat."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from babylon.core.home import Home
from babylon.core.objects import publish
from babylon.core.types import CANARY, OffPolicy, Trained, Verdict
from babylon.evaluation.arena.match import Match
from babylon.evaluation.arena.match_page import write_report
from babylon.evaluation.arena.play import result_of
from babylon.evaluation.arena.players import all_yardsticks
from babylon.evaluation.arena.worlds import told
from babylon.game.market.scenario import Scenario


def match_verdict(
    trained: Trained, route_version: int, match: Match, suite_digest: str, check: OffPolicy | None
) -> Verdict:
    """Return the verdict on a match. ``check``: recorded play, which can veto a winner."""
    before, after = match.champion, match.challenger
    last = match.looks[-1]
    verdict = Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=match.ruling == "promote",
        insufficient=match.ruling == "insufficient",
        reason=match.reason,
        evidence=told(match.worlds),
        scenarios=last.scenarios,
        suite_digest=suite_digest,
        pnl_before=before.mean_pnl,
        pnl_after=after.mean_pnl,
        pnl_difference_low=last.difference.low,
        pnl_difference_high=last.difference.high,
        win_rate_before=float(before.win_rate.mean()),
        win_rate_after=float(after.win_rate.mean()),
        malformed_before=float(before.malformed.mean()),
        malformed_after=float(after.malformed.mean()),
        drawdown_before=float(before.drawdown.mean()),
        drawdown_after=float(after.drawdown.mean()),
        off_policy=check,
    )
    # Worlds promote and recorded play can only veto: its weights rest on far fewer decisions.
    if check is None or not check.veto:
        return verdict
    reason = f"vetoed by recorded play, {check}; in the arena, {verdict.reason}"
    return replace(verdict, promote=False, reason=reason, evidence=f"recorded play, {check}")


def recorded_verdict(trained: Trained, route_version: int, check: OffPolicy) -> Verdict:
    """Return the verdict where no worlds can be made.

    Recorded play decides if it can. Else a few live agents do: the challenger passes as a canary.
    """
    if check.veto:
        promote, reason, evidence = False, f"a loss in recorded play, {check}", "recorded play"
    elif check.gain:
        promote, reason, evidence = True, f"a gain in recorded play, {check}", "recorded play"
    else:
        promote, evidence = True, CANARY
        reason = (
            "a canary must decide: no world can be rebuilt from the fleet's rows, and recorded play"
            f" does not decide ({check})"
        )
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=promote,
        reason=reason,
        evidence=evidence,
        off_policy=check,
    )


def reported(
    home: Home, verdict: Verdict, match: Match, worlds: Sequence[Scenario], name: str
) -> Verdict:
    """Add the yardsticks to the verdict and write the report's directory. Blocking."""
    others = all_yardsticks(home, worlds[: verdict.scenarios])
    directory = home.arena / name
    verdict = replace(
        verdict,
        yardsticks={name: result.mean_pnl.mean for name, result in others.items()},
        report=home.reference(directory),
    )
    results = {
        "champion": result_of(match.champion),
        "challenger": result_of(match.challenger),
        **others,
    }
    write_report(directory, results, match.looks, {"verdict": asdict(verdict)})
    publish(home, directory)
    return verdict
