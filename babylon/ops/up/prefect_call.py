"""One request to Prefect's API."""

from typing import Any

import aiohttp

from babylon.core.discretion import without_passwords
from babylon.core.errors import ServingError
from babylon.ops.prefect_env import PrefectApi

TIMEOUT = aiohttp.ClientTimeout(total=60)  # a busy Prefect lets writers wait


async def call(
    http: aiohttp.ClientSession, api: PrefectApi, method: str, path: str, body: object = None
) -> Any:
    """Send a request and return the answer's JSON, ``None`` if it has none.

    Raises:
        ServingError: Prefect refused or does not answer.
    """
    url = f"{api.url}/{path}"
    shown = without_passwords(url)
    try:
        async with http.request(
            method, url, json=body, headers=api.headers, timeout=TIMEOUT
        ) as answer:
            if answer.status >= 400:
                said = f"{answer.status} {await answer.text()}"
                raise ServingError(
                    f"Prefect refused {method} {shown}: {said}{_remedy(answer.status)}"
                )
            return None if answer.status == 204 else await answer.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        again = (
            "`babylon down`, then `babylon up` starts it again"
            if api.embedded
            else "start that server, or correct PREFECT_API_URL"
        )
        raise ServingError(
            f"Prefect does not answer {method} {shown} ({str(error) or type(error).__name__}):"
            f" {again}"
        ) from error


def _remedy(status: int) -> str:
    if status not in (401, 403):
        return ""
    return ": set PREFECT_API_AUTH_STRING for a server, PREFECT_API_KEY for Prefect Cloud"
