"""Prefect flows: composition only, one screen each.

Importing the package sets Prefect's defaults for a quiet inline run (``babylon.prefect_env``). It
must happen here, because Prefect reads its environment when it is first imported. Where
``babylon up`` runs, inline flows report to its server; variables that are already set win.
"""

import os
from pathlib import Path

from babylon.prefect_env import api_url, inline_environment
from babylon.up.processes import Processes
from babylon.up.services import SERVER

_home = Path(os.path.abspath(os.environ.get("BABYLON_HOME") or ".babylon"))
_defaults = inline_environment(_home)
if (_server := Processes(home=_home).running(SERVER)) and _server.port:
    _defaults["PREFECT_API_URL"] = api_url(_server.port)
for _name, _value in _defaults.items():
    os.environ.setdefault(_name, _value)
Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
