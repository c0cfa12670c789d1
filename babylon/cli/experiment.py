"""``babylon deploy analyse``: compare the challenger of an experiment with the champion."""

from dataclasses import asdict
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, with_store
from babylon.core.errors import ServingError
from babylon.core.settings_loading import load_settings


def analyse(
    experiment: Annotated[
        str | None, typer.Option(metavar="ID", help="A past experiment. Default: the running one.")
    ] = None,
    json: Json = False,
) -> None:
    """Review the running experiment: P&L, sample ratio, guardrails, and the decision.

    The review is stored and changes nothing else. The exit code is 1 only without an experiment.
    """
    from babylon.evaluation.experiment.review import review
    from babylon.evaluation.experiment.review_page import review_markdown

    settings = load_settings()
    found = with_store(settings, review, settings.windows, settings.experiment, experiment)
    if found is None:
        raise ServingError(
            "no experiment runs: begin one with `babylon deploy ab` or `babylon deploy canary`,"
            " or name a past one (--experiment ID)"
            if experiment is None
            else f"there is no experiment {experiment!r}: leave --experiment out for the running"
            " one, which `babylon deploy status` names"
        )
    if json:
        print_json(asdict(found))
    else:
        print(review_markdown(found))
