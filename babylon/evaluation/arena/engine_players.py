"""Policies that answer through the engine that serves, so that no process loads a model of its own
to play a match or to answer recorded prompts again.

Gateways load a policy that is proposed, and answer calls that name its version. A policy therefore
plays with the weights, the precision and the sampler with which agents meet it. Only where no
gateway runs, and for players that are not registered, checkpoints are loaded into this process.

Each reply has the seed that it has in process, and the embedded engine and vLLM give each seeded
request a generator of its own, so equal logits give equal tokens. In another batch logits are
rounded differently, so now and then a draw yields another token, and the reply goes on from there.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from babylon.core.api_keys import match_key
from babylon.core.errors import ServingError
from babylon.evaluation.arena.play import Chat, Decide, replies
from babylon.evaluation.arena.players import Player
from babylon.game.market.orders import MAX_REPLY_TOKENS
from babylon.serving import pinned_calls
from babylon.store.connection import Store
from babylon.store.gateways import LOAD_S, GatewayRow, live_gateways, wait_until_loaded
from babylon.store.proposals import proposed
from babylon.store.quarantine import probe_keys
from babylon.store.routes import may_serve

AT_ONCE = 256  # calls at one gateway: more than an engine samples together, less than a queue holds
_TRIES = 300  # an engine that restarts loads its policies again, which takes minutes
_SILENT_TRIES = 30  # more than a gateway on a busy machine is silent
_AGAIN = frozenset({404, 408, 429, 500, 502, 503, 504})
AUTHOR = "arena"


class RefusedCallError(ServingError):
    """The engine takes no such call (400): its prompt does not fit, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """Gateways that hold all policies of a match, and their keys for its calls."""

    store: Store
    model: str
    gateways: Sequence[GatewayRow]
    keys: list[str]
    session: aiohttp.ClientSession
    rooms: Sequence[asyncio.Semaphore]

    def decide(self, version: int, seed: int, loop: asyncio.AbstractEventLoop) -> Decide:
        """Return a policy's decisions. They are asked for in another thread than the loop's."""

        def ask(chats: Sequence[Chat], seeds: Sequence[int]) -> list[str]:
            found = asyncio.run_coroutine_threadsafe(self.answers(version, chats, seeds), loop)
            return found.result()

        return replies(ask, seed)

    async def answers(self, version: int, chats: Sequence[Chat], seeds: Sequence[int]) -> list[str]:
        """Return a reply to each chat, drawn with its seed."""
        asked = enumerate(zip(chats, seeds, strict=True))
        return await asyncio.gather(
            *(self._one(number, version, chat, seed) for number, (chat, seed) in asked)
        )

    async def _one(self, number: int, version: int, chat: Chat, seed: int) -> str:
        body = {
            "messages": chat,
            "max_tokens": MAX_REPLY_TOKENS,
            "temperature": 1.0,
            "seed": seed,
        }
        answer = await self.ask(number, version, pinned_calls.CHATS, body)
        return msgspec.json.decode(answer, type=_Completion).choices[0].message.content or ""

    async def ask(self, number: int, version: int, path: str, body: Mapping[str, object]) -> bytes:
        """Return a policy's answer. Calls go to the gateways in turn, by their ``number``.

        Raises:
            RefusedCallError: the engine takes no such call.
            ServingError: there is no answer, or another policy's.
        """
        place = number % len(self.gateways)
        gateway, name = self.gateways[place], f"{self.model}-v{version}"
        async with self.rooms[place]:
            answer, served = await self._completion(place, version, path, {"model": name, **body})
        if served != str(version):
            raise ServingError(f"policy {served} answered for {name} at {gateway}: restart it")
        return answer

    async def _completion(
        self, place: int, version: int, path: str, body: Mapping[str, object]
    ) -> tuple[bytes, str | None]:
        gateway, status = self.gateways[place], ""
        for _ in range(_TRIES):
            key = self.keys[place]
            try:
                return await pinned_calls.completion(
                    self.session, gateway, key, body, path=path, tries=_TRIES, again=_AGAIN
                )
            except ServingError as error:
                status = str(error).partition(" ")[0]  # the rest may quote the chat
            if status != "401":
                break
            # A gateway that was started again has another key, which it announces in seconds.
            known = (await probe_keys(self.store, [gateway.gateway_id])).get(gateway.gateway_id)
            if await pinned_calls.other_program(self.session, gateway, known) is None and known:
                self.keys[place] = str(match_key(known))
            if self.keys[place] == key:
                await asyncio.sleep(pinned_calls.PAUSE_S)
        kind = RefusedCallError if status == "400" else ServingError
        raise kind(
            f"policy {version} does not answer at {gateway} ({status}): look at its engine's log"
        )


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@asynccontextmanager
async def entered(
    store: Store, model: str, seed: int, players: Sequence[Player]
) -> AsyncIterator[list[Decide]]:
    """Yield the players' decisions while their policies are loaded.

    Args:
        model: name of the served model, with which the gateways begin the names of policies.

    Raises:
        ServingError: no gateway holds all policies.
        ModelError: a checkpoint does not load.
    """
    known = [player.version for player in players if player.version is not None]
    # No gateway loads a policy that never serves again.
    versions = [version for version in known if await may_serve(store, version)]
    async with engine_table(store, model, versions) as table:
        loop = asyncio.get_running_loop()
        yield [
            await asyncio.to_thread(player.enter)
            if table is None or player.version is None or player.version not in versions
            else table.decide(player.version, seed, loop)
            for player in players
        ]


@asynccontextmanager
async def engine_table(
    store: Store, model: str, versions: Sequence[int]
) -> AsyncIterator[EngineTable | None]:
    """Have these policies loaded by the gateways while the block runs; None: there is no gateway.

    Raises:
        ServingError: no gateway holds all policies.
    """
    if not versions or not await live_gateways(store):
        yield None
        return
    async with AsyncExitStack() as stack:
        for version in versions:
            await stack.enter_async_context(proposed(store, version, AUTHOR, "played"))
        holders = [await _holders(store, version) for version in versions]
        common = set.intersection(*({one.gateway_id for one in rows} for rows in holders))
        keys = await probe_keys(store, [*common])
        session = await stack.enter_async_context(pinned_calls.session())
        # A gateway that holds one policy only cannot play: pairs must meet the same engine.
        problem = "they hold different policies"
        sound: list[GatewayRow] = []
        for gateway in holders[-1]:
            if gateway.gateway_id in common:
                key = keys.get(gateway.gateway_id)
                other = await pinned_calls.other_program(session, gateway, key)
                problem = other or problem
                sound += [] if other else [gateway]
        if not sound:
            raise ServingError(f"no gateway can play a match: {problem}")
        yield EngineTable(
            store=store,
            model=model,
            gateways=sound,
            keys=[str(match_key(keys[one.gateway_id])) for one in sound],
            session=session,
            rooms=[asyncio.Semaphore(AT_ONCE) for _ in sound],
        )


async def _holders(store: Store, version: int) -> Sequence[GatewayRow]:
    """Return the gateways that hold a proposed policy. One that was silent for long is awaited."""
    for _ in range(_SILENT_TRIES):
        if gateways := await wait_until_loaded(store, version, LOAD_S):
            return gateways
        await asyncio.sleep(pinned_calls.PAUSE_S)
    return ()
