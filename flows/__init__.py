"""Prefect flows: composition only, one screen each.

Importing the package sets Prefect's defaults for a quiet inline run
(``babylon.ops.prefect_env``). It
must happen here, because Prefect reads its environment when it is first imported. Where
``babylon up`` runs, inline flows report to its server; variables that are already set win.
"""

import os
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from babylon.ops.prefect_env import api_url, inline_environment
from babylon.ops.up.processes import Processes
from babylon.ops.up.services import SERVER

_HEALTH_S = 5.0


def _answers(api: str) -> bool:
    """A server is on record for seconds before it answers, and Prefect does not wait for it."""
    try:
        with urlopen(f"{api}/health", timeout=_HEALTH_S):
            return True
    except (OSError, HTTPException):  # then the run needs no server
        return False


_home = Path(os.path.abspath(os.environ.get("BABYLON_HOME") or ".babylon"))
_defaults = inline_environment(_home)
if "PREFECT_API_URL" not in os.environ:
    _server = Processes(home=_home).running(SERVER)
    if _server and _server.port and _answers(_api := api_url(_server.port)):
        _defaults["PREFECT_API_URL"] = _api
for _name, _value in _defaults.items():
    os.environ.setdefault(_name, _value)
Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
