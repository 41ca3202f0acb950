"""Frameworks as their users run them, on the stand-in: two ranks over NCCL, the newest releases.

    python3 tests/fakes/cuda/run.py --frameworks --shell       then, for the table of docs/frameworks.md:
    python tests/fakes/cuda/framework_rows.py [WORD OF A NAME]...

Each row trains plainly, watched, and watched while a batch or a weight of rank 1 is too large.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frameworks"))

from rows import OVERFLOW, PORT, PYTHON, RANKS, TORCHRUN, Row, run_plainly, run_to_overflow, run_watched

BAD_RANK, SIZE = 1, 2
HEAD = ("framework", "command", "same", "healthy", "overflow of rank 1")


@dataclass(frozen=True)
class CudaRow(Row):
    """Its script is told the device, and torchrun is replaced by `gpuwatch launch`."""

    certainty: str = "established"
    """Of "clean": `supported` where the script frees what an optimizer keeps in 16 bits before it is read."""
    line: str = "return self.widen(self.keep(x))"
    """On which the operation is that made the number, if it is named; "" for a line of a package, which may change."""

    def is_operation(self, found: dict[str, str] | None) -> bool:
        """Whether the operation of a verdict is the one that made the number. None, which says "unknown", is no error.

        It is a matter of time: after the next step, or next to a collective, a forward is not run a second time.
        """
        return found is None or (found["module"] == self.module and self.line in ("", found["code"]))

    def command(self, ranks: int, rank: int, port: int, watch: Sequence[str] = ()) -> list[str]:
        words = [*super().command(ranks, rank, port, watch), "--device", "cuda"]
        if watch and self.launcher == TORCHRUN:
            at = len(watch)
            begin = [word if word != "run" else "launch" for word in words[: at - 1]]
            words = [*begin, "--preflight", "off", *words[at + TORCHRUN.index("--nproc-per-node") :]]
        return words


def torchrun(name: str, script: str, how: str = "", package: str = "torch", **more: str) -> CudaRow:
    told = ("--how", how) if how else ()
    return CudaRow(name, package, "gpuwatch launch train.py", TORCHRUN, f"with_{script}.py", told, **more)


def lightning(strategy: str) -> CudaRow:
    shown, arguments = "gpuwatch run -- python train.py", ("--how", strategy)
    name = f"Lightning, {strategy}"
    return CudaRow(name, "lightning", shown, (PYTHON,), "with_lightning.py", arguments, "net.block.widen")


def deepspeed(stage: int) -> CudaRow:
    launcher = (PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", RANKS, "--master_port", PORT)
    shown, arguments = "gpuwatch run -- deepspeed train.py", ("--how", str(stage))
    return CudaRow(f"DeepSpeed, ZeRO {stage}", "deepspeed", shown, launcher, "with_deepspeed.py", arguments)


ACCELERATE = (PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", RANKS)
ACCELERATE += ("--main_process_port", PORT)
PEFT, GPT2 = "base_model.model.block.widen.base_layer", "transformer.h.0.mlp.c_fc"
TITAN = "layers.0.feed_forward.w1"
MEGATRON = "decoder.layers.0.mlp.linear_fc1"
WRAPPED = {"module": f"module.{MEGATRON}", "value": "", "line": ""}
"""Float16Module has the model as its `module`."""
ROWS = [
    torchrun("torch's FSDP1", "fsdp", "fsdp1"),
    torchrun("torch's FSDP2", "fsdp", "fsdp2"),
    torchrun("torch's FSDP2, bf16, checkpointing", "fsdp", "fsdp2-bf16"),
    torchrun("torch's tensor parallel", "tensor_parallel"),
    torchrun("torch's pipeline, GPipe", "pipeline", "GPipe", module="widen"),
    torchrun("torch's pipeline, 1F1B", "pipeline", "1F1B", module="widen"),
    torchrun("torch's context parallel", "context_parallel", certainty="supported"),
    torchrun("torchao, float8 under FSDP2", "torchao", package="torchao"),
    CudaRow("accelerate", "accelerate", "gpuwatch run -- accelerate launch train.py", ACCELERATE, "with_accelerate.py"),
    torchrun("peft, LoRA", "peft", package="peft", module=PEFT, line=""),
    torchrun("transformers' Trainer", "trainer", package="accelerate", module="net.block.widen"),
    lightning("ddp"),
    lightning("fsdp"),
    deepspeed(1),
    deepspeed(2),
    deepspeed(3),
    torchrun("trl's SFTTrainer", "trl", package="trl", module=GPT2, value="", line=""),
    torchrun("trl's DPOTrainer", "trl", "dpo", package="trl", module=GPT2, value="", line=""),
    torchrun("trl's GRPOTrainer", "trl", "grpo", package="trl", module=GPT2, value="", line=""),
    torchrun("megatron-core, TP 2", "megatron", package="megatron", module=MEGATRON, value="", line=""),
    torchrun("megatron-core, distributed optimizer", "megatron", "sharded", "megatron", **WRAPPED),
    torchrun("torchtitan, FSDP2", "titan", package="torchtitan", module=TITAN, value="", line=""),
]


def afresh(run, row: Row):
    """In a folder of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        return run(row, SIZE, Path(folder), port)


def cells(row: CudaRow) -> list[str]:
    """What was seen of a row. What was not as it should be is told in capitals, with the end of what was said."""
    found = [row.name, f"`{row.shown}`"]
    if not row.is_installed:
        return [*found, "not installed", "", ""]
    plain = afresh(run_plainly, row)
    if plain.code:
        return [*found, f"IT FAILS WITHOUT GPUWATCH\n{plain.text[-6000:]}", "", ""]
    watched, clean = afresh(run_watched, row)
    same = watched.code == 0 and watched.losses == plain.losses != []
    found.append("yes" if same else f"NO: {watched.code}\n{plain.losses}\n{watched.losses}\n{watched.text[-6000:]}")
    found.append(f"{clean['kind']}, {clean['certainty']}")
    if (clean["kind"], clean["certainty"]) != ("clean", row.certainty):
        found[-1] += f"\n{clean['statement']}\n{clean['evidence']}\n{watched.text[-3000:]}"
    outcome, verdict = afresh(run_to_overflow, row)
    place = verdict["kind"], verdict["rank"], verdict["module"]
    operation = verdict["operation"]
    if outcome.code == OVERFLOW and place == ("overflow", BAD_RANK, row.module) and row.is_operation(operation):
        named = f", `{operation['op']}`" if operation is not None else ""
        found.append(f"`{verdict['module']}`, {verdict['certainty']}{named}")
    else:
        said = f"{verdict['statement']}\n{verdict['evidence']}\n{outcome.text[-6000:]}"
        found.append(f"NO: {outcome.code} {place} {said}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows with one of these in their name")
    words = parser.parse_args().words
    chosen = [row for row in ROWS if not words or any(word in row.name for word in words)]
    known = packages_distributions()
    names = sorted({known[row.package][0] for row in chosen if row.package in known})
    print(*(f"{name} {version(name)}" for name in names), sep=", ")
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for row in chosen:
        try:
            print(f"| {' | '.join(cells(row))} |", flush=True)
        except FileNotFoundError as error:  # on a machine that is too busy to start a collector
            print(f"| {row.name} | NO REPORT: {error.filename}", flush=True)


if __name__ == "__main__":
    main()
