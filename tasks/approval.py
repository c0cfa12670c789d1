"""Approval: wait until a person approves the deployment, and show the question in Prefect.

The run is ``Paused`` meanwhile, and its page has a form. Postgres has the answer: one from the
command line or the status page resumes the run, and one from the form is written to Postgres.
"""

import asyncio
import logging
from contextlib import suppress
from uuid import UUID

from prefect.context import FlowRunContext
from prefect.exceptions import PrefectSignal
from prefect.flow_runs import apause_flow_run, aresume_flow_run
from prefect.input import RunInput
from prefect.input.actions import aread_flow_run_input
from pydantic import Field

from babylon.core.settings import DeploymentSettings
from babylon.core.types import Verdict
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.stages.approval import IN_PREFECT, ask, await_answer, try_to_answer, with_answer
from babylon.store import Store
from babylon.store.approvals import Approval
from babylon.store.connection import UNREACHABLE
from babylon.tasks.stage import stage

_POLL_S = 2
_SLACK_S = 600  # Prefect fails a run whose pause is over; ours is over before
log = logging.getLogger("babylon.flows")


class DeployForm(RunInput):
    """The form on the page of the run."""

    approve: bool = Field(False, description="Deploy the policy.")
    reason: str = Field("", description="Kept with the policy and the route.")


@stage("approval")
async def approval(store: Store, deployment: DeploymentSettings, verdict: Verdict) -> Verdict:
    """Return the verdict with the answer. Without one in ``APPROVAL_HOURS`` it is a no."""
    assert deployment.approval_hours is not None
    question = await ask(store, verdict, deployment.approval_hours)
    version = question.policy_version
    log.info(
        "policy %d waits for `babylon deploy approve %d` until %s UTC (or refuse, or the status"
        " page, or Resume on the page of this run)",
        version,
        version,
        f"{question.open_until:%Y-%m-%d %H:%M}",
    )
    # Prefect shows the question, and Postgres decides: the pause may fail, end or be forgotten in a
    # crash without an effect on the answer.
    pause = None
    if (context := FlowRunContext.get()) and context.flow_run and question.approved is None:
        run = context.flow_run.id
        pause = asyncio.create_task(_pause(store, verdict, deployment.approval_hours, run))
    try:
        answer = await await_answer(store, version)
        if pause and context and context.flow_run:
            await _resume(context.flow_run.id, pause, answer)
    finally:
        if pause:
            pause.cancel()
            await asyncio.gather(pause, return_exceptions=True)
    log.info("policy %d: %s", version, answer)
    return with_answer(verdict, answer)


async def _pause(store: Store, verdict: Verdict, hours: float, run: UUID) -> None:
    """Pause the run in Prefect until its form is filled in, and write the answer to Postgres."""
    form = DeployForm.with_initial_data(description=verdict_markdown(verdict))
    version, answer = verdict.policy_version, None
    try:
        answer = await apause_flow_run(
            wait_for_input=form,
            timeout=int(hours * 3600) + _SLACK_S,
            poll_interval=_POLL_S,
            key=f"approve-{version}",
        )
    # Prefect shows the question; it must not decide by its failure.
    except (Exception, PrefectSignal) as error:
        log.warning("Prefect may not show the question: %r", error)
    # Prefect pauses a run once. A stage that begins again after an outage finds it paused.
    answer = answer or await _filled_in(run, f"paused-approve-{version}-response")
    while True:
        try:
            return await try_to_answer(store, version, answer.approve, IN_PREFECT, answer.reason)
        except UNREACHABLE:  # nobody fills the form in again
            await asyncio.sleep(_POLL_S)


async def _filled_in(run: UUID, key: str) -> DeployForm:
    """Return the form of an earlier pause of the run, once somebody has filled it in."""
    while True:
        with suppress(Exception):  # Prefect is away
            if said := await aread_flow_run_input(key, flow_run_id=run):
                return DeployForm(**said)
        await asyncio.sleep(_POLL_S)


async def _resume(run: UUID, pause: "asyncio.Task[None]", answer: Approval) -> None:
    """Let the run go on after an answer from elsewhere, or after none."""
    if pause.done() or answer.author == IN_PREFECT:
        return
    form = {"approve": bool(answer.approved), "reason": answer.reason or ""}
    try:
        await aresume_flow_run(run, run_input=form)
    except Exception as error:  # the run ends in its own state all the same
        log.warning("Prefect shows the run as paused until it ends: %r", error)
