"""Limits of a key over all gateways: calls at a time, requests and tokens in a minute.

A gateway counts what it admits, and reads twice a second what the others did. So a limit holds to
within what the others admit in half a second, and no call waits for the database. While the
database is away, each gateway admits its share: the limit, divided by the gateways known last.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.exchange import Exchange
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.key_usage import KeyUsage, exchange_usage, live_gateway_count

EXCHANGE_S = 0.5
STALE_S = 5.0
"""Age at which the others' counts no longer say anything."""


class KeyLimits:
    """Counts the requests of the keys that have limits. Others cost nothing."""

    def __init__(self, store: Store, gateway_id: str) -> None:
        self._store, self._gateway_id = store, gateway_id
        self._own: dict[str, KeyUsage] = {}
        self._others: dict[str, list[KeyUsage]] = {}
        self._gateways, self._read_at = 1, -STALE_S
        self._used = asyncio.Event()
        self._due_since: float | None = None  # what the database has not taken since then

    @contextmanager
    def admitted(self, principal: Principal) -> Iterator[None]:
        """Count a call while the block runs.

        Raises:
            RequestError: 429, the key has reached a limit.
        """
        if not principal.limited:
            yield
            return
        key_id, minute = principal.key_id, _minute()
        own = self._counted(key_id, minute)
        self._check(principal, own)
        self._own[key_id] = replace(own, requests=own.requests + 1, running=own.running + 1)
        self._demand()
        try:
            yield
        finally:
            own = self._counted(key_id, _minute())
            self._own[key_id] = replace(own, running=own.running - 1)

    def count_request(self, principal: Principal) -> None:
        """Count a request that is no call: it takes no tokens, and none of the key's places.

        Raises:
            RequestError: 429, the key has sent its requests of this minute.
        """
        if principal.requests_per_minute is None:
            return
        own = self._counted(principal.key_id, _minute())
        self._check(principal, own, calls=False)
        self._own[principal.key_id] = replace(own, requests=own.requests + 1)
        self._demand()

    def spend(self, exchange: Exchange) -> None:
        """Count the tokens of a call that ended."""
        if exchange.key_id in self._own:
            own = self._counted(exchange.key_id, _minute())
            self._own[exchange.key_id] = replace(own, tokens=own.tokens + sum(exchange.used))

    async def run(self) -> NoReturn:
        while True:
            await self._used.wait()
            self._used.clear()
            with suppress(*UNREACHABLE):  # the follower reports them
                await self._exchange()
            if self._own or self._due_since is not None:  # the others forget what they do not hear
                self._demand()
            await asyncio.sleep(EXCHANGE_S)

    def _demand(self) -> None:
        """Ask for an exchange. One that is asked for and fails shows that the database is away."""
        self._used.set()
        if self._due_since is None:
            self._due_since = time.monotonic()

    async def _exchange(self) -> None:
        minute, sent = _minute(), {}
        for key_id in list(self._own):
            own = self._counted(key_id, minute)
            if own == KeyUsage(minute):
                self._others.pop(key_id, None)
                del self._own[key_id]
            sent[key_id] = own
        self._others = await exchange_usage(self._store, self._gateway_id, sent)
        self._gateways = max(1, await live_gateway_count(self._store))
        self._read_at, self._due_since = time.monotonic(), None

    def _counted(self, key_id: str, minute: int) -> KeyUsage:
        own = self._own.get(key_id)
        if own is None or own.minute != minute:
            return KeyUsage(minute, running=own.running if own else 0)
        return own

    def _check(self, principal: Principal, own: KeyUsage, *, calls: bool = True) -> None:
        clock = time.monotonic()
        # A gateway whose keys rested has not read the others' calls. The next exchange brings them.
        known = self._due_since is None or clock - self._due_since < STALE_S
        others = self._others.get(principal.key_id, []) if clock - self._read_at < STALE_S else []
        now = [one for one in others if one.minute == own.minute]
        wait_s = 60 - int(time.time()) % 60
        running = sum(one.running for one in (own, *others))
        requests = sum(one.requests for one in (own, *now))
        tokens = sum(one.tokens for one in (own, *now))
        limits = [
            (principal.requests_per_minute, requests, "requests in this minute", wait_s),
            (principal.max_concurrency, running, "running calls", 1),
            (principal.tokens_per_minute, tokens, "tokens in this minute", wait_s),
        ]
        for limit, used, unit, retry_s in limits if calls else limits[:1]:
            if limit is not None and used >= (limit if known else max(1, limit // self._gateways)):
                raise RequestError(
                    429,
                    f"key {principal.key_id} has {used} {unit}; its limit is {limit}: wait"
                    f" {retry_s} s",
                    code="rate_limit_exceeded",
                    retry_after_s=retry_s,
                )


def _minute() -> int:
    """Return the minute since 1970, by which all gateways count."""
    return int(time.time()) // 60
