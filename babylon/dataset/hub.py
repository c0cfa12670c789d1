"""A repository on the Hugging Face Hub: its head, its files, and one atomic commit.

huggingface_hub repeats a request by itself after 429 and 5xx. This module decides what a failure of
the commit means. The parent is named in each commit, so that a commit is refused if the repository
moved (412), also when our own first attempt moved it and only its answer was lost.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2  # the client of huggingface_hub, whose errors it passes on
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    set_client_factory,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory  # blocks requests in offline mode
from huggingface_hub.utils.tqdm import disable_progress_bars

from babylon.core.errors import ConfigError, PublishError
from babylon.core.settings import PublishSettings

log = logging.getLogger(__name__)
RepositoryKind = Literal["dataset", "model"]
MOVED = 412
_ATTEMPTS = 5
SILENT_S = 300.0  # a large commit is answered late; the library would wait for ever
# A download without an answer looks for a local copy, and says that there is none.
_BROKEN = (httpx2.TransportError, ConnectionError, TimeoutError, LocalEntryNotFoundError)
_REMEDIES = {
    401: "the token is not valid: set HF_TOKEN to a token that may write to the repository",
    402: "the account's storage is used up: make room there, or publish to another account",
    403: "the token may not write there, or the account's storage is used up: check both",
    413: "a file is larger than the hub takes",
}


def _client() -> httpx2.Client:
    """The library's client, which gives up a connection that falls silent."""
    client = default_client_factory()
    client.event_hooks = {"request": [*client.event_hooks["request"], _give_up]}
    return client


def _give_up(request: httpx2.Request) -> None:
    """Limit a request that the library sends without limits, whatever its client's are."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {name: limits[name] or SILENT_S for name in limits}


set_client_factory(_client)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest commit of a repository, and the SHA-256 of its large files by path."""

    revision: str
    files: Mapping[str, str | None]


class MovedError(PublishError):
    """The repository has another head than the commit's parent; nothing was changed."""


class Hub:
    """One repository. Calls block, and retry what may pass; any other failure names a remedy."""

    def __init__(
        self, settings: PublishSettings, repository: str, kind: RepositoryKind = "dataset"
    ) -> None:
        if settings.token is None:
            raise ConfigError(f"publishing to {repository} needs a token: set HF_TOKEN")
        self.repository, self.kind = repository, kind
        self._private = settings.private
        disable_progress_bars()
        self._api = HfApi(endpoint=settings.endpoint, token=settings.token.get_secret_value())

    def head(self) -> Head | None:
        """Return the head of the repository, None if there is no such repository."""
        try:
            info = self._ask(lambda: self._api.repo_info(self.repository, repo_type=self.kind))
        except _MissingError:
            return None
        tree = self._ask(
            lambda: list(
                self._api.list_repo_tree(
                    self.repository, repo_type=self.kind, recursive=True, revision=info.sha
                )
            )
        )
        files = {
            one.path: one.lfs.sha256 if one.lfs else None for one in tree if hasattr(one, "lfs")
        }
        return Head(str(info.sha), files)

    def create(self) -> Head:
        """Make the repository unless it exists, and return its head."""
        self._ask(
            lambda: self._api.create_repo(
                self.repository, repo_type=self.kind, private=self._private, exist_ok=True
            )
        )
        head = self.head()
        assert head is not None  # a repository that was just made
        return head

    def commit(
        self,
        parent: Head,
        add: Mapping[str, Path | bytes],
        delete: Sequence[str] = (),
        *,
        message: str,
    ) -> str:
        """Commit all changes at once on top of ``parent`` → the new revision, or the parent's.

        Raises:
            MovedError: the repository has another head. Read it and decide again.
            PublishError: the hub refused, or did not answer; the message has the remedy.
        """
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
            for path, content in add.items()
        ]
        operations += [CommitOperationDelete(path) for path in delete]
        # Not repeated here: after a lost answer only a look at the new head tells what happened.
        try:
            done = self._api.create_commit(
                self.repository,
                operations,
                commit_message=message,
                repo_type=self.kind,
                parent_commit=parent.revision,
            )
        except (HfHubHTTPError, *_BROKEN, RuntimeError) as error:
            raise self._failed(error) from error
        return str(done.oid)

    def download(self, path: str, revision: str, directory: Path) -> Path:
        """Fetch one file of a revision into a directory."""
        return Path(
            self._ask(
                lambda: self._api.hf_hub_download(
                    self.repository,
                    path,
                    repo_type=self.kind,
                    revision=revision,
                    local_dir=directory,
                )
            )
        )

    def tag(self, name: str, revision: str) -> None:
        """Name a revision. A tag of that name stays where it is."""
        self._ask(
            lambda: self._api.create_tag(
                self.repository,
                repo_type=self.kind,
                tag=name,
                revision=revision,
                exist_ok=True,
            )
        )

    def squash(self) -> None:
        """Make one commit of the history, so that removed files are gone from it."""
        self._ask(lambda: self._api.super_squash_history(self.repository, repo_type=self.kind))

    def _ask(self, request: Callable[[], Any]) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return request()
            except RepositoryNotFoundError as error:
                # The hub also hides a private repository from a token that may not see it.
                if isinstance(error, GatedRepoError) or error.response.status_code == 401:
                    raise self._refused(error) from error
                raise _MissingError(f"{self.repository} does not exist on the hub") from error
            except HfHubHTTPError as error:
                status = error.response.status_code
                if (status < 500 and status != 429) or attempt == _ATTEMPTS:
                    raise self._refused(error) from error
            except _BROKEN as error:
                if attempt == _ATTEMPTS:
                    raise PublishError(f"{self.repository}: {_told(error)}") from error
            time.sleep(2 ** (attempt - 1) / 4)
        raise AssertionError("the last attempt returns or raises")

    def _failed(self, error: Exception) -> PublishError:
        """Return what the failure of a commit means; an upload's is wrapped by the library."""
        cause = error.__cause__ if type(error) is RuntimeError else error
        if isinstance(cause, HfHubHTTPError):
            if cause.response.status_code == MOVED:
                return MovedError(f"{self.repository} has another head than the commit expected")
            return self._refused(cause)
        if isinstance(cause, _BROKEN):
            return _LostError(f"{self.repository}: {_told(cause)}")
        # The library's text may quote a signed address, so only the error's type is shown.
        kinds = " from ".join(type(one).__name__ for one in (error, error.__cause__) if one)
        return PublishError(
            f"{self.repository}: the upload failed inside the hub's client ({kinds}): nothing was"
            " committed; run `babylon dataset publish` again, and update huggingface_hub if it"
            " fails again"
        )

    def _refused(self, error: HfHubHTTPError) -> PublishError:
        status = error.response.status_code
        if status >= 500 or status == 429:
            return _LostError(f"{self.repository}: the hub answered {status}: the next run goes on")
        remedy = _REMEDIES.get(status, "see the hub's status page")
        return PublishError(f"{self.repository}: the hub answered {status}: {remedy}")


class _MissingError(PublishError):
    """The repository does not exist."""


class _LostError(PublishError):
    """Nobody knows whether the commit was made."""


def commit_once(
    hub: Hub, change: Callable[[Head], tuple[dict[str, Path | bytes], list[str]]], message: str
) -> str:
    """Commit what ``change`` still has to do after the present head → the revision that holds it.

    After a refused parent or a lost answer the head is read again, and ``change`` finds what is
    already there. So the change is made once, whatever happened to an answer.

    Raises:
        PublishError: the hub refused, or gave no answer five times.
    """
    head = hub.create()
    for attempt in range(1, _ATTEMPTS + 1):
        add, delete = change(head)
        if not add and not delete:
            return head.revision
        try:
            return hub.commit(head, add, delete, message=message)
        except (MovedError, _LostError) as error:
            if attempt == _ATTEMPTS:
                raise
            log.warning("%s: the head is read again", error)
            time.sleep(2 ** (attempt - 1) / 4)
        head = hub.create()
    raise AssertionError("the last attempt returns or raises")


def _told(error: BaseException) -> str:
    """Return the kind of an error; its text may quote a header or an address with a signature."""
    return f"the connection failed ({type(error).__name__}): the next run goes on"
