"""Register the block types, then run ``prefect`` with the arguments: for ``babylon up``.

One process does both, because importing Prefect takes seconds.
"""

from prefect.cli import app

from babylon.blocks.load import KINDS

if __name__ == "__main__":
    for kind in KINDS.values():
        kind.register_type_and_schema()
    app()
