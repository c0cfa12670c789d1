"""Calls to a policy by its immutable name, at gateways that first prove who they are.

Checks, the gate and the arena ask the engine that serves. Their calls have the arm ``pinned``, no
agent and no trajectory, so neither training nor experiments see them. Each gateway has a key for
such calls (``store/quarantine.py``); the home's key could reach another program at the address.
Calls of whole games are many, and are not recorded (``match_key``).
"""

import asyncio
import hmac
import secrets
from collections.abc import Collection, Mapping

import aiohttp

from babylon.core.errors import ServingError
from babylon.core.probes import IDENTITY_PATH, identity_proof
from babylon.store.gateways import GatewayRow

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
BUSY = frozenset({429, 503})
PAUSE_S = 1.0
TIMEOUT_S = 300.0  # one call, including its wait in the queue
_TRIES = 5
_IDENTITY_TIMEOUT = aiohttp.ClientTimeout(total=5)


def session() -> aiohttp.ClientSession:
    """Return a client session whose calls end after ``TIMEOUT_S``."""
    connector = aiohttp.TCPConnector(limit=0)  # the callers limit their calls
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector
    )


async def other_program(
    session: aiohttp.ClientSession, gateway: GatewayRow, key: str | None
) -> str | None:
    """Return the reason why the gateway at the address is not the one that announced it."""
    if key is None:
        return (
            f"{gateway.gateway_id} is of an earlier version, which cannot prove that it"
            " answers there: restart it with this version"
        )
    nonce = secrets.token_hex(16)
    url = f"{gateway.url.rstrip('/')}{IDENTITY_PATH}?nonce={nonce}"
    problem = ""
    for attempt in range(_TRIES):
        await asyncio.sleep(attempt and PAUSE_S)
        try:
            async with session.get(url, timeout=_IDENTITY_TIMEOUT) as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            continue
        if hmac.compare_digest(said, identity_proof(key, gateway.gateway_id, nonce).encode()):
            return None
        return (
            f"another program answers at {gateway.url}: set GATEWAY_ADDRESS of"
            f" {gateway.gateway_id} to an address of its own that this machine reaches"
        )
    return f"nothing answers at {gateway.url} ({problem})"


async def completion(
    session: aiohttp.ClientSession,
    gateway: GatewayRow,
    key: str,
    body: Mapping[str, object],
    *,
    path: str = CHATS,
    tries: int = _TRIES,
    again: Collection[int] = BUSY,
) -> tuple[bytes, str | None]:
    """Return a completion, and the version that answered by the gateway's header.

    A gateway that answers with a status of ``again``, or not at all, is asked again, ``tries``
    times in all.

    Raises:
        ServingError: there is no answer. The text begins with the last status, if there was one.
    """
    url = f"{gateway.url.rstrip('/')}{path}"
    headers, problem = {"Authorization": f"Bearer {key}"}, ""
    for attempt in range(tries):
        await asyncio.sleep(attempt and PAUSE_S)
        try:
            async with session.post(url, json=body, headers=headers) as response:
                if response.status == 200:
                    return await response.read(), response.headers.get("x-model-version")
                problem = f"{response.status} {(await response.text())[:200]}"
                if response.status not in again:
                    break
        except TimeoutError:  # not again: it waited for minutes
            problem = f"no answer within {TIMEOUT_S:g} s"
            break
        except aiohttp.ClientError as error:
            problem = str(error) or type(error).__name__
    raise ServingError(problem)
