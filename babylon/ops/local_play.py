"""Serving and recording in one program, for tasks that are played where they are trained."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from babylon.core.api_keys import local_key
from babylon.core.settings_loading import load_settings
from babylon.recorder import AsyncPlayClient
from babylon.serving.serve import serving
from babylon.stages.champion import ensure_champion
from babylon.store import open_store


@asynccontextmanager
async def local_play(**overrides: Any) -> AsyncIterator[tuple[AsyncOpenAI, AsyncPlayClient]]:
    """Serve the champion of the home, and yield a client of it and a recorder of play.

    A home without a policy begins with ``BASE_MODEL``. Postgres, engine and gateway stop at the
    end of the block. ``overrides`` go before the environment's settings, by group.

    Raises:
        BabylonError: A setting is wrong, a port is busy, or a process does not start.
    """
    settings = load_settings(**overrides)
    home = settings.home
    async with open_store(settings) as store:
        await ensure_champion(store, home, settings.model, settings.seed)
        async with serving(settings.serving, home, settings.environment()) as running:
            key = str(local_key(home.root))
            async with (
                AsyncOpenAI(base_url=running.url, api_key=key) as client,
                AsyncPlayClient(running.url.removesuffix("/v1"), key) as recorder,
            ):
                yield client, recorder
