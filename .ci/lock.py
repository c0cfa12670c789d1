"""Write the locks: the tested versions, each with the hash of its file.

``requirements.lock`` is what the project needs; ``deploy/images/*.lock`` is what its images have
beside it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADER = """\
# Written by `make lock` from pyproject.toml and constraints.txt; do not edit.
# For Python 3.11 on Linux x86-64. Other platforms have other files: run `make lock` there.
# torch is left out: its file depends on the accelerator, so it is installed first, by version:
#
#   pip install torch=={torch}
#   pip install --no-deps --require-hashes --requirement requirements.lock
#   pip install --no-deps babylon_rl-*.whl
"""
IMAGES = ROOT / "deploy" / "images"
# Prefect's Kubernetes worker comes into the project's environment, the tools of a build do not.
EXTRAS = {
    "kubernetes": ["prefect-kubernetes==0.8.0"],
    "tools": ["build==1.3.0", "cyclonedx-bom==7.5.0", "setuptools", "wheel"],
}


def main() -> None:
    project = chosen(".")
    torch, _ = project.pop("torch")
    header = HEADER.format(torch=torch.partition("+")[0])
    write(ROOT / "requirements.lock", header, project)
    for name, wanted in EXTRAS.items():
        found = chosen(*wanted)
        if name == "kubernetes":
            found = {one: pinned for one, pinned in found.items() if one not in project}
        write(IMAGES / f"{name}.lock", "# Written by `make lock`; do not edit.\n", found)


def chosen(*wanted: str) -> dict[str, tuple[str, str]]:
    """Version and hash of each package that pip would install."""
    with tempfile.NamedTemporaryFile() as report:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--dry-run", "--ignore-installed", "--report", report.name),
                *("--constraint", "constraints.txt", *wanted),
            ],
            cwd=ROOT,
            check=True,
        )
        installed = json.load(report)["install"]
    return {
        package["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): (
            package["metadata"]["version"],
            package["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for package in installed
        if "archive_info" in package["download_info"]  # the project itself is a directory
    }


def write(path: Path, header: str, packages: dict[str, tuple[str, str]]) -> None:
    lines = [
        f"{name}=={version} --hash=sha256:{digest}\n"
        for name, (version, digest) in sorted(packages.items())
    ]
    path.write_text(header + "".join(lines))


main()
