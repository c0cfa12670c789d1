"""The compose file beside the image and the settings that it names. No engine is needed."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from babylon.core.settings_loading import load_settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose" / "compose.yaml"
CONTAINERFILE = ROOT / "deploy" / "images" / "Containerfile"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return found


def test_the_image_has_what_the_compose_file_names(services: dict[str, Any]) -> None:
    text, build = CONTAINERFILE.read_text(), services["babylon"]["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).resolve() == CONTAINERFILE
    assert re.search(rf"^FROM \w+ AS {build['target']}$", text, re.MULTILINE)
    assert all(f"ARG {name}\n" in text for name in build["args"])
    (volume,) = services["babylon"]["volumes"]
    assert f"BABYLON_HOME={volume.partition(':')[2]}" in text


def test_every_variable_is_a_setting_and_the_ports_fit_each_other(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = services["babylon"]["environment"]
    assert given.keys() <= load_settings().environment().keys()
    for name, value in given.items():
        monkeypatch.setenv(name, value.replace("${POSTGRES_PASSWORD}", "secret"))
    settings = load_settings()
    (published,) = services["babylon"]["ports"]
    assert settings.serving.listen and settings.serving.listen.endswith(f":{published[-4:]}")
    check = services["babylon"]["healthcheck"]["test"][-1]
    assert f":{settings.serving.endpoint_port}/health/ready" in check
    assert settings.database.url
    account = settings.database.url.get_secret_value().partition("//")[2].partition(":")[0]
    made = services["postgres"]["environment"]
    assert (account, made["POSTGRES_USER"], made["POSTGRES_DB"]) == ("babylon",) * 3


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is missing")
def test_compose_takes_the_file() -> None:
    command = ["docker-compose", "--file", str(FILE), "config", "--quiet"]
    about = {"POSTGRES_PASSWORD": "secret", "CPU_INDEX": "http://localhost", "PATH": "/usr/bin"}
    found = subprocess.run(command, env=about, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    without = about | {"POSTGRES_PASSWORD": ""}
    assert (
        "set a password"
        in subprocess.run(command, env=without, capture_output=True, text=True).stderr
    )
