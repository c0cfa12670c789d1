"""Renewal, expiry and outcome of proposals, also during outages of the database."""

import asyncio
import logging
from datetime import datetime, timedelta

import pytest

from babylon.core.errors import ModelError
from babylon.store import Store, proposals
from babylon.store.proposals import open_proposals, proposed
from tests.deployments import outcomes, three_policies

HIDE = "ALTER TABLE babylon.proposals RENAME TO hidden"
SHOW = "ALTER TABLE babylon.hidden RENAME TO proposals"


@pytest.fixture(autouse=True)
async def policies(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "RENEW_S", 0.02)
    await three_policies(store)


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in caplog.text:
            await asyncio.sleep(0.01)


async def open_until(store: Store) -> datetime:
    (proposal,) = await open_proposals(store)
    return proposal.open_until


async def test_renewal_survives_an_outage(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with proposed(store, 1, "test"):
        await store.pool.execute(HIDE)
        await until_logged(caplog, "could not be renewed, trying again")
        await store.pool.execute(SHOW)
        before = await open_until(store)
        async with asyncio.timeout(20):
            while await open_until(store) < before + timedelta(milliseconds=1):
                await asyncio.sleep(0.01)
    assert await outcomes(store) == ["committed"]


async def test_expired_proposals_stay_closed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with proposed(store, 1, "test") as proposal_id:
        await store.pool.execute("UPDATE babylon.proposals SET open_until = '2025-11-14 UTC'")
        await until_logged(caplog, f"proposal {proposal_id} expired")
        assert not await open_proposals(store)


async def test_an_outcome_that_cannot_be_stored_hides_no_error(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError, match="of the block"):
        async with proposed(store, 1, "test"):
            await store.pool.execute(HIDE)
            raise ModelError("of the block")
    assert "will expire, its outcome (of the block) is not stored" in caplog.text
    await store.pool.execute(SHOW)
    assert len(await open_proposals(store)) == 1


async def test_an_outcome_quotes_no_prompt_that_an_error_of_another_library_names(
    store: Store,
) -> None:
    with pytest.raises(KeyError, match="my card is"):
        async with proposed(store, 1, "arena", "played"):
            raise KeyError("the prompt: my card is 4111 1111 1111 1111")
    with pytest.raises(ModelError):
        async with proposed(store, 1, "arena", "played"):
            raise ModelError("policy 1 does not load: look at the log")
    quoted, told = await outcomes(store)
    assert quoted is not None and quoted.startswith("KeyError at test_proposals.py:")
    assert "card" not in quoted and told == "policy 1 does not load: look at the log"


async def test_a_broken_renewal_is_logged_with_its_traceback(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewing = asyncio.Event()

    def broken(status: str) -> int:
        renewing.set()
        return int("no number")

    monkeypatch.setattr(proposals, "affected", broken)
    async with proposed(store, 1, "test"):
        await renewing.wait()
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.message.startswith("renewing proposal") and record.exc_info
