"""Copies to and from an S3 API: obstore beside fsspec's s3fs, each in a process of its own.

    python -m benchmarks.object_stores --megabytes 128 --files 200

It needs ``moto[server]`` and ``s3fs`` beside the project's own obstore. Figures: seconds to import,
CPU seconds of the client for one large file and for many small ones, and its largest memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BUCKET = "bench"
PART = 8 * 2**20


def _obstore(url: str) -> tuple[Callable[[str, Path], object], Callable[[str, Path], object]]:
    import obstore
    from obstore.store import from_url

    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})

    def get(key: str, path: Path) -> None:
        with path.open("wb") as file:
            for part in obstore.get(store, key).stream(min_chunk_size=PART):
                file.write(part)

    return lambda key, path: obstore.put(store, key, path, chunk_size=PART), get


def _s3fs(url: str) -> tuple[Callable[[str, Path], object], Callable[[str, Path], object]]:
    import s3fs  # type: ignore[import-not-found]

    files = s3fs.S3FileSystem(endpoint_url=url, default_block_size=PART)
    return (
        lambda key, path: files.put_file(str(path), f"{BUCKET}/{key}", chunksize=PART),
        lambda key, path: files.get_file(f"{BUCKET}/{key}", str(path)),
    )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(library: str, url: str, megabytes: int, files: int) -> dict[str, float]:
    """Return the figures of one library in this process."""
    began = time.perf_counter()
    put, get = {"obstore": _obstore, "s3fs": _s3fs}[library](url)
    figures = {"import_s": time.perf_counter() - began}
    with tempfile.TemporaryDirectory() as directory:
        large, small = Path(directory, "large"), Path(directory, "small")
        large.write_bytes(os.urandom(2**20) * megabytes)
        small.write_bytes(os.urandom(4096))

        def spent(name: str, work: Callable[[], object]) -> None:
            cpu, wall = _cpu(), time.perf_counter()
            work()
            figures[f"{name}_cpu_s"] = _cpu() - cpu
            figures[f"{name}_wall_s"] = time.perf_counter() - wall

        back = Path(directory, "back")
        spent("large_put", lambda: put(f"{library}/large", large))
        spent("large_get", lambda: get(f"{library}/large", back))
        assert back.stat().st_size == large.stat().st_size
        spent("small_put", lambda: [put(f"{library}/{n}", small) for n in range(files)])
        spent("small_get", lambda: [get(f"{library}/{n}", back) for n in range(files)])
    figures["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--port", type=int, default=5123)
    parser.add_argument("--library", choices=["obstore", "s3fs"], help="this one, in this process")
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    if options.library:
        print(json.dumps(measure(options.library, url, options.megabytes, options.files)))
        return
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(options.port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            with suppress(OSError):
                made = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
                urllib.request.urlopen(made, timeout=5).close()
                break
            time.sleep(0.2)
        for library in ("obstore", "s3fs"):
            command = [sys.executable, __file__, "--library", library, "--port", str(options.port)]
            sizes = [f"--megabytes={options.megabytes}", f"--files={options.files}"]
            done = subprocess.run(
                [*command, *sizes], env=environment, capture_output=True, text=True, check=True
            )
            print(library, done.stdout.strip())
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
