"""Version of the vLLM in another Python environment. It is never imported here."""

import os
import subprocess

from babylon.core.errors import ConfigError
from babylon.core.processes import SUPERVISOR

_OWN_VARIABLES = (SUPERVISOR, "PYTHONPATH", "PYTHONHOME")
_LOOK = """
from importlib.metadata import packages_distributions, version
name = packages_distributions()["vllm"][0]
print(name, version(name))
"""
_TIMEOUT_S = 60


def vllm_build(python: str) -> str:
    """Return distribution and version, such as ``vllm 0.32.0``.

    Raises:
        ConfigError: ``python`` does not run, or its environment has no vLLM.
    """
    try:
        looked = subprocess.run(
            [python, "-c", _LOOK],
            env=environment_of_others(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"VLLM_PYTHON={python!r} does not run: {error}") from error
    if looked.returncode:
        raise ConfigError(
            f"VLLM_PYTHON={python!r} has no vLLM: install it there, or name the python of an"
            " environment that has it"
        )
    return looked.stdout.strip()


def mixes_base_with_adapters(build: str) -> bool:
    """Return True if a build may answer for the base model with an adapter's weights.

    It happens on CPUs when a batch has requests to both: the last adapter slot stands for "none"
    (vllm-project/vllm#48421).
    """
    return "cpu" in build


def environment_of_others() -> dict[str, str]:
    """Return this process's environment without the variables for its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
