"""``babylon deploy analyse``: is the challenger of an experiment better than the champion?"""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json
from babylon.core.errors import ServingError
from babylon.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from babylon.evaluation.experiment.review_records import Review


def analyse(
    experiment: Annotated[
        str | None,
        typer.Option(metavar="ID", help="A past one, by the salt of its routes."),
    ] = None,
    json: Json = False,
) -> None:
    """Look at the running experiment: P&L, sample ratio, guardrails, and what follows.

    Changes nothing but the record of looks; exit code 1 only when there is nothing to look at.
    """
    review = asyncio.run(_review(load_settings(), experiment))
    if review is None:
        raise ServingError(
            "no experiment runs: begin one with `babylon deploy ab` or `babylon deploy canary`,"
            " or name a past one (--experiment ID)"
            if experiment is None
            else f"there is no experiment {experiment!r}: leave --experiment out for the one that"
            " runs, `babylon deploy status` names it"
        )
    if json:
        print_json(asdict(review))
    else:
        from babylon.evaluation.experiment.review_page import review_markdown

        print(review_markdown(review))


async def _review(settings: Settings, experiment: str | None) -> "Review | None":
    from babylon.evaluation.experiment.review import review
    from babylon.store import open_store

    async with open_store(settings) as store:
        return await review(store, settings, experiment)
