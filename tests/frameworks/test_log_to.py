"""gpuwatch's values are in the tracker that a script logs to, beside its own: trackers and frameworks as they are,
without a server."""

import json
import struct
import sys
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, PYTHON, TORCHRUN, Row, gpuwatch, run, run_plainly

PLACES = {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true", "TENSORBOARD_LOGGING_DIR": "curves"}
LOGGED = [
    Row(name, needed, "", launcher, script, ("--how", how), module, PLACES)
    for name, needed, launcher, script, how, module in (
        ("wandb", "wandb", TORCHRUN, "logs_to.py", "wandb", "block.widen"),
        ("mlflow", "mlflow", TORCHRUN, "logs_to.py", "mlflow", "block.widen"),
        ("tensorboard", "tensorboard", TORCHRUN, "logs_to.py", "tensorboard", "block.widen"),
        ("lightning", "lightning", (PYTHON,), "with_lightning.py", "log", "net.block.widen"),
        ("transformers", "accelerate", TORCHRUN, "with_trainer.py", "log", "net.block.widen"),
    )
]
HEADROOM = [127, 127, 0.18]
"""`widen` doubles numbers of which the largest is nearly 1. In the last batch `keep` returns 3e38, and `widen` inf."""
FOUND = "rank 0: +inf in output of `{}` (Linear), forward of batch"
pytestmark = pytest.mark.slow
each = pytest.mark.parametrize("row", LOGGED, ids=lambda row: row.name)


@pytest.fixture
def port(row: Row):
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(25000, 26000)) as (number,):
        yield number


def of_tensorboard(folder: Path):
    """The numbers by step, and the last texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(path)).Reload()
    numbers = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return numbers, {tag.removesuffix("/text_summary"): text for tag, text in texts.items()}


def of_mlflow(folder: Path):
    import mlflow

    client = mlflow.MlflowClient(f"file:{folder}/mlruns")
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(each.step, each.value) for each in history] for name, history in histories.items()}, found.data.tags


def of_wandb(folder: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    def named(items):
        return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}

    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    numbers, texts = {}, {}
    for data in records_of(path.read_bytes()):
        record = Record.FromString(data)
        row = named(record.history.item)
        for name, value in row.items():
            numbers.setdefault(name, []).append((row["_step"], value))
        texts.update(named(record.summary.update))
    return numbers, texts


def records_of(log: bytes):
    """Those of LevelDB's log format, which follow 7 bytes of W&B's own."""
    at, parts = 7, []
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # the rest of a block is filled up
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        parts.append(log[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


READERS = {"wandb": of_wandb, "mlflow": of_mlflow}


@pytest.mark.sample(1, turns=True)
@each
def test_the_tracker_has_the_numbers_and_what_the_rank_has_found(row, tmp_path, port, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = run(row, row.command(2, 0, port, gpuwatch("logged")), tmp_path)
    assert done.code == OVERFLOW, done.text
    numbers, texts = READERS.get(row.name, of_tensorboard)(tmp_path)
    prefix = "train/gpuwatch/" if row.name == "transformers" else "gpuwatch/"
    assert [value for _, value in numbers[prefix + "headroom"]] == pytest.approx(HEADROOM, abs=0.5)
    assert texts[prefix + "closest_module"] == f"`{row.module.replace('widen', 'keep')}` (Linear), float32"
    assert [value for _, value in numbers[prefix + "nonfinite"]] == [0, 0, 1]
    assert [value > 0 for _, value in numbers[prefix + "step_seconds"]] == [True, True]
    assert texts[prefix + "overflow"].startswith(FOUND.format(row.module))
    own = {"lightning": "loss", "transformers": "train/loss"}.get(row.name, "loss")
    steps = [step for step, _ in numbers[own]]
    assert [step for step, _ in numbers[prefix + "headroom"]][:2] == steps[:2], "the script's own steps"


@pytest.mark.soak
@each
def test_without_gpuwatch_the_script_trains_and_one_line_says_so(row, tmp_path, port):
    done = run_plainly(row, 2, tmp_path, port)
    assert done.code == 0, done.text
    assert done.text.count("gpuwatch: log_to logs nothing") == (2 if row.script != "logs_to.py" else 1)
