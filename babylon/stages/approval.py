"""A person's word before a policy that passed the gate is deployed.

The question and its answer are in Postgres, so that any page or command may answer, and a run that
follows a crash goes on waiting. The window keeps its lease meanwhile, and later windows wait.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from babylon.core.errors import ApprovalError
from babylon.core.types import Verdict
from babylon.store import Store
from babylon.store.approvals import Approval, answer_approval, ask_approval, get_approval

POLL_S = 2.0


async def ask(store: Store, verdict: Verdict, hours: float) -> Approval:
    """Ask once for a policy, whatever number of runs need the answer."""
    return await ask_approval(store, verdict.claim, verdict.policy_version, timedelta(hours=hours))


async def await_answer(store: Store, policy_version: int) -> Approval:
    """Return the answer, or the question when its time is over."""
    while True:
        found = await get_approval(store, policy_version)
        if found.approved is not None or found.expired:
            return found
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
    """Return the verdict that ``deploy`` acts on: without a yes, the policy is not deployed."""
    if answer.approved:
        return replace(verdict, reason=f"{verdict.reason}; {answer}")
    return replace(verdict, promote=False, reason=f"{answer}; the gate said: {verdict.reason}")
