"""A named Postgres with recorded play."""

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, SecretStr


class BabylonDatabase(Block):
    """The database that a deployment reads its windows from.

    Example:
        ```python
        from babylon.blocks.database import BabylonDatabase

        database = BabylonDatabase.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon database"
    _block_type_slug = "babylon-database"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "A Postgres with recorded play."

    url: SecretStr = Field(description="Connection URL, postgresql://user:password@host/database.")

    def overrides(self) -> dict[str, dict[str, SecretStr]]:
        return {"database": {"url": self.url}}
