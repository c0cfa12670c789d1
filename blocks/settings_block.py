"""The base of all blocks: each field of a block is a setting, named by its variable."""

from collections.abc import Mapping
from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import HttpUrl, SecretStr

from babylon.blocks.form import Overrides
from babylon.core.errors import ConfigError
from babylon.core.settings import fields, variable_of

Variables = Mapping[str, str]


class SettingsBlock(Block):
    """Settings under a name, edited in Prefect's UI. A field that is empty changes nothing."""

    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    variables: ClassVar[Variables]
    """Fields, and the environment variables of their settings."""

    def overrides(self) -> Overrides:
        """Return the fields that are set, as settings by group.

        Raises:
            ConfigError: this version has no such setting.
        """
        places = {variable_of(field): (group, name) for group, name, field in fields()}
        found: dict[str, dict[str, Any]] = {}
        for own, variable in self.variables.items():
            # A text that a person cleared in the UI is empty, and not missing.
            if (value := getattr(self, own)) in (None, "", SecretStr("")):
                continue
            if variable not in places:
                raise ConfigError(f"{type(self).__name__}: this version has no setting {variable}")
            group, name = places[variable]
            found.setdefault(group, {})[name] = value
        return found
