"""Checks of a checkpoint's files: unchanged since the commit, and on the right base model."""

from collections.abc import Iterator
from pathlib import Path

from babylon.core.errors import ModelError
from babylon.deployment.checks.check_result import Check
from babylon.policies.checkpoint_files import adapter_base, checkpoint_digest
from babylon.store.policies import Policy

_SHOWN = 12  # digits of a digest in messages


def check_files(policy: Policy, champion: Policy, root: Policy) -> list[Check]:
    """Check the files. Blocking: reads every weight once. ``root``: the base model, policy 0."""
    return [_digest(policy), *_base(policy, champion, root)]


def _digest(policy: Policy) -> Check:
    found = checkpoint_digest(policy.uri)
    failure = _changed(policy, found)
    if failure is None and found is None and policy.kind != "base":
        failure = f"{policy.uri} is no directory here: restore it, or deploy another policy"
    told = (
        "as it was committed" if policy.digest else "no digest was recorded when it was committed"
    )
    return Check.of("digest", failure, told, recorded=policy.digest, found=found)


def _changed(policy: Policy, found: str | None) -> str | None:
    if policy.digest is None or found == policy.digest:
        return None
    there = f"now they have {found[:_SHOWN]}" if found else "now there is no such directory"
    return (
        f"the files of {policy.uri} had the digest {policy.digest[:_SHOWN]} when policy"
        f" {policy.policy_version} was committed, {there}: restore them from a backup, or deploy"
        " another policy"
    )


def _base(policy: Policy, champion: Policy, root: Policy) -> Iterator[Check]:
    """Check the base model of an adapter. A full model has none."""
    try:
        base = adapter_base(policy.uri)
        if base is None:
            return
        known = {_same(base_of(owner)): owner for owner in (champion, root)}
    except ModelError as error:
        yield Check.of("base", str(error))
        return
    yield Check.of("base", _wrong_base(base, known, root), f"on {base}", base=base)


def base_of(policy: Policy) -> str:
    """The full model under a policy: the base of its adapter, or the policy itself.

    Raises:
        ModelError: The adapter's configuration cannot be read.
    """
    return adapter_base(policy.uri) or policy.uri


def _wrong_base(base: str, known: dict[str, Policy], root: Policy) -> str | None:
    if _same(base) not in known:
        return (
            f"its adapter belongs to the base model {base}, but {', '.join(known)} is in use: train"
            " it on that base, or deploy a checkpoint of its own base first"
        )
    if Path(base).is_absolute() and not Path(base).is_dir():
        return f"its base model {base} is not there: restore it"
    if _same(base) == _same(root.uri):
        return _changed(root, checkpoint_digest(base))
    return None


def _same(uri: str) -> str:
    """The resolved path of a directory. An id of the Hugging Face hub stays as it is."""
    return str(Path(uri).resolve()) if Path(uri).is_dir() else uri
