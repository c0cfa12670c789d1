"""The checks before a route may name a policy.

They compare the files with those that training committed, the policy that each gateway serves with
the trainer's, and its answers with the champion's. The comparison is exact: it takes the tokens
that the gateways sampled, their logprobs, and the trainer's logprobs of the same tokens under the
policy, the champion and the base.
"""

import asyncio
from collections.abc import Sequence

from babylon.core.errors import ModelError
from babylon.core.learning_settings import reading_precision
from babylon.core.settings import ServingSettings, Settings
from babylon.deployment.checks.check_result import Check, Checked
from babylon.deployment.checks.file_checks import base_of, check_files
from babylon.deployment.checks.golden_prompts import GoldenPrompt, golden_prompts, questions
from babylon.deployment.checks.likelihoods import Contenders, import_trainer, measure
from babylon.deployment.checks.logprob_gap import tolerance
from babylon.deployment.checks.probing import Faulty, Probe, ProbeTarget, probe
from babylon.deployment.checks.reply_checks import check_replies
from babylon.policies.shared_files import fetch_checkpoints
from babylon.store.connection import Store
from babylon.store.gateways import GatewayRow
from babylon.store.policies import Policy, get_policy, set_checks
from babylon.store.quarantine import probe_keys


async def check_policy(
    store: Store,
    settings: Settings,
    policy: Policy,
    champion: Policy,
    gateways: Sequence[GatewayRow],
) -> Checked:
    """Check a policy that all ``gateways`` (at least one) have loaded, and store the result.

    Damaged files and silent gateways end the checks early.
    """
    root = await get_policy(store, 0)
    there = [one.uri for one in (policy, champion, root) if one.removed_at is None]
    await asyncio.to_thread(fetch_checkpoints, store.home, *there)
    checks = await asyncio.to_thread(check_files, policy, champion, root)
    # Answers from damaged files would say nothing about the policy.
    if all(check.passed for check in checks):
        golden = await golden_prompts(store, settings.evaluation, champion)
        target = ProbeTarget(
            model=settings.model.name,
            policy_version=policy.policy_version,
            champion_version=champion.policy_version,
            keys=await probe_keys(store, [gateway.gateway_id for gateway in gateways]),
        )
        answers, probes = await _answered(gateways, golden, target, champion)
        checks.append(answers)
        if probes and answers.passed:
            base = None if policy.kind == "base" else await asyncio.to_thread(_base, policy, root)
            training = settings.training
            contenders = Contenders(
                policy=policy.uri,
                champion=champion.uri,
                base=base,
                max_tokens=training.max_tokens,
                precision=reading_precision(training.tuning, training.base_precision),
            )
            max_kl = settings.deployment.max_serving_kl
            checks += await _compared(contenders, probes, golden, settings.serving, max_kl)
    checked = Checked(
        policy_version=policy.policy_version,
        champion_version=champion.policy_version,
        gateways=tuple(gateway.gateway_id for gateway in gateways),
        checks=tuple(checks),
    )
    await set_checks(store, policy.policy_version, checked.as_json())
    return checked


async def _answered(
    gateways: Sequence[GatewayRow],
    golden: Sequence[GoldenPrompt],
    target: ProbeTarget,
    champion: Policy,
) -> tuple[Check, list[Probe]]:
    """Ask the golden prompts through these gateways in turn. Return what the champion answered."""
    if not golden:
        detail = f"not asked: {champion.uri} has no room for a prompt"
        return Check.of("answers", None, detail), []
    found, _ = await asyncio.gather(
        probe(gateways, questions(golden, len(gateways)), target),
        asyncio.to_thread(import_trainer),  # takes seconds, like the probes
    )
    probes = [one for one in found if not isinstance(one.champion, Faulty)]
    return _answers(found, probes), probes


async def _compared(
    contenders: Contenders,
    probes: Sequence[Probe],
    golden: Sequence[GoldenPrompt],
    serving: ServingSettings,
    max_kl: float,
) -> list[Check]:
    """Compare the answers with the trainer's logprobs of the same tokens."""
    try:
        measured = await asyncio.to_thread(measure, contenders, probes)
    except ModelError as error:
        return [Check.of("loads", f"{error}: train it again")]
    allowed = tolerance(serving.engine, serving.vllm_args, contenders.precision)
    loads = Check.of("loads", None, "in the trainer")
    return [loads, *check_replies(measured, golden, allowed=allowed, max_kl=max_kl)]


def _base(policy: Policy, root: Policy) -> str:
    base = base_of(policy)
    return root.uri if base == policy.uri else base


def _answers(found: Sequence[Probe], sound: Sequence[Probe]) -> Check:
    # A probe that even the champion did not answer (not ``sound``) says nothing about the policy.
    faults = [one for one in sound if isinstance(one.policy, Faulty)]
    answered = {one.gateway for one in sound}
    silent = [one for one in found if one.gateway not in answered]
    failure = None
    if faults:
        failure = (
            f"{len(faults)} of {len(sound)} probes had no sound answer, the first of gateway"
            f" {faults[0].gateway}: {faults[0].policy}; look at the engine's log"
        )
    elif silent:
        failure = (
            f"not even the champion answers at gateway {silent[0].gateway}: {silent[0].champion};"
            " look at its log"
        )
    return Check.of(
        "answers",
        failure,
        f"{len(sound)} probes of {len(answered)} gateways were answered",
        probes=len(sound),
        faults=len(faults),
        left_out=len(found) - len(sound),
    )
