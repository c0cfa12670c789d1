from datetime import UTC, datetime, timedelta

from babylon.core.windows import sleep_until


async def test_sleeping_ends_at_the_moment() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=0.2)
    await sleep_until(moment)
    assert datetime.now(UTC) >= moment
    await sleep_until(moment - timedelta(hours=1))  # past: at once
