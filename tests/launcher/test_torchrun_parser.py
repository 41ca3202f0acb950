"""torchrun's parser as it is read from the source is the one that torch has, in whatever release is installed."""

import sys
from pathlib import Path

import pytest
import torch
from gpuwatch.launcher import option_types as read
from torch.distributed.run import get_args_parser

TORCH = Path(torch.__file__).parent


def told(parser):
    return [
        (
            type(action).__name__,
            action.option_strings,
            action.dest,
            action.nargs,
            action.const,
            action.default,
            getattr(action.type, "__name__", None),
            action.choices,
            action.required,
            action.help,
        )
        for action in parser._actions
    ]


@pytest.mark.parametrize("environment", [{}, {"PET_NPROC_PER_NODE": "7", "PET_STANDALONE": "1", "PET_NNODES": "2:3"}])
def test_it_is_torchs_own(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours = read.read_parser(TORCH)
    assert told(ours) == told(get_args_parser())
    line = ["--nproc_per_node=2", "--rdzv-conf", "a=1", "-t", "3", "--duplicate-stdout-filters", "a,,b,c", "x.py", "-h"]
    assert vars(ours.parse_args(line)) == vars(get_args_parser().parse_args(line))


def test_an_option_of_a_newer_release_is_taken(tmp_path):
    folder = tmp_path / "distributed"
    folder.mkdir()
    source = (TORCH / "distributed" / "run.py").read_text()
    assert source.count("    # Positional arguments.") == 1
    newer = 'parser.add_argument("--of-tomorrow", type=int, default=LEAST)\n    # Positional arguments.'
    source = source.replace("# Positional arguments.", newer) + "\nLEAST = 3\n"
    (folder / "run.py").write_text(source)
    for name in ("distributed/argparse_util.py", "numa/binding.py"):
        if (TORCH / name).exists():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes((TORCH / name).read_bytes())
    parser = read.read_parser(tmp_path)
    assert parser.parse_args(["x.py"]).of_tomorrow == 3
    assert parser.parse_args(["--of-tomorrow", "5", "x.py"]).of_tomorrow == 5


@pytest.mark.parametrize(
    "source", [None, "", "def get_args_parser(): return made_elsewhere()", "def get_args_parser(:"]
)
def test_torch_is_asked_where_its_source_is_another_one(tmp_path, monkeypatch, source):
    if source is not None:
        (tmp_path / "distributed").mkdir()
        (tmp_path / "distributed" / "run.py").write_text(source)
    monkeypatch.setattr(read, "_torch_folder", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "torch.distributed.run")  # as if it were not imported yet
    assert told(read.torchrun_parser()) == told(get_args_parser())
