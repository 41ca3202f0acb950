"""The part in C under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

    python tests/sanitized.py [arguments for pytest]

Its extensions are built into a scratch folder, beside links to all else of the package; the checkout's own stay as
they are. A finding ends the tests with its stack. Python gets each object from malloc: so the sanitizer also sees one
that is used after its last reference has gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/worker/native", "tests/worker/hooks/test_native_writer.py")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
LIBRARIES = ("libasan.so", "libstdc++.so.6")
"""They come before all others. The first wraps functions of the second, which torch throws with, from the start."""
CC = os.environ.get("CC", "cc")


def build(folder: Path) -> None:
    """The package in `folder`, with extensions of its own. Raises SystemExit."""
    setup = ("-c", "import setuptools; setuptools.setup()", "build_ext", "--force", "--build-lib", str(folder))
    done = subprocess.run(
        [sys.executable, *setup, "--build-temp", str(folder / "objects")],
        cwd=ROOT,
        env={**os.environ, "CC": CC, "CFLAGS": FLAGS, "LDFLAGS": FLAGS},
        capture_output=True,
        text=True,
    )
    native = folder / "gpuwatch" / "worker" / "native"
    built = sorted(path.name.partition(".")[0] for path in native.glob("*.so"))
    if built != ["core", "recursion", "signals"]:  # all are optional, and their errors are no error
        raise SystemExit(f"expected core, recursion and signals, built {built}:\n{done.stdout}{done.stderr}")
    for source in (ROOT, ROOT / "worker", ROOT / "worker" / "native"):
        target = folder / "gpuwatch" / source.relative_to(ROOT)
        for path in source.iterdir():
            if path.name[0] != "." and path.suffix != ".so" and not (target / path.name).exists():
                (target / path.name).symlink_to(path)


def environment(folder: Path) -> dict[str, str]:
    """What a process needs whose extensions are those in `folder`."""
    found = [
        subprocess.run([CC, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in LIBRARIES
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    """Build and test. The exit code of pytest, or of the sanitizer."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-sanitized-") as name:
        folder = Path(name)
        build(folder)
        around = environment(folder)
        names = "core, recursion, signals"
        ask = f"from gpuwatch.worker.native import {names}; print(*(part.__file__ for part in ({names})))"
        done = subprocess.run([sys.executable, "-c", ask], env=around, cwd=ROOT, capture_output=True, text=True)
        if done.stdout.count(name) != 3:
            raise SystemExit(f"expected extensions in {name}, found:\n{done.stdout}{done.stderr}")
        # pytest's own handler of SIGSEGV would come before the sanitizer's
        pytest = ("-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-m", "not gpu", *TESTS)
        return subprocess.run([sys.executable, *pytest, *sys.argv[1:]], env=around, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
