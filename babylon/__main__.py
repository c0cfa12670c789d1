"""``python -m babylon``: the same as the console script ``babylon``."""

from babylon.cli import main

main()
