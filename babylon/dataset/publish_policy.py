"""Publishing a promoted policy: its weights and model card in one commit, and a tag on it.

``main`` of the repository is the newest published policy. The ledger has the policy before the
commit, and its revision after it: whatever dies in between, a take-down finds every policy that may
be on the hub. The next run finds the files at the head.
"""

import asyncio
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from babylon.core.errors import ArtifactError, ConfigError
from babylon.core.home import Home, make_directory
from babylon.core.settings import PublishSettings
from babylon.dataset.hub import Head, Hub, commit_once
from babylon.dataset.model_card import base_name, base_of, model_card
from babylon.policies.checkpoint_files import ADAPTER_CONFIG, PUBLIC_SUFFIXES
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store import Store
from babylon.store.learning import LinePolicy, policy_line
from babylon.store.lineage import trained_into
from babylon.store.policies import Policy, champion, get_policy
from babylon.store.published import publishing, read_withheld
from babylon.store.published_policies import published_policies, record_published_policy
from babylon.store.routes import all_routes

log = logging.getLogger(__name__)
_GGUF = "model.gguf"
_KEPT = (".gitattributes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A policy in its repository. Without a revision it is what a run would send."""

    repository: str
    policy_version: int
    form: str
    files: tuple[str, ...]
    bytes: int
    revision: str = ""


async def publish_policy(
    store: Store,
    home: Home,
    publish: PublishSettings,
    version: int | None = None,
    *,
    dry_run: bool = False,
) -> PublishedPolicy | None:
    """Publish a policy, by default the champion → what was sent, None if there is nothing new.

    Raises:
        ConfigError: a setting is missing, or the policy may not be published.
        PublishError: the hub refused or did not answer.
    """
    repository = _require(publish)
    policy = await (_champion(store) if version is None else get_policy(store, version))
    if version is None and policy.kind == "base":
        return None  # nothing was promoted yet
    await _check(store, policy, publish)
    if policy.policy_version in await published_policies(store, repository):
        return None
    line = _ancestors(await policy_line(store), policy.policy_version)
    base = (await get_policy(store, 0)).uri
    make_directory(home.scratch)  # where the next start deletes what a killed run left
    with tempfile.TemporaryDirectory(prefix="publish-", dir=home.scratch) as directory:
        files = await asyncio.to_thread(_files, policy, base, publish, line, home, Path(directory))
        made = PublishedPolicy(
            repository=repository,
            policy_version=policy.policy_version,
            form=publish.models_as,
            files=tuple(sorted(files)),
            bytes=sum(_size(content) for content in files.values()),
        )
        if dry_run:
            return made
        async with publishing(store):
            # Again: a take-down may have come while the files were made.
            await _check(store, policy, publish)
            entry = repository, policy.policy_version, made.form, made.bytes
            await record_published_policy(store, *entry)
            revision = await asyncio.to_thread(_send, publish, repository, policy, files)
            await record_published_policy(store, *entry, revision)
    log.info("published policy %d: %.1f MB", policy.policy_version, made.bytes / 1e6)
    return replace(made, revision=revision)


async def _champion(store: Store) -> Policy:
    return (await champion(store))[0]


def _require(publish: PublishSettings) -> str:
    needed = {"PUBLISH_MODELS_TO": publish.models, "PUBLISH_LICENSE": publish.license}
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(
            f"publishing a policy needs {', '.join(missing)}: nothing leaves this machine before"
            " you named the repository and the license (docs/dataset.md)"
        )
    assert publish.models is not None
    return publish.models


async def _check(store: Store, policy: Policy, publish: PublishSettings) -> None:
    """Raise ``ConfigError`` unless the policy served, is whole, and learnt nothing taken down."""
    version = policy.policy_version
    if policy.kind == "base":
        raise ConfigError(
            f"policy {version} is the base model: there is nothing of ours to publish"
        )
    if version not in {route.policy_version for route in await all_routes(store)}:
        raise ConfigError(
            f"policy {version} was never promoted: promote it first with `babylon deploy replace`"
        )
    if policy.removed_at is None:
        # The next line says what is wrong with a checkpoint that is not in the store either.
        with suppress(ArtifactError):
            await asyncio.to_thread(fetch_checkpoint, store.home, policy.uri)
    if policy.removed_at is not None or not Path(policy.uri).is_dir():
        raise ConfigError(f"the checkpoint of policy {version} is gone: publish a newer policy")
    if publish.models_as == "adapter" and (policy.kind != "lora" or not base_of(policy.base_model)):
        raise ConfigError(
            f"policy {version} ({policy.kind}, trained from {base_name(policy.base_model)}) is no"
            " adapter of a model of the hub: set PUBLISH_MODELS_AS=merged"
        )
    withheld = await read_withheld(store)
    rows = await store.game.fetch(
        'SELECT "trajectoryId" AS id FROM trajectories WHERE "agentId" = ANY($1)',
        sorted(withheld.agents),
    )
    gone = withheld.trajectories | {row["id"] for row in rows}
    if learnt := await trained_into(store, version, sorted(gone)):
        raise ConfigError(
            f"policy {version} learnt from {len(learnt)} trajectories that were taken down: roll"
            " back to a policy that did not (`babylon dataset erase` names those that did)"
        )


def _ancestors(policies: Sequence[LinePolicy], version: int) -> list[LinePolicy]:
    by_version = {one.policy_version: one for one in policies}
    line = []
    current: int | None = version
    while current is not None and current in by_version:
        line.append(by_version[current])
        current = by_version[current].parent_version
    return line[::-1]


def _files(
    policy: Policy,
    base: str,
    publish: PublishSettings,
    line: Sequence[LinePolicy],
    home: Home,
    directory: Path,
) -> dict[str, Path | bytes]:
    """Return path in the repository → content: weights, tokenizer, gguf if it can be, and card."""
    from babylon.policies.whole_weights import write_gguf, write_whole

    source = Path(policy.uri)
    if publish.models_as == "merged":
        source = directory / "whole"
        write_whole(policy.uri, fetch_checkpoint(home, base), source)
    files: dict[str, Path | bytes] = {
        path.name: path
        for path in sorted(source.iterdir())
        if path.is_file() and path.suffix in PUBLIC_SUFFIXES
    }
    if publish.models_as == "adapter":
        # The trainer names the base relative to its home.
        config = json.loads((source / ADAPTER_CONFIG).read_text())
        config["base_model_name_or_path"] = policy.base_model
        files[ADAPTER_CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode()
    if publish.models_as == "merged" and (gguf := write_gguf(source, directory / _GGUF)):
        files[_GGUF] = gguf
    card = model_card(policy, line, publish, publish.models_as, set(files))
    return {**files, "README.md": card.encode()}


def _send(
    publish: PublishSettings, repository: str, policy: Policy, files: Mapping[str, Path | bytes]
) -> str:
    hub = Hub(publish, repository, "model")

    def change(head: Head) -> tuple[dict[str, Path | bytes], list[str]]:
        """Put these files in the place of all others. The client sends only what differs."""
        stale = [path for path in head.files if path not in files and path not in _KEPT]
        return dict(files), stale

    revision = commit_once(hub, change, f"Policy {policy.policy_version}")
    hub.tag(f"policy-{policy.policy_version}", revision)
    return revision


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
