"""Register the block types, then run ``prefect`` with the arguments: for ``babylon up``.

One process does both, because importing Prefect takes seconds.
"""

from prefect.cli import app

from babylon.blocks.load import KINDS
from babylon.blocks.results import BabylonResults
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import RESULTS_BLOCK

if __name__ == "__main__":
    for kind in KINDS.values():
        kind.register_type_and_schema()
    if load_settings().home.store:
        BabylonResults().save(RESULTS_BLOCK.partition("/")[2], overwrite=True)
    app()
