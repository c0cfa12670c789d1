"""The installed vLLM, the command line of a server, its port, and the error in its log.

vLLM runs in another Python environment and is never imported here.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from babylon.core.errors import ConfigError, ServingError
from babylon.core.processes import Service
from babylon.core.settings import VLLM_LORA_RANK, ServingSettings, fields, variable_of
from babylon.serving.ports import require_free_port
from babylon.serving.vllm import guard
from babylon.serving.vllm.process_group import environment_of_others

# On the GPU: two arms, a policy whose last calls run, and one that is being loaded. In the CPU's
# memory also the rollback target and proposals.
_MAX_LORAS, _MAX_CPU_LORAS = 4, 8
_PORTS = 100  # above ENGINE_PORT
_NO_DOMAIN = "none.invalid"  # of RFC 2606: no such host exists
_CAUSE = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.M)

_LOOK = """
from importlib.metadata import packages_distributions, version
name = packages_distributions()["vllm"][0]
print(name, version(name))
"""
_TIMEOUT_S = 60


def require_vllm(serving: ServingSettings) -> str:
    """Return the vLLM of the settings: its distribution and version, or a server's address.

    Raises:
        ConfigError: the settings name none, or it is not installed.
    """
    extra_arguments(serving.vllm_args)
    if serving.engine_url:
        if serving.vllm_turns:
            raise ConfigError(
                "VLLM_TURNS needs a server that the host starts: leave out ENGINE_URL"
            )
        if "," in serving.engine_url:
            raise ConfigError(
                f"ENGINE_URL={serving.engine_url!r} with ENGINE=vllm: name one server, and run a"
                " gateway beside each"
            )
        return serving.engine_url
    if serving.vllm_python is None:
        raise ConfigError(
            "ENGINE=vllm needs VLLM_PYTHON, the python of an environment with vLLM, or ENGINE_URL,"
            " the address of a running vLLM server"
        )
    return vllm_build(serving.vllm_python)


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


def is_cpu_build(build: str) -> bool:
    """Return True if a build computes on CPUs, which up to 0.32 has two faults.

    It may answer for the base model with an adapter's weights, if a batch has requests to both: the
    last adapter slot stands for "none" (vllm-project/vllm#48421). And it dies when it reads the
    prompt of a request with a seed in chunks: it sets back the offset of the request's generator,
    which a CPU's has not.
    """
    return "cpu" in build


def vllm_service(
    serving: ServingSettings,
    base: str,
    name: str,
    port: int,
    *,
    logs: Path,
    secret: str,
    turns: bool = False,
    cpu: bool = False,
) -> Service:
    """Return a server of the model ``base`` under ``name`` on loopback.

    Every local user reaches its port, so it answers only to ``secret``. That comes in the
    environment, because every local user sees command lines too. ``NeedsKey`` asks for it where
    vLLM itself does not.

    ``--logprobs-mode`` makes logprobs those of the sampled distribution. ``--generation-config``
    keeps the model's own sampling defaults out of requests. Tool calls are parsed as Qwen writes
    them, and never forced: by default vLLM would constrain the sampling of a request with tools.
    ``--enable-mixed-moe-lora-format`` lets every mixture have adapters as training writes them.
    ``--allowed-media-domains`` keeps a client from making vLLM fetch addresses of the server's
    network as images: it reads those that the request itself holds. ``turns``: full models of the
    shape of ``base`` take turns on it. ``cpu``: as ``is_cpu_build``.
    """
    assert serving.vllm_python is not None  # require_vllm came first
    command = [
        *(sys.executable, "-P", "-m", "babylon.serving.vllm.process_group"),
        # A safe path: a file of the working directory must not stand for a module of vLLM's.
        *("env", "PYTHONSAFEPATH=1", f"PYTHONPATH={Path(guard.__file__).parent}"),
        *(serving.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", base, "--served-model-name", name),
        *(("--middleware", "babylon_turns.TakesTurns") if turns else ()),
        *("--middleware", "babylon_guard.NeedsKey"),  # the last one sees a request first
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *("--enable-lora", "--max-loras", str(_MAX_LORAS)),
        *("--max-cpu-loras", str(_MAX_CPU_LORAS), "--max-lora-rank", str(VLLM_LORA_RANK)),
        "--enable-mixed-moe-lora-format",
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--allowed-media-domains", _NO_DOMAIN),
        *(("--no-enable-chunked-prefill",) if cpu else ()),
        *extra_arguments(serving.vllm_args),
    ]
    return Service(
        name=f"vLLM server of {base}",
        command=command,
        log=logs / f"vllm-{port}.log",
        environment={
            # vLLM gets none of our settings, nor the secrets among them
            **{variable_of(field): "" for _, _, field in fields()},
            "VLLM_API_KEY": secret,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            # the path of a call names its policy, if policies take turns
            "VLLM_SKIP_MODEL_NAME_VALIDATION": str(int(turns)),
        },
    )


def extra_arguments(given: str) -> list[str]:
    """Split ``VLLM_ARGS`` as a shell does. They come last and override other arguments.

    Raises:
        ConfigError: a quotation is not closed, or there is an API key, which the host sets itself.
    """
    try:
        arguments = shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"VLLM_ARGS={given!r}: {error}") from error
    # vLLM takes an underscore for a dash.
    if any(one.partition("=")[0].replace("_", "-") == "--api-key" for one in arguments):
        raise ConfigError("VLLM_ARGS sets --api-key: leave it out, the home's engine.key is used")
    return arguments


def free_port(serving: ServingSettings, taken: Iterable[int]) -> int:
    """Return the first free port above ``ENGINE_PORT`` that is neither taken nor set for others.

    Raises:
        ServingError: all ports are taken.
    """
    reserved = {*taken, serving.endpoint_port, serving.admin_port}
    first = serving.engine_port + 1
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
    """Return the first error after byte ``since`` of a log. Later errors only refer to it."""
    with log.open("rb") as file:
        emptied = since > log.stat().st_size  # when it grew too large
        file.seek(0 if emptied else since)
        written = file.read().decode(errors="replace").strip()
    found = _CAUSE.search(written)
    last = written.rpartition("\n")[2] or "it wrote nothing"
    return f"{found[1] if found else last} (see {log})"
