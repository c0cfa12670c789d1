"""Write requirements.lock: the tested versions, each with the hash of its file."""

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


def main() -> None:
    with tempfile.NamedTemporaryFile() as report:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--dry-run", "--ignore-installed", "--report", report.name),
                *("--constraint", "constraints.txt", "."),
            ],
            cwd=ROOT,
            check=True,
        )
        chosen = json.load(report)["install"]
    hashes = {
        package["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): (
            package["metadata"]["version"],
            package["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for package in chosen
        if "archive_info" in package["download_info"]  # the project itself is a directory
    }
    torch, _ = hashes.pop("torch")
    lines = [
        f"{name}=={version} --hash=sha256:{digest}\n"
        for name, (version, digest) in sorted(hashes.items())
    ]
    header = HEADER.format(torch=torch.partition("+")[0])
    (ROOT / "requirements.lock").write_text(header + "".join(lines))


main()
