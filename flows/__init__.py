"""Prefect flows: composition only, one screen each.

Importing the package prepares Prefect's environment, which Prefect reads when it is imported.
"""

import os
from pathlib import Path

from babylon.ops.prefect_env import prepare_inline_run

prepare_inline_run(Path(os.path.abspath(os.environ.get("BABYLON_HOME") or ".babylon")))
