"""What walk.py must know of the pages: the jobs that they take for granted, and all that cannot be run here."""

from __future__ import annotations

RUNNING = (
    "cp tests/e2e/scripts/looked_at.py pretrain.py; gpuwatch launch --nproc-per-node 4 --run-name pretrain "
    "--preflight off --hang-timeout 0 pretrain.py . >job.log 2>&1 & until gpuwatch top --once 2>&1 | "
    "grep -q 'powers of two'; do :; done; touch stand; until gpuwatch top --once | grep -q 'WAITED FOR'; do :; done"
)
"""A job of four ranks, one of which stands still; it is ended with the walk."""
FAULT = "gpuwatch launch --nproc-per-node 2 examples/faults.py --fault forward"

BEFORE: dict[str, list[str]] = {
    "docs/export.md": [FAULT],
    "docs/forecast.md": ["gpuwatch launch --preflight off tests/e2e/scripts/growing.py"],
    "docs/hangs.md": [
        "gpuwatch launch --nproc-per-node 3 --hang-timeout 5 --on-hang abort tests/e2e/scripts/hang.py --how data",
        "gpuwatch launch --nproc-per-node 3 tests/e2e/scripts/slow.py --how constant",
        "gpuwatch launch --nproc-per-node 2 tests/e2e/scripts/aborts.py backward",
    ],
    "docs/notify.md": [
        FAULT.replace("launch", "launch --notify 'python3 tell_me.py'"),
        "python3 -m json.tool told.json",
    ],
    "docs/preflight.md": [
        "WRONG_RANK='another matmul' PYTHONPATH=tests/e2e/scripts/wrong_rank gpuwatch check --nproc-per-node 4"
    ],
    "docs/replay.md": ["gpuwatch launch --capture --run-name RUN train.py"],
    "docs/report.md": [
        "gpuwatch launch --nproc-per-node 2 --preflight off --runs-dir other-runs tests/e2e/scripts/explained.py ddp",
        FAULT,
        FAULT,
        FAULT.replace("launch", "launch --run-name RUN_A"),
        FAULT.replace("launch", "launch --run-name RUN_B"),
        "gpuwatch launch --explain 3 train.py",
        "ADAM=1 gpuwatch launch train.py",
        FAULT.replace("launch", "launch --trace-batches 4,5"),
    ],
    "docs/top.md": [RUNNING],
    "docs/watching.md": [
        "gpuwatch launch --nproc-per-node 4 --preflight off tests/e2e/scripts/odd_replicas.py "
        """'[["garbage", "blocks.0.rotary.inv_freq", 3, 0], ["flip", "blocks.1.mlp.0.weight", 2, 5]]'"""
    ],
}
"""Run before the page's first command."""

OPTIONAL = "accelerate"
"""A program that only the extra `frameworks` installs: without it, a command that names it is not run."""

INSTALLS = "installs into an environment; .ci/run and tests/test_packaging.py do it"
RUNS_ALL = "hours of tests, or of measuring on an idle machine"
CLUSTER = "needs a cluster: tests/slurm runs it on a real SLURM of two nodes"
NODES = "needs two nodes: tests/e2e/net runs it between two namespaces"
FRAMEWORK = "needs other packages, ranks or hosts: tests/frameworks runs it with the real packages"
GPU = "needs a GPU"
KUBERNETES = "needs Kubernetes: tests/docs/test_kubernetes.py"
ELSEWHERE = "a file, a rule or a drawing for the reader"
SCREEN = "a screen: tests/e2e/test_top.py drives it in tmux"
SHELL = "needs zsh or fish"
SERVER = "needs a server of somebody else's: tests/e2e/test_notify.py has one"
SCRIPT = "needs a job of its own, which a test has"

NOT_RUN: list[tuple[str, str, str]] = [
    ("README.md", "pip install *", INSTALLS),
    ("README.md", "make *", INSTALLS),
    ("docs/schedulers.md", "module load *", CLUSTER),
    ("docs/schedulers.md", "depends_on*", ELSEWHERE),
    ("README.md", "gpuwatch submit *", CLUSTER),
    ("README.md", "gpuwatch check --slurm *", CLUSTER),
    ("README.md", "gpuwatch explain-log *", "logs of the reader's: docs/logs.md has one that is here"),
    ("docs/cost.md", "pip install *", INSTALLS),
    ("docs/cost.md", "python benchmarks/*", RUNS_ALL),
    ("docs/development.md", "worker/ *", ELSEWHERE),
    ("docs/development.md", "GPUWATCH_LATE_DEVICE=7 python *", RUNS_ALL),
    ("docs/development.md", "python tests/*", RUNS_ALL),
    ("docs/development.md", "make *", RUNS_ALL),
    ("docs/development.md", "python -m *", RUNS_ALL),
    ("docs/development.md", "python docs/make_options.py*", "test_pages.py compares the two"),
    ("docs/export.md", "gpuwatch export --rank tp=*", "needs a DeviceMesh: tests/collector/views/test_export.py"),
    ("docs/export.md", "mlflow *", "needs MLflow: tests/frameworks/test_trackers.py"),
    ("docs/export.md", "python -c *wandb*", "needs W&B: tests/frameworks/test_trackers.py"),
    ("docs/first-run.md", "make demo", INSTALLS),
    ("docs/first-run.md", "pip install *", INSTALLS),
    ("docs/first-run.md", "eval *zsh_source*", SHELL),
    ("docs/first-run.md", "_GPUWATCH_COMPLETE=fish_source *", SHELL),
    ("docs/frameworks.md", "gpuwatch run *accelerate launch *", FRAMEWORK),
    ("docs/frameworks.md", "gpuwatch run -- deepspeed *", FRAMEWORK),
    ("docs/frameworks.md", "gpuwatch run -- python lightning_script.py", FRAMEWORK),
    ("docs/frameworks.md", "srun *", CLUSTER),
    ("docs/frameworks.md", "mpirun *", FRAMEWORK),
    ("docs/frameworks.md", "GPUWATCH_CHECKOUTS=*", FRAMEWORK),
    ("docs/frameworks.md", "gpuwatch run --other-hosts *", FRAMEWORK),
    ("docs/frameworks.md", "ray.init*", FRAMEWORK),
    ("docs/frameworks.md", "RANK=*", "needs a script of the reader's: tests/e2e/test_run_by_hand.py runs it"),
    ("docs/gpu.md", "*", GPU),
    ("docs/hangs.md", "gpuwatch: Rank 1 on gpu-2 *", SCRIPT),
    ("docs/hangs.md", "In * looks at its stack it was *", SCRIPT),
    ("docs/hangs.md", "its host gpu-2 *", GPU),
    ("docs/how-it-works.md", "node 0 (head) *", ELSEWHERE),
    ("docs/index.md", "pip install *", INSTALLS),
    ("docs/metrics.md", "pip install *", INSTALLS),
    ("docs/metrics.md", "gpuwatch collect *", NODES),
    ("docs/metrics.md", "scrape_configs:*", ELSEWHERE),
    ("docs/metrics.md", "gpuwatch_verdict == 1*", ELSEWHERE),
    ("docs/nodes.md", "gpuwatch *", NODES),
    ("docs/notify.md", "gpuwatch launch --notify https:*", SERVER),
    ("docs/options.md", "hang-timeout = *", ELSEWHERE),
    ("docs/options.md", "[[]run]*", ELSEWHERE),
    ("docs/options.md", "*", "made by docs/make_options.py: test_pages.py compares the two"),
    ("docs/preflight.md", "# thresholds.toml*", ELSEWHERE),
    ("docs/report.md", "gpuwatch report 1847*", CLUSTER),
    ("docs/report.md", "- `...*a if ...`,*", SCRIPT),
    ("docs/report.md", "- element [[]3, 5] of its grad weight*", SCRIPT),
    ("docs/report.md", "- batch 5 of rank 1 is batch 5 of epoch 0 of its DataLoader*", SCRIPT),
    ("docs/scale.md", "python benchmarks/*", RUNS_ALL),
    ("docs/schedulers.md", "srun *", CLUSTER),
    ("docs/schedulers.md", "Prolog=*", ELSEWHERE),
    ("docs/schedulers.md", "#!/bin/bash*", CLUSTER),
    ("docs/schedulers.md", "*ssh -tt*", NODES),
    ("docs/schedulers.md", "gpuwatch launch --rdzv-backend *", KUBERNETES),
    ("docs/schedulers.md", "docker *", "needs a builder of images: tests/test_dockerfile.py"),
    ("docs/schedulers.md", "torchx *", CLUSTER),
    ("docs/slurm.md", "gpuwatch submit --nodes *", CLUSTER),
    ("docs/slurm.md", "sbatch *", CLUSTER),
    ("docs/slurm.md", "gpuwatch check --slurm *", CLUSTER),
    ("docs/slurm.md", "- Drain it*", CLUSTER),
    ("README.md", "gpuwatch diff *", "the latest run may be of one rank: docs/report.md has one of two"),
    ("README.md", "gpuwatch stacks", "needs a job that runs: docs/top.md has one"),
    ("docs/symptoms.md", "gpuwatch stacks", "needs a job that runs: docs/top.md has one"),
    ("docs/symptoms.md", "gpuwatch top", SCREEN),
    ("docs/telemetry.md", "Node telemetry*", GPU),
    ("docs/top.md", "gpuwatch top", SCREEN),
    ("docs/top.md", "gpuwatch top pretrain", SCREEN),
    ("docs/versions.md", "make matrix*", RUNS_ALL),
    ("docs/versions.md", "gpuwatch: torch *", "needs another release of torch: tests/matrix.py"),
]
"""(page, pattern of a command or a paragraph, why): neither run nor compared. The pattern leaves out comments."""
