"""Flow tests have a Prefect of their own; it reads its environment when it is first imported."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from babylon.cli.flow_runs import prepare_prefect
from babylon.core.home import Home
from babylon.core.settings import PrefectSettings

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="babylon-prefect-")
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "900"  # on a busy machine
prepare_prefect(Home(Path(os.environ["PREFECT_HOME"])), PrefectSettings())
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
