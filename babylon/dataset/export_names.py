"""Names of the formats of an export. The command line imports this module, so it stays small."""

from enum import StrEnum


class ExportTarget(StrEnum):
    """Libraries and formats that a dataset is exported for."""

    TRL = "trl"
    TRL_PREFERENCE = "trl-preference"
    VERIFIERS = "verifiers"
    TINKER = "tinker"
    ATIF = "atif"
    OPENAI = "openai"
