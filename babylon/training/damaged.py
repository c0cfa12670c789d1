"""Files of a checkpoint beside its weights, without which training goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def damage_logged(path: Path, outcome: str) -> Iterator[None]:
    """Context that reads ``path``. If the file is damaged, it ends early and logs the ``outcome``.

    Raises:
        MemoryError: the file may be whole.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise any error of pickle, zip and struct
        logger.warning("%s cannot be used, %s: %s", path, outcome, error)
