"""How a vLLM server is started, and why it did not."""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from babylon.core.errors import ConfigError, ServingError
from babylon.core.settings import Settings
from babylon.serving.ports import require_free_port
from babylon.serving.supervise import Service
from babylon.serving.vllm.build import vllm_build

# Two arms, what drains, and what is being loaded; on the CPU's side also what to roll back to.
_MAX_LORAS, _MAX_CPU_LORAS = 4, 8
# Rank of the adapters that are trained here.
_MAX_LORA_RANK = 16
_PORTS = 100  # above ENGINE_PORT
_CAUSE = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.M)


def require_vllm(settings: Settings) -> str:
    """The vLLM that the settings name: what is installed, or the address of a server.

    Raises:
        ConfigError: they name none, or it is not there.
    """
    extra_arguments(settings.serving.vllm_args)
    if settings.serving.engine_url:
        return settings.serving.engine_url
    if settings.serving.vllm_python is None:
        raise ConfigError(
            "ENGINE=vllm needs VLLM_PYTHON, the python of an environment with vLLM in it, or"
            " ENGINE_URL, a vLLM server that runs"
        )
    return vllm_build(settings.serving.vllm_python)


def vllm_service(settings: Settings, base: str, name: str, port: int) -> Service:
    """A server of ``base``, called ``name``, on loopback.

    Logprobs are those of the distribution that was sampled, which at the model's own sampling
    defaults (``--generation-config``) would not be the one that the request asks for.
    """
    assert settings.serving.vllm_python is not None  # require_vllm came first
    command = [
        *(sys.executable, "-m", "babylon.serving.vllm.process_group"),
        *(settings.serving.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", base, "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *("--enable-lora", "--max-loras", str(_MAX_LORAS)),
        *("--max-cpu-loras", str(_MAX_CPU_LORAS), "--max-lora-rank", str(_MAX_LORA_RANK)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *extra_arguments(settings.serving.vllm_args),
    ]
    return Service(
        name=f"vLLM server of {base}",
        command=command,
        log=settings.home.logs / f"vllm-{port}.log",
        environment={
            **dict.fromkeys(settings.environment(), ""),  # nobody else's secrets
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )


def extra_arguments(given: str) -> list[str]:
    """``VLLM_ARGS`` as a shell would read them; they come last, and so win.

    Raises:
        ConfigError: a quotation mark is open.
    """
    try:
        return shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"VLLM_ARGS={given!r}: {error}") from error


def free_port(settings: Settings, taken: Iterable[int]) -> int:
    """The first port above ``ENGINE_PORT`` that nobody has or will have.

    Raises:
        ServingError: there is none.
    """
    reserved = {*taken, settings.serving.endpoint_port, settings.prefect.port}
    first = settings.serving.engine_port + 1
    for port in range(first, first + _PORTS):
        if port not in reserved:
            try:
                require_free_port(port, user="a vLLM server", variable="ENGINE_PORT")
            except ServingError:
                continue
            return port
    raise ServingError(
        f"ports {first} to {first + _PORTS - 1} for vLLM servers are all taken: choose another"
        " ENGINE_PORT"
    )


def cause_of_death(log: Path, since: int) -> str:
    """The first error after byte ``since`` of a log: the last ones only say that there was one."""
    with log.open("rb") as file:
        file.seek(since)
        written = file.read().decode(errors="replace").strip()
    found = _CAUSE.search(written)
    last = written.rpartition("\n")[2] or "it wrote nothing"
    return f"{found[1] if found else last} (see {log})"
