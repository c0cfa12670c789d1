"""Files of a checkpoint beside its weights, without which training goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from babylon.training.grpo.forward import is_out_of_memory

logger = logging.getLogger(__name__)


@contextmanager
def damage_logged(path: Path, outcome: str) -> Iterator[None]:
    """Context that reads ``path``. If the file is damaged, it ends early and logs the ``outcome``.

    Raises:
        MemoryError, RuntimeError, OSError: memory or the disk failed, so the file may be whole.
    """
    try:
        yield
    except Exception as error:  # a damaged file can raise any error of pickle, zip and struct
        if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno):
            raise
        logger.warning("%s cannot be used, %s: %s", path, outcome, error)
