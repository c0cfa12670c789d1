"""Names of the formats. The command line imports this module, so it stays small."""

from enum import StrEnum


class Format(StrEnum):
    """Formats that can be imported."""

    GAME = "game"
    ATIF = "atif"
    CHAT = "chat"
    OTEL = "otel"
    OPENINFERENCE = "openinference"
    LANGFUSE = "langfuse"
    LANGSMITH = "langsmith"
    SHAREGPT = "sharegpt"


class Written(StrEnum):
    """Formats that can be exported."""

    GAME = "game"
    ATIF = "atif"
    CHAT = "chat"
