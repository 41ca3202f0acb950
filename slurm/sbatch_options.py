"""sbatch's own options: which take a value. From the manual pages of SLURM 20.11 to 26.05.

Names are enough: what a value means is for sbatch to say. An option that is not here (of a plugin of the site, or of a
later release) passes, too, when it is written as --name=value.
"""

# ruff: noqa: SIM905  # a page of quoted names reads worse

from __future__ import annotations

WITH_VALUE = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint container
    container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile qos
    reservation resources segment signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time
    time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap
    """.split()
)

WITHOUT_VALUE = frozenset(
    """
    consolidate-segments contiguous external hold ignore-pbs no-requeue overcommit oversubscribe parsable
    quiet reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose
    """.split()
)

WITH_OR_WITHOUT = frozenset("exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports".split())
"""Only as --name=value, or --name alone."""

SHORT = {
    "A": "account",
    "a": "array",
    "B": "extra-node-info",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "Q": "quiet",
    "q": "qos",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "x": "exclude",
}
"""Without -m, which is torchrun's here (the script is a module), and -W, which is --wait."""

OF_THE_SUBMISSION = frozenset({"clusters", "cluster", "M", "parsable", "quiet", "test-only", "usage", "verbose"})
"""What they change is sbatch's own doing, so they stand on its command line and not in the script."""

ONE_TASK = (
    "gpuwatch starts the ranks of a node itself, as one task of SLURM; for the number of ranks: --nproc-per-node N"
)
REFUSED = {
    "ntasks": ONE_TASK,
    "ntasks-per-node": ONE_TASK,
    "tasks-per-node": ONE_TASK,
    "ntasks-per-core": ONE_TASK,
    "ntasks-per-gpu": ONE_TASK,
    "ntasks-per-socket": ONE_TASK,
    "wrap": "the script is what stands after the options",
    "usage": "all options: gpuwatch submit --help",
}
"""What makes no sense here, and what to do in its place."""
