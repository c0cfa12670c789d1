"""Register the block types, then run ``prefect`` with the arguments: for ``babylon up``.

One process does both, because importing Prefect takes seconds.
"""

from prefect.blocks.core import Block
from prefect.cli import app
from pydantic import HttpUrl

from babylon.blocks.load import KINDS
from babylon.blocks.results import BabylonResults
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import RESULTS_BLOCK, prefect_api
from babylon.ops.status_page.logo import logo_url

if __name__ == "__main__":
    settings = load_settings()
    # A UI of another machine or of Prefect Cloud cannot show a picture of this one's loopback.
    if prefect_api(settings.home, settings.prefect).embedded:
        kinds: list[type[Block]] = [*KINDS.values(), BabylonResults]
        for kind in kinds:
            kind._logo_url = HttpUrl(logo_url(settings.serving.admin_port))
    for kind in KINDS.values():
        kind.register_type_and_schema()
    if settings.home.store:
        BabylonResults().save(RESULTS_BLOCK.partition("/")[2], overwrite=True)
    app()
