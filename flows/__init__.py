"""Prefect flows: composition only, one screen each.

Importing the package sets Prefect's defaults for a quiet inline run (``babylon.prefect_env``). It
must happen here, because Prefect reads its environment when it is first imported. Under
``babylon up`` the same variables are already set, and those win.
"""

import os
from pathlib import Path

from babylon.prefect_env import inline_environment

_home = Path(os.path.abspath(os.environ.get("BABYLON_HOME") or ".babylon"))
_home.mkdir(parents=True, exist_ok=True)
for _name, _value in inline_environment(_home).items():
    os.environ.setdefault(_name, _value)
