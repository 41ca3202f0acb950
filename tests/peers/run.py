"""Runs peers' programs with gpuwatch and without it, and says how often the verdict is right.

    python tests/peers/run.py --checkout GRIST=/tmp/GRIST --checkout TrainCheck-Benchmarks=/tmp/benchmarks

It fetches nothing: a checkout is a folder that is there. Without one, only the programs that were rewritten run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpuwatch.tests.peers.grades import EndedRun, GradedRun, grade, table_of
from gpuwatch.tests.peers.programs import PROGRAMS, REWRITTEN, PeerProgram

HERE = Path(__file__).parent
TIMEOUT_S = 600
LAUNCH = ("-m", "gpuwatch.cli.main", "launch", "--preflight", "off")
ALONE = ("-m", "torch.distributed.run")
WORDS = "WORDS"
"""An argument that names the folder of a corpus."""


def run(program: PeerProgram, checkouts: dict[str, Path]) -> GradedRun:
    """Both runs of a program, one after the other, and the grade. The second is left out if the first fails."""
    alone = start(program, checkouts, ALONE)
    watched = start(program, checkouts, LAUNCH) if alone.code == 0 else None
    graded = grade(program, alone, watched)
    return graded._replace(seconds=(alone.seconds, watched.seconds)) if watched is not None else graded


def start(program: PeerProgram, checkouts: dict[str, Path], how: Sequence[str]) -> EndedRun:
    """One run, in a folder of its own: a copy of the program's."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-peers-") as name:
        folder, scratch = Path(name) / "program", Path(name) / "scratch"
        scratch.mkdir()
        path = program_of(program, checkouts)
        if program.source == REWRITTEN:
            folder.mkdir()
        else:
            shutil.copytree(path.parent, folder)
            path = folder / path.name
        record = scratch / "record"
        environ = environment(program, checkouts, record)
        if program.before:
            subprocess.run([sys.executable, program.before], cwd=folder, env=environ, check=True, timeout=TIMEOUT_S)
        runs = ("--runs-dir", str(scratch / "runs")) if how is LAUNCH else ()
        ranks = ("--standalone", "--nproc-per-node", str(program.nproc))
        args = [str(written_words(scratch)) if arg == WORDS else arg for arg in program.args]
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, *how, *runs, *ranks, str(HERE / "start.py"), str(path), *args],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
        seconds = time.monotonic() - began
        reports = list(scratch.glob("runs/*-*/report.json"))
        return EndedRun(
            ended.returncode,
            [json.loads(each.read_text()) for each in sorted(scratch.glob("record.*"))],
            json.loads(reports[0].read_text()) if reports else None,
            f"{ended.stdout[-1500:]}\n{ended.stderr[-3000:]}",
            seconds,
        )


def program_of(program: PeerProgram, checkouts: dict[str, Path]) -> Path:
    return HERE / program.path if program.source == REWRITTEN else checkouts[program.source] / program.path


def environment(program: PeerProgram, checkouts: dict[str, Path], record: Path) -> dict[str, str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE / "standins"), *map(str, checkouts.values())]),
        "PEERS_RECORD": str(record),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # files that a program wrote itself, before torch 2.6
        **({"PEERS_HOST": "1"} if program.on_host else {}),
        **({"PEERS_CALLS": str(program.calls)} if program.calls else {}),
        **({"PEERS_IMAGES": str(program.images)} if program.images else {}),
    }
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GPUWATCH", "PEERS", "PET_"))}
    return {**others, **own}


def written_words(folder: Path) -> Path:
    """A corpus of drawn words: each follows one of three others."""
    rng = random.Random(1)
    follows = [[rng.randrange(120) for _ in range(3)] for _ in range(120)]
    for name, number in (("train", 6000), ("valid", 800), ("test", 800)):
        word, words = 0, []
        for place in range(number):
            word = rng.choice(follows[word])
            words.append(f"w{word}" + ("\n" if place % 15 == 14 else ""))
        (folder / f"{name}.txt").write_text(" ".join(words) + "\n")
    return folder


def main() -> int:
    """0 if no verdict is wrong, over-sure or a false alarm, and no run was changed."""
    parser = argparse.ArgumentParser(description="Runs peers' programs with gpuwatch and without it.")
    parser.add_argument(
        "--checkout", action="append", default=[], metavar="NAME=FOLDER", help="where the repository of this name lies"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in name or source")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="programs that run at the same time (1)")
    parser.add_argument("-v", "--verbose", action="store_true", help="what each run printed, unless it is right")
    options = parser.parse_args()
    checkouts = {}
    for given in options.checkout:
        name, _, folder = given.partition("=")
        if not Path(folder).is_dir() or name not in {program.source for program in PROGRAMS}:
            known = ", ".join(sorted({program.source for program in PROGRAMS} - {REWRITTEN}))
            parser.error(f"--checkout {given}: NAME=FOLDER, with a folder that is there and a name of {known}")
        checkouts[name] = Path(folder).absolute()
    chosen = [each for each in PROGRAMS if each.source in {REWRITTEN, *checkouts}]
    chosen = [each for each in chosen if options.only in f"{each.source or 'rewritten'} {each.name}"]
    found = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run, program, checkouts) for program in chosen]):
            graded = future.result()
            found.append(graded)
            print(graded.line, flush=True)
            if options.verbose and graded.log:
                print(graded.log, flush=True)
    print(f"\n{table_of(found)}")
    return int(any(graded.grade.is_fault for graded in found))


if __name__ == "__main__":
    sys.exit(main())
