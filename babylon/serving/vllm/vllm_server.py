"""One vLLM server, and the policies that it must hold.

A server that restarts has lost its adapters. So the first load and every later one are the same
operation: compare what the server serves with what it must hold, load what is missing, try it out.
"""

import asyncio
import logging
import os.path
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from babylon.core.errors import ModelError
from babylon.core.processes import Service, Supervised, supervised
from babylon.policies.checkpoint_files import adapter_base, adapts_experts
from babylon.serving.openai_wire import RequestError
from babylon.serving.vllm.command import cause_of_death
from babylon.serving.vllm.vllm_client import VllmClient, VllmDownError, VllmModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPolicy:
    """A checkpoint under its immutable name. ``base``: the model of the server for it."""

    name: str
    version: int
    path: str
    base: str
    is_adapter: bool


def read_policy(name: str, path: str, version: int) -> VllmPolicy:
    """Read a checkpoint's configuration.

    Raises:
        ModelError: there is no checkpoint at ``path``.
    """
    base = _base_of(path)
    is_adapter = base is not None
    return VllmPolicy(
        name=name,
        version=version,
        path=path,
        base=canonical(base if base is not None else path),
        is_adapter=is_adapter,
    )


def canonical(model: str) -> str:
    """Return a directory's real path; a Hugging Face model id stays as it is."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def _base_of(path: str) -> str | None:
    """Return the base model of an adapter, ``None`` for a full model."""
    directory = Path(path)
    if not directory.is_dir():
        if directory.is_absolute():
            raise ModelError(f"no policy loads from {path}: there is no such directory")
        return None  # a Hugging Face model id
    try:
        base = adapter_base(path)
    except ModelError as error:
        raise ModelError(f"no policy loads from {path}: {error}") from error
    if base is None and not (directory / "config.json").exists():
        raise ModelError(
            f"no policy loads from {path}: it has neither config.json nor adapter_config.json"
        )
    return base


log = logging.getLogger(__name__)

POLL_S = 0.5
_REPORT_S = 30.0  # interval of log lines during a long start


class VllmServer:
    """A server at ``client.url``: a child process that runs ``service``, or one at ``ENGINE_URL``.

    ``started_with``: the checkpoint in the service's command. ``policies``: what the server must
    hold. ``up``: it answered the last time.
    """

    def __init__(
        self, client: VllmClient, service: Service | None, started_with: str | None = None
    ) -> None:
        self.client, self.service, self._started_with = client, service, started_with
        self.policies: dict[str, VllmPolicy] = {}
        self.up = False
        self._was_up = False
        self._loading = 0
        self._cards: list[VllmModelCard] = []
        self._tried: set[str] = set()
        self._changing = asyncio.Lock()
        self._process: Supervised | None = None
        self._log_start = 0
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(_end_host_on_bug)

    @property
    def idle(self) -> bool:
        return not self.policies and not self._loading

    async def stop(self) -> None:
        """End the server. A caller that is cancelled does not stop that: another waits for it."""
        if not self._life.cancelling():
            self._life.cancel()
        await asyncio.wait([self._life])

    async def load(self, policy: VllmPolicy) -> None:
        """Hold a policy from now on, and wait until it can answer.

        Raises:
            ModelError: the server does not start.
            RequestError: the server refuses the policy, or has another one of that name.
            VllmDownError: the server at ``ENGINE_URL`` does not answer.
        """
        self._loading += 1
        try:
            while not await self._try_to_hold(policy):
                await asyncio.sleep(POLL_S)
            self.policies[policy.name] = policy
        finally:
            self._loading -= 1

    async def unload(self, name: str) -> None:
        """Unload a policy; a full model without turns stays as long as its server. Running answers
        finish.

        This does not wait for a load. An adapter that the server loads again at this moment may
        stay there, but is no longer a policy.
        """
        policy = self.policies.pop(name)
        if self._comes_and_goes(policy):
            try:
                await self.client.unload(name)
            except (RequestError, VllmDownError) as error:  # the adapter is gone already
                log.info("%s was not loaded: %s", name, error)

    async def ready(self) -> dict[str, str]:
        """Return the policies that can answer now: name → model name at the server."""
        try:
            cards = await self._look()
        except (VllmDownError, TimeoutError):
            return {}
        found = {name: _find(policy, cards) for name, policy in self.policies.items()}
        return {name: card.id for name, card in found.items() if card}

    async def drained(self) -> None:
        """Wait until the server has no request in two successive looks."""
        quiet = 0
        while quiet < 2:
            try:
                quiet = 0 if await self.client.in_flight() else quiet + 1
            except VllmDownError:
                return
            except TimeoutError:
                quiet = 0
            await asyncio.sleep(POLL_S)

    async def _live(self) -> None:
        if self.service is None:
            await self._look_after()
            return
        written = self.service.log
        self._log_start = written.stat().st_size if written.exists() else 0
        async with supervised(self.service) as self._process:
            await self._look_after()

    async def _look_after(self) -> None:
        """Load again what the server has lost, every ``POLL_S``."""
        down_since = told = time.monotonic()
        while True:
            try:
                cards = await self._look()
                for policy in list(self.policies.values()):
                    if not _find(policy, cards):
                        await self._repair(policy)
                down_since = time.monotonic()
            except VllmDownError as error:
                if self._started_with and not os.path.exists(self._started_with):
                    # It took turns with others and is deleted. A new host starts with one of those.
                    raise ModelError(
                        f"no server starts with {self._started_with}: it is gone"
                    ) from error
                if time.monotonic() - max(told, down_since) > _REPORT_S:
                    told = time.monotonic()
                    log.info("%s does not answer for %.0f s", self.client.url, told - down_since)
            except TimeoutError:
                log.warning("%s is busy", self.client.url)
            await asyncio.sleep(POLL_S)

    async def _repair(self, policy: VllmPolicy) -> None:
        """Load a lost policy again, or drop it if the server refuses it now."""
        async with self._changing:
            if policy.name not in self.policies:
                return
            try:
                await self._hold(policy)
            except RequestError as error:
                del self.policies[policy.name]
                log.error("%s is lost: %s", policy.name, error)

    async def _try_to_hold(self, policy: VllmPolicy) -> bool:
        """Hold a policy. Return False if the server is starting or busy."""
        if self._process and self._process.exit_code is not None and not self._was_up:
            service = self._process.service
            cause = cause_of_death(service.log, self._log_start)
            raise ModelError(f"the {service.name} does not start: {cause}")
        try:
            async with self._changing:
                await self._hold(policy)
                return True
        except TimeoutError:
            return False
        except VllmDownError:
            if self.service is None:
                raise
            return False

    async def _hold(self, policy: VllmPolicy) -> None:
        """Load a policy if the server lacks it, and try it out if that was not done."""
        cards = await self._look()
        card = _find(policy, cards)
        if card is None and self._comes_and_goes(policy):
            await self._add(policy, cards)
        elif card is None:
            raise RequestError(400, f"{self._serves(cards)}, not {policy.path}")
        if policy.name not in self._tried:
            await self._try_out(policy, card.id if card else policy.name)

    async def _add(self, policy: VllmPolicy, cards: list[VllmModelCard]) -> None:
        if policy.is_adapter and all(_model(card) != policy.base for card in _bases(cards)):
            raise RequestError(
                400, f"{policy.path} is an adapter of {policy.base}, but {self._serves(cards)}"
            )
        if other := next((card for card in cards if card.id == policy.name), None):
            known = f"{policy.name!r} is {other.root} at {self.client.url}"
            raise RequestError(409, f"{known}: load {policy.path} under another name")
        experts = await asyncio.to_thread(adapts_experts, policy.path)
        await self.client.load(policy.name, policy.path, experts=experts)
        log.info("%s holds %s", self.client.url, policy.name)

    async def _try_out(self, policy: VllmPolicy, name: str) -> None:
        try:
            await self.client.draw_one_token(name)
        except RequestError as error:
            if self._comes_and_goes(policy):
                await self.client.unload(policy.name)
            raise RequestError(400, f"{policy.path} cannot answer: {error}") from error
        self._tried.add(policy.name)

    async def _look(self) -> list[VllmModelCard]:
        """Return what the server serves, or what it served last if it is busy."""
        try:
            self._cards = await self.client.cards()
        except VllmDownError:
            self.up, self._cards, self._tried = False, [], set()
            raise
        except TimeoutError:
            if not self.up:
                raise
        if not self.up:
            log.info("%s answers", self.client.url)
        self.up = self._was_up = True
        return self._cards

    def _comes_and_goes(self, policy: VllmPolicy) -> bool:
        return policy.is_adapter or self.client.turns

    def _serves(self, cards: list[VllmModelCard]) -> str:
        served = ", ".join(map(_model, _bases(cards))) or "nothing"
        return f"the vLLM server at {self.client.url} serves {served}"


def _end_host_on_bug(life: "asyncio.Task[None]") -> None:
    """End the host, which is then started again, if a server's task failed: nothing would look
    after that server."""
    if not life.cancelled() and (error := life.exception()):
        log.critical("the host cannot go on", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


def _bases(cards: list[VllmModelCard]) -> list[VllmModelCard]:
    return [card for card in cards if card.parent is None]


def _model(card: VllmModelCard) -> str:
    return canonical(card.root or card.id)


def _find(policy: VllmPolicy, cards: list[VllmModelCard]) -> VllmModelCard | None:
    """Return the card of a policy: an adapter's own, or for a full model any that the server was
    started with."""
    if policy.is_adapter:
        of_name = (card for card in cards if card.id == policy.name and card.root == policy.path)
        return next(of_name, None)
    same = [card for card in _bases(cards) if _model(card) == policy.base]
    return next((card for card in same if card.id == policy.name), same[0] if same else None)
