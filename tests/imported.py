"""What an import pulls in, seen from a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_with(*modules: str) -> set[str]:
    """Names of all modules that are loaded after importing these."""
    code = f"import sys, {', '.join(sorted(modules))}; print(*sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(finished.stdout.split())
