"""Runs the tests that the stand-in can answer, on the real CUDA build of torch: `make cuda-stub`.

    python3 tests/fakes/cuda/run.py                     all: a quarter of an hour on two quiet cores
    python3 tests/fakes/cuda/run.py --sample            one of each kind
    python3 tests/fakes/cuda/run.py -- tests/gpu -x     pytest's arguments
    python3 tests/fakes/cuda/run.py --shell             a shell in which `python` is on the stand-in
    python3 tests/fakes/cuda/run.py --frameworks        the tests with the newest frameworks

The first run makes a virtual environment of its own in build/cuda-stub (5.5 GB; a minute or two).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zlib import crc32

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
sys.path.insert(0, str(HERE))

import build  # noqa: E402  # it lies beside this file

FOLDER = CHECKOUT / "build" / "cuda-stub"
PACKAGES = ["nvidia-cuda-crt==13.0.88", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers"]
TESTS = ["tests/fakes/cuda", "tests/gpu/test_watch.py", "tests/worker/device", "tests/worker/test_look.py"]
TESTS += ["tests/worker/record/test_host_reduce.py", "tests/worker/record/test_tensor_stats.py"]
TESTS += ["tests/worker/preflight", "tests/gpu/test_preflight.py"]
FRAMEWORKS = ["accelerate", "lightning", "peft", "trl", "deepspeed", "megatron-core", "torchao", "torchtitan"]
SAMPLE = [f"tests/fakes/cuda/test_{what}.py" for what in ("streams", "counters", "costs", "graphs", "gpuwatch")]
SAMPLE += ["tests/gpu/test_watch.py", "--sample", "--each", "1"]
NOT_ANSWERED = {
    "tests/worker/device/test_kernel.py::test_more_elements_than_32_bits_count": "needs 4 GiB, read one by one",
    "quantized": "the stand-in has no quantized tensors",
    "test_reading_takes_no_memory": "needs 128 MiB, read one by one",
    "test_the_local_stages_share_one_process_and_pass": "the load under which health is read takes too long here",
    "test_a_rank_that_hangs_in_a_collective_of_nccl_is_named": "its deadline is a GPU's",
}
"""Part of a test's name -> why the stand-in cannot answer it."""


def main() -> int:
    """Make the environment if it is missing, and run pytest."""
    options = parse()
    python = environment_of(options.torch)
    packages = packages_of(python)
    build.build(FOLDER / "lib", packages)
    (packages / "stand_in_cuda.pth").write_text(f"{HERE}\nimport stand_in_cuda.hook\n")
    if options.frameworks:
        python = with_frameworks(python)
    # not in the checkout: what walks through it, as `make docs` does, would come back to it by the link
    link = Path(tempfile.gettempdir()) / f"stand-in-cuda-{os.getuid()}-{crc32(bytes(CHECKOUT)):x}" / "gpuwatch"
    link.parent.mkdir(mode=0o700, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(CHECKOUT)
    environment = {**os.environ, **build.environment(FOLDER / "lib"), "PYTHONPATH": str(link.parent)}
    environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="stand-in-nccl-", dir="/dev/shm") as environment["STAND_IN_NCCL_FOLDER"]:
        return run(options, python, environment)


def run(options: argparse.Namespace, python: Path, environment: dict[str, str]) -> int:
    if options.shell:
        return subprocess.run([os.environ.get("SHELL", "sh")], env=environment).returncode
    if options.frameworks:
        command = [python, "-m", "pytest", "-q", "tests/fakes/cuda/test_framework_rows.py", *options.pytest]
        return subprocess.run(command, cwd=CHECKOUT, env=environment).returncode
    tests = options.pytest or [*(SAMPLE if options.sample else TESTS)]
    left_out = " or ".join(name.rpartition("::")[2] for name in NOT_ANSWERED)
    how = ["tests/once_more.py", "run"] if options.once_more else ["-m", "pytest"]
    environment = {**environment, "PYTHONMALLOC": "debug"}  # what writes beyond its memory fails where it does so
    command = [python, *how, "-q", "-m", "(gpu or stand_in) and not soak", "-k", f"not ({left_out})"]
    command += ["-W", "ignore:Warning only once for all operators"]  # torch 2.11, of kernels that are replaced
    command += ["-W", "ignore:Synchronization debug mode", "--numprocesses", str(options.jobs), "--dist", "loadfile"]
    return subprocess.run([*command, *tests], cwd=CHECKOUT, env=environment).returncode


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="2.14.1", help="the release of torch, of which the CUDA build is taken")
    parser.add_argument("--sample", action="store_true", help="one of each kind")
    parser.add_argument("--shell", action="store_true", help="no tests: a shell with the stand-in")
    parser.add_argument("--frameworks", action="store_true", help="the tests with frameworks on top of it")
    parser.add_argument(
        "--once-more", action="store_true", help="run what failed once more, alone (tests/once_more.py)"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("pytest", nargs="*", help="what pytest is told, in place of all tests")
    return parser.parse_args()


def environment_of(torch: str) -> Path:
    """The Python of a virtual environment that has all packages."""
    venv = FOLDER / f"venv-{torch}"
    python, ready = venv / "bin" / "python", venv / ".ready"
    if ready.is_file():
        return python
    print(f"Installing torch {torch} for CUDA into {venv}; this takes a minute or two.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    constraints = FOLDER / "constraints.txt"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(line for line in lines if not line.startswith(("torch", "triton", "-", "nvidia"))))
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", str(constraints), f"torch=={torch}", *PACKAGES, *dependencies()], check=True)
    ready.touch()
    return python


def packages_of(python: Path) -> Path:
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


def with_frameworks(base: Path) -> Path:
    """The Python of a further environment, on top of the one of `base`. What pip cannot install is left out, and told.

    Its `.pth` file makes the packages of the other one its own, so that pip does not install torch again.
    """
    venv = base.parents[1].with_name(f"{base.parents[1].name}-frameworks")
    python, ready = venv / "bin" / "python", venv / ".ready"
    if ready.is_file():
        return python
    print(f"Installing {', '.join(FRAMEWORKS)} into {venv}; this takes some minutes.", flush=True)
    subprocess.run([base, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages_of(python) / "base.pth").write_text(f"import site; site.addsitedir({str(packages_of(base))!r})\n")
    torch = next(packages_of(base).glob("torch-*.dist-info")).name.removeprefix("torch-").removesuffix(".dist-info")
    (venv / "constraints.txt").write_text(f"torch=={torch}\n")
    for package in FRAMEWORKS:
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        done = subprocess.run([*install, "-c", venv / "constraints.txt", package])
        if done.returncode:
            print(f"{package} cannot be installed here", flush=True)
    ready.touch()
    return python


def dependencies() -> list[str]:
    """gpuwatch's own, without torch."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    block = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    found = [line.strip().split('"')[1] for line in block.splitlines() if '"' in line]
    return [package for package in found if not package.startswith("torch")]


if __name__ == "__main__":
    sys.exit(main())
