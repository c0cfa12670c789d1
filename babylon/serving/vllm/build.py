"""Which vLLM another python has. It lives in an environment of its own, and is only looked at."""

import os
import subprocess

from babylon.core.errors import ConfigError
from babylon.core.processes import SUPERVISOR

_LEADS_TO_OURS = (SUPERVISOR, "PYTHONPATH", "PYTHONHOME")
_LOOK = """
from importlib.metadata import packages_distributions, version
name = packages_distributions()["vllm"][0]
print(name, version(name))
"""
_PATIENCE_S = 60


def vllm_build(python: str) -> str:
    """Distribution and version, such as ``vllm 0.32.0``.

    Raises:
        ConfigError: there is no such python, or no vLLM in its environment.
    """
    try:
        looked = subprocess.run(
            [python, "-c", _LOOK],
            env=environment_of_others(),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
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
    """Whether a request to the base model may get an adapter's weights when one to an adapter is
    computed beside it: on CPUs the last adapter slot stands for "none" (vllm-project/vllm#48421).
    """
    return "cpu" in build


def environment_of_others() -> dict[str, str]:
    """Ours, without the variables that are about our own Python."""
    return {name: value for name, value in os.environ.items() if name not in _LEADS_TO_OURS}
