"""A named Postgres with recorded play."""

from typing import ClassVar

from pydantic import Field, SecretStr

from babylon.blocks.settings_block import SettingsBlock, Variables


class BabylonDatabase(SettingsBlock):
    """The database that a deployment reads its windows from.

    Example:
        ```python
        from babylon.blocks.database import BabylonDatabase

        database = BabylonDatabase.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon database"
    _block_type_slug = "babylon-database"
    _description = "A Postgres with recorded play."
    variables: ClassVar[Variables] = {"url": "DATABASE_URL"}

    url: SecretStr = Field(description="Connection URL, postgresql://user:password@host/database.")
