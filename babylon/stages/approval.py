"""A person's word before a policy that passed the gate is deployed.

The question and its answer are in Postgres, so that any page or command may answer, and a run that
follows a crash goes on waiting. The window keeps its lease meanwhile, and later windows wait.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from babylon.core.errors import ApprovalError, SupersededError
from babylon.core.types import Verdict
from babylon.store import Store
from babylon.store.approvals import (
    SUPERSEDED,
    Approval,
    answer_approval,
    ask_approval,
    get_approval,
)
from babylon.store.policies import get_policy
from babylon.store.routes import superseded

POLL_S = 2.0
IN_PREFECT = "somebody in Prefect's UI"  # the author of an answer in the form of a run


async def ask(store: Store, verdict: Verdict, hours: float) -> Approval:
    """Ask once for a policy, whatever number of runs need the answer."""
    return await ask_approval(store, verdict.claim, verdict.policy_version, timedelta(hours=hours))


async def await_answer(store: Store, policy_version: int) -> Approval:
    """Return the answer, or the question when its time is over.

    A policy whose parent leads no longer can never be deployed. Nobody is asked about it any more.
    """
    policy = await get_policy(store, policy_version)
    while True:
        found = await get_approval(store, policy_version)
        if found.approved is not None or found.expired:
            return found
        if reason := await superseded(store, policy):
            await try_to_answer(store, policy_version, False, SUPERSEDED, reason)
        else:
            await asyncio.sleep(POLL_S)


async def try_to_answer(
    store: Store, policy_version: int, approved: bool, author: str, reason: str
) -> None:
    """Answer, unless somebody was faster."""
    try:
        await answer_approval(store, policy_version, approved, author, reason)
    except ApprovalError:
        return


def with_answer(verdict: Verdict, answer: Approval) -> Verdict:
    """Return the verdict that ``deploy`` acts on: without a yes, the policy is not deployed.

    Raises:
        SupersededError: the policy's parent leads no longer; the window must be trained again.
    """
    if answer.author == SUPERSEDED:
        raise SupersededError(f"policy {answer.policy_version}: {answer.reason}")
    if answer.approved:
        return replace(verdict, reason=f"{verdict.reason}; {answer}")
    return replace(verdict, promote=False, reason=f"{answer}; the gate said: {verdict.reason}")
