"""Mistakes that users make: each ends with exit code 2 and one sentence with its code, without a traceback."""

from __future__ import annotations

import os
import re
import shlex

import pytest

from ..forks import LAUNCH, Forks

MISTAKES = """
launch
launch nothere.py
launch --nnodes 2 train.py
launch --nnodes 0 train.py
launch --nnodes x train.py
launch --nnodes 3:2 train.py
launch --nproc-per-node 0 train.py
launch --nproc-per-node many train.py
launch --nproc-per-node gpu train.py
launch --max-restarts -1 train.py
launch --max-restarts x train.py
launch --no-such-option train.py
launch --on-overflow stop train.py
launch --hang-timeout soon train.py
launch --hang-timeout -5 train.py
launch --hang-timeout 5x train.py
launch --on-hang kill train.py
launch --telemetry 0.1 train.py
launch --every 0 train.py
launch --watch weight train.py
launch --ignore :output train.py
launch --trace-batches 1;2 train.py
launch --trace-batches 9 --abort-after-batch 3 train.py
launch --sync --on-overflow continue train.py
launch --near-overflow 100 train.py
launch --underflow-share 10% train.py
launch --scaler-skips 0 train.py
launch --preflight yes train.py
launch --preflight-timeout 0 train.py
launch --alloc 80 train.py
launch --bandwidth-size big train.py
launch --min-busbw fast train.py
launch --slow-factor 0 train.py
launch --health-thresholds nowhere.toml train.py
launch --collector localhost:29401 train.py
launch --collector-port 99999 train.py
launch --metrics-port http train.py
launch --notify nosuchcommand train.py
launch --run-name a/b train.py
launch --secret-file nowhere train.py
launch --max-frames 0 train.py
launch --no-python --module train.py
launch --rdzv-backend etcd train.py
launch --node-rank 5 --nnodes 2 --master-addr localhost train.py
launch --explain maybe train.py
launch --sync=yes train.py
launch s.sh
launch r.json
launch --ignore [ train.py
launch adir
launch -m nosuch.module
launch -m train.py
launch --no-python nothere
launch --no-python ./nothere.sh
launch --help-alll
launch --verison
launch \u2013nproc-per-node 2 train.py
launch trian.py
run
run --
run \u2013nnodes 2 -- true
check \u2013nproc-per-node 2
check --nproc-per-node 99999
run --wat python train.py
run --nnodes 2 -- true
run --preflight short -- true
run --every x -- true
check train.py
check --format xml
check --nnodes 2
check -m x
check --quick=1
env
env --format yaml
report nope
report --rank x
report --rank 99
report --batch -1
report --format pdf
report --module nosuch*
report -o /nowhere/x
report --wat
report train.py
report adir
report \u2013rank 0
runs --runs-dir train.py
runs --last 0
runs --format xml
runs --like nope
runs --wat
top nope
top --format json
stacks --format xml
diff
diff a
diff adir
diff latest nope
diff latest --rank x
explain GW299
explain --wat
export --format parquet
export --format xml
export --rank 99
export --table rows
export -o /nowhere/x
export nope
submit
submit --nodes
submit nothere.py
submit --runs-dir
submit --exclude-bad nope train.py
submit --sync=1 train.py
submit --run-name x train.py
submit --nnodes x train.py
collect --bind localhost
collect --nodes 0
collect --metrics-port http
collect --notify nosuchcommand
collect --secret-file nowhere
lanch train.py
train.py
--nproc-per-node 2 train.py
--wat
--verison
launch --modules train.py
launch --runs-dir /proc/runs train.py
stacks nope
report done nope
top done
stacks done
diff done
report done --rank 7
export done --rank 7
runs --like done
"""
MEANT = """
top --once --json | --format json?
runs --json | --format json?
report --html | --format html?
export done --format json | jsonl?
export done --out x | --output?
runs --last x | a whole number of 1 or more
top done done | no more than [RUN], found also 'done'
explain-log | FILE..., found none
runs --runs-dir "" | a folder
report done -o x.pdf | --output x.html
report done -o adir | a file, found the folder 'adir'
explain nan | GW104 (overflow)
explain GW1040 | GW104 (overflow)
launch -n 2 train.py | --nproc-per-node?
launch --num_gpus 8 train.py | --nproc-per-node?
launch --dry-run train.py | --show-settings?
launch --timeout 30 train.py | --hang-timeout?
launch --on-overflow ignore train.py | one of abort, continue
launch --preflight ful train.py | full?
launch --preflight | one of full, quick, off, found nothing
launch --master-port x train.py | a whole number
launch --master-port 70000 train.py | a port from 0 to 65535
launch --standalone --nnodes 2 train.py | --nnodes 1
launch --runs-dir "" train.py | a folder for runs
launch -c "print(1)" | write it to a file
launch ./trian.py | train.py?
launch torchrun train.py | leave torchrun out
launch accelerate launch train.py | gpuwatch run -- accelerate
help launch | gpuwatch launch --help?
version | gpuwatch --version?
ls | gpuwatch runs?
show done | gpuwatch report?
gpuwatch launch train.py | leave it out: gpuwatch launch
-v | gpuwatch --version?
--verison | gpuwatch --version?
"""
"""What the sentence has, so that the next try is right."""
NOT_A_SENTENCE = ("Traceback", "Errno", "None")


@pytest.fixture(scope="module")
def run_in(tmp_path_factory):
    """(command line) -> (exit code, what it printed), in a folder with a script and a run that is over."""
    folder = tmp_path_factory.mktemp("my project")
    (folder / "adir").mkdir()
    (folder / "s.sh").write_text("echo hi\n")
    (folder / "train.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUWATCH_", "PET_", "SLURM"))}
    log = folder / "log"

    with Forks(*LAUNCH, env=env) as forks:

        def run(line: str) -> tuple[int | None, str]:
            log.unlink(missing_ok=True)
            pid = forks.start(["gpuwatch", *shlex.split(line)], env=env, cwd=str(folder), log=str(log))
            return forks.code(pid, 300), log.read_text()

        code, said = run("launch --preflight off --run-name done train.py")
        assert code == 0, said
        yield run


@pytest.mark.slow
@pytest.mark.sample(20)
@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_sentence(line, run_in):
    code, said = run_in(line)
    assert code == 2
    (sentence,) = said.splitlines()
    assert re.fullmatch(r"gpuwatch: [^[]((?!\[GW).)+ \[GW4\d\d\]", sentence), sentence
    assert not any(word in sentence for word in NOT_A_SENTENCE), sentence


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize(("line", "meant"), [line.rsplit(" | ", 1) for line in MEANT.strip().splitlines()])
def test_a_mistake_is_told_with_what_was_meant(line, meant, run_in):
    test_a_mistake_is_one_sentence(line, run_in)
    assert meant in run_in(line)[1]


@pytest.mark.slow
def test_a_run_whose_options_torchrun_rejects_was_not_ended_from_outside(run_in):
    code, said = run_in("launch --nnodes 2 --nproc-per-node 2 --rdzv-endpoint x --run-name rejected train.py")
    assert (code, said.splitlines()[-1].split(":")[1]) == (2, " torchrun rejected these options")
    code, said = run_in("report rejected")
    assert code == 0 and "torchrun failed by itself: torchrun rejected these options: port is" in said, said
