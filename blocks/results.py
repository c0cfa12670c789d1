"""Results of runs in the object store, so that a parent reads what a worker elsewhere returned."""

import asyncio
from pathlib import Path

from prefect.filesystems import WritableFileSystem
from pydantic import Field, HttpUrl

from babylon.core.home import make_directory
from babylon.core.objects import read, replace
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import results


class BabylonResults(WritableFileSystem):
    """Manifests of stages, kept where ``ARTIFACT_STORE`` of each machine says.

    Example:
        ```python
        from babylon.blocks.results import BabylonResults

        results = BabylonResults.load("stored")
        ```
    """

    _block_type_name = "Babylon results"
    _block_type_slug = "babylon-results"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/advanced/results")
    _description = "Results of runs in the object store of the worker's settings."

    folder: str = Field(default="", description="Folder of the results below the usual one.")

    async def read_path(self, path: str) -> bytes:
        """Return the bytes of a result; ``ValueError`` if there is none, as Prefect expects."""
        return await asyncio.to_thread(self._read, path)

    async def write_path(self, path: str, content: bytes) -> None:
        """Write a result."""
        await asyncio.to_thread(self._write, path, content)

    def _read(self, path: str) -> bytes:
        home = load_settings().home
        try:
            return read(home, self._place(home.root, path))
        except FileNotFoundError as error:
            raise ValueError(f"there is no result {path}") from error

    def _write(self, path: str, content: bytes) -> None:
        home = load_settings().home
        file = self._place(home.root, path)
        make_directory(file.parent)
        file.write_bytes(content)
        replace(home, file)

    def _place(self, home: Path, path: str) -> Path:
        return results(home) / self.folder / path
