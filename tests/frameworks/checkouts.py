"""Scripts of other projects, as their authors wrote them: run plainly, watched, and watched while one overflows.

    GPUWATCH_CHECKOUTS=FOLDER python tests/frameworks/checkouts.py

The folder holds checkouts of those projects: nanoGPT, examples (pytorch's), pytorch-lightning, transformers. None of
them is part of this repository. Ray's example is in its package, so it needs no checkout. Sizes are given as arguments,
data is made here, and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from rows import OVERFLOW, PYTHON, RAY, environment, gpuwatch, verdict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VARIABLE = "GPUWATCH_CHECKOUTS"
STAND_IN = Path(__file__).parent / "stand_in"
TEXT = "To be, or not to be, that is the question. " * 60
LIMIT_S = 500.0
LOGS = "printed"
_TIMES = re.compile(
    r"\d{4}-\d\d-\d\d_[\d-]+(\.\d+)?|"
    r"\d+(\.\d+)? ?(ms|s\b|it/s)|mfu [-\d.]+%|\d\d/\d\d/\d{4} [\d:]+ [AP]M|\d{4}-\d\d-\d\d [\d:,.]+|(?<![.\d])\d{9,}"
)


def torchrun(ranks: int) -> tuple[str, ...]:
    """What each rank prints is in a file of its own: lines of several would be mixed."""
    where = ("--master-port", "PORT", "--log-dir", LOGS, "--redirects", "1")
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *where)


@dataclass(frozen=True)
class Script:
    name: str
    project: str
    folder: str
    """In the project: where it is run."""
    shown: str
    command: tuple[str, ...]
    fault: str
    """RANK:MODULE:CALL"""
    module: str
    """As the verdict names it."""
    rank: int | None
    """None where it is not one rank's: all gather the weight, or what they make meets inside of the module."""
    stand_in: bool = False
    """It asks for two GPUs at least."""
    package: str = ""
    """It is in this installed package, and not in a checkout."""
    prepare: Callable[[Path], None] = lambda folder: None
    compared: str = r"."
    """Lines of its output that are."""
    environment: dict[str, str] = field(default_factory=dict)

    def origin(self, checkouts: str) -> Path | None:
        """The folder that it is run in, as its authors have it; None if it is not here."""
        if self.package:
            found = importlib.util.find_spec(self.package)
            folders = found.submodule_search_locations if found is not None else None
            root = Path(folders[0]) if folders else None
        else:
            root = Path(checkouts) / self.project if checkouts else None
        return root / self.folder if root is not None and (root / self.folder).is_dir() else None


def _tokens(folder: Path) -> None:
    data = folder / "data" / "tiny"
    data.mkdir()
    for name in ("train", "val"):
        numpy.frombuffer(TEXT.encode(), dtype=numpy.uint8).astype(numpy.uint16).tofile(data / f"{name}.bin")


def _text(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT)


def _lines_and_tokenizer(folder: Path) -> None:
    """With a word for each number."""
    (folder / "text.txt").write_text("".join(f"{sentence}.\n" for sentence in TEXT.split(". ")))
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0], unk_token=WORDS[0])
    tokenizer.save_pretrained(folder / "tokenizer")


NANO = "--dataset=tiny --device=cpu --compile=False --dtype=float32 --eval_iters=1 --eval_interval=2 --log_interval=1"
NANO_SIZES = "--block_size=16 --batch_size=2 --n_layer=2 --n_head=2 --n_embd=16 --max_iters=4"
MINGPT = "data_config.path=text.txt data_config.truncate=1 data_config.block_size=16 gpt_config.n_layer=2"
MINGPT_SIZES = (
    "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=1 trainer_config.batch_size=64 "
    "trainer_config.save_every=1 trainer_config.data_loader_workers=1 trainer_config.use_amp=False"
)
DISTRIBUTED = "distributed"
WORDS = ["<end>", "to", "be", "or", "not", "that", "is", "the", "question"]
CLM = "--model_type gpt2 --tokenizer_name tokenizer --train_file text.txt --do_train --output_dir out --use_cpu"
CLM_SIZES = (
    "--config_overrides vocab_size=9,n_positions=32,n_embd=16,n_layer=2,n_head=2 --block_size 16 --max_steps 4 "
    "--per_device_train_batch_size 2 --logging_steps 1 --report_to none"
)

SCRIPTS = [
    Script(
        "nanoGPT",
        "nanoGPT",
        ".",
        "python train.py",
        (PYTHON, "train.py", *NANO.split(), *NANO_SIZES.split()),
        "0:h.1.mlp.c_fc:4",
        "transformer.h.1.mlp.c_fc",
        0,
        prepare=_tokens,
        compared=r"loss",
    ),
    Script(
        "minGPT-ddp",
        "examples",
        f"{DISTRIBUTED}/minGPT-ddp",
        "torchrun mingpt/main.py",
        (*torchrun(2), "mingpt/main.py", *MINGPT.split(), *MINGPT_SIZES.split()),
        "1:blocks.1.mlp.0:3",
        "blocks.1.mlp.0",
        1,
        stand_in=True,
        prepare=_text,
    ),
    Script(
        "ddp-tutorial-series",
        "examples",
        f"{DISTRIBUTED}/ddp-tutorial-series",
        "torchrun multigpu_torchrun.py 2 1",
        (*torchrun(2), "multigpu_torchrun.py", "2", "1"),
        "1:module:3",
        "",
        1,
        stand_in=True,
    ),
    Script(
        "FSDP2",
        "examples",
        f"{DISTRIBUTED}/FSDP2",
        "torchrun example.py",
        (*torchrun(2), "example.py"),
        "1:output:3",
        "output",
        1,
        stand_in=True,
    ),
    Script(
        "tensor parallel",
        "examples",
        f"{DISTRIBUTED}/tensor_parallelism",
        "torchrun tensor_parallel_example.py",
        (*torchrun(2), "tensor_parallel_example.py"),
        "1:in_proj:3",
        "in_proj",
        1,
        stand_in=True,
    ),
    Script(
        "sequence parallel",
        "examples",
        f"{DISTRIBUTED}/tensor_parallelism",
        "torchrun sequence_parallel_example.py",
        (*torchrun(2), "sequence_parallel_example.py"),
        "1:in_proj:3",
        "in_proj",
        None,
        stand_in=True,
    ),
    Script(
        "Lightning's model for bug reports",
        "pytorch-lightning",
        "examples/pytorch/bug_report",
        "python bug_report_model.py",
        (PYTHON, "bug_report_model.py"),
        "0:layer:1",
        "layer",
        0,
        compared=r"_loss",
    ),
    Script(
        "transformers' language model",
        "transformers",
        "examples/pytorch/language-modeling",
        "torchrun run_clm.py",
        (*torchrun(2), "run_clm.py", *CLM.split(), *CLM_SIZES.split()),
        "1:h.1.mlp.c_fc:3",
        "transformer.h.1.mlp.c_fc",
        1,
        prepare=_lines_and_tokenizer,
        compared=r"'loss'",
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    Script(
        "Ray Train's linear example",
        "ray",
        "train/examples/pytorch",
        "python torch_linear_example.py --smoke-test",
        (PYTHON, "torch_linear_example.py", "--smoke-test"),
        "1:module:20",
        "",
        1,
        compared=r"^{'loss'",
        environment=RAY,
        package="ray",
    ),
]


@dataclass(frozen=True)
class Run:
    code: int
    lines: list[str]
    files: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Trial:
    plain: Run
    watched: Run
    clean: dict[str, Any]
    overflowed: Run
    overflow: dict[str, Any]

    @property
    def same(self) -> bool:
        """The same lines and files, bit for bit."""
        return not self.differences

    @property
    def differences(self) -> list[str]:
        """Lines, and names of files."""
        plain, watched = self.plain, self.watched
        lines = difflib.unified_diff(plain.lines, watched.lines, "plainly", "watched", n=0)
        names = sorted(plain.files.keys() | watched.files.keys())
        return [*lines, *(name for name in names if not same(plain.files.get(name), watched.files.get(name)))]


def try_script(script: Script, origin: Path, port: int) -> Trial:
    runs, verdicts = [], []
    for name, fault in (("", ""), ("clean", ""), ("overflow", script.fault)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkout"
            shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("__pycache__"))
            script.prepare(folder)
            runs.append(run(script, folder, name, fault, port))
            if name:
                verdicts.append(verdict(folder, name))
    return Trial(runs[0], runs[1], verdicts[0], runs[2], verdicts[1])


def run(script: Script, folder: Path, name: str, fault: str, port: int) -> Run:
    before = set(folder.rglob("*"))
    told = {"PYTHONPATH": str(STAND_IN), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    told |= {"STAND_IN": "1"} if script.stand_in else {}
    told |= {"FAULT": fault} if fault else {}
    told |= script.environment
    command = [str(port) if word == "PORT" else word for word in (*(gpuwatch(name) if name else ()), *script.command)]
    done = subprocess.run(
        command, cwd=folder, env={**environment(), **told}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    made = [path for path in folder.rglob("*") if path.is_file() and path not in before and not _is_ours(path, folder)]
    files: dict[str, Any] = {}
    for path in sorted(made):
        name = _TIMES.sub("T", str(path.relative_to(folder)))
        same_name = sum(known.partition("#")[0] == name for known in files)
        files[f"{name}#{same_name}"] = _content(path)
    printed = [done.stdout, *(path.read_text() for path in sorted(folder.glob(f"{LOGS}/*/attempt_0/*/stdout.log")))]
    lines = [line for text in printed for line in text.splitlines() if re.search(script.compared, line)]
    return Run(done.returncode, [_TIMES.sub("T", line) for line in lines], files, done.stdout + done.stderr)


def _is_ours(path: Path, folder: Path) -> bool:
    """Not the script's: our runs, and what Python and hydra write of each run (names, times, process ids)."""
    parts = path.relative_to(folder).parts
    of_others = {"gpuwatch-runs", "__pycache__", ".hydra", ".cache", ".ray"}
    return bool(of_others & set(parts)) or path.suffix == ".log" or path.name.startswith("events.out.")


def _content(path: Path) -> Any:
    if path.suffix == ".pt":
        return torch.load(path, weights_only=False, map_location="cpu")
    if path.suffix == ".ckpt":  # Lightning's also says in which folder it lies
        found = torch.load(path, weights_only=False, map_location="cpu")
        return {name: found[name] for name in ("state_dict", "optimizer_states", "global_step")}
    if path.suffix == ".json":  # Trainer's also say how long it took, Ray's have its checkpoints' names
        return _TIMES.sub("T", re.sub(r".*_(runtime|per_second)\b.*\n", "", path.read_text()))
    return path.read_bytes()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(other, type(one)) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def line(script: Script, trial: Trial) -> str:
    found = trial.overflow
    who = "yes" if trial.overflowed.code == OVERFLOW and script.rank in (None, found["rank"]) else "NO"
    cells = [
        script.name,
        f"`{script.shown}`",
        "yes" if trial.same and trial.plain.lines else "NO",
        "yes" if trial.watched.code == trial.plain.code == 0 and trial.clean["kind"] == "clean" else "NO",
        who if script.rank is not None or who == "NO" else "not one rank's",
        f"`{found['module']}`".replace("``", "the model") if found["module"] == script.module else "NO",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    checkouts = os.environ.get(VARIABLE, "")
    wanted = sys.argv[1:]
    print("| script | command | same output and files | same exit code, clean | rank named | module named |")
    print("|---|---|---|---|---|---|")
    for script in SCRIPTS:
        if not wanted or any(word in script.name for word in wanted):
            origin = script.origin(checkouts)
            if origin is None:
                print(f"{script.name}: {VARIABLE} names no folder with {script.project}/{script.folder}")
                continue
            trial = try_script(script, origin, 29507)
            print(line(script, trial), flush=True)
            if "NO" in line(script, trial):
                print(trial.plain.code, trial.watched.code, trial.overflowed.code, trial.clean, trial.overflow)
                print(*trial.differences, sep="\n")
                print(trial.overflowed.text[-1500:])


if __name__ == "__main__":
    main()
