"""Where two batches first differ, and `gpuwatch diff` as a user types it."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.finish import open_store
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.collector.views.batch_diff import difference
from gpuwatch.core.frames import Frame, Row
from gpuwatch.core.wire.messages import AgentMessage, encode
from hypothesis import given
from hypothesis import strategies as st

NAN = float("nan")


def row(role="output", number=1.0, **other):
    flags = other.pop("flags", 0)
    fields = {"nan": bool(flags & 1), "posinf": bool(flags & 2), "neginf": bool(flags & 4), "flags": flags}
    return Row(role, 0.5, number, **{"dtype": "float32", "shape": [2, 3], **fields, **other})


def frames(*calls, phase="forward"):
    return [Frame(0, n, module, "Linear", phase, list(rows)) for n, (module, *rows) in enumerate(calls)]


def test_alike_is_alike_and_nan_is_what_nan_is():
    a = frames(("fc1", row(), row("weight", 3.0)), ("fc2", row(number=NAN, flags=1)))
    found = difference(a, frames(("fc1", row(), row("weight", 3.0)), ("fc2", row(number=NAN, flags=1))))
    assert (found.rows, found.compared, found.before) == ([], 3, 3)
    assert found.first() is None


def test_the_first_one_in_the_order_of_the_calls():
    a = frames(("fc1", row()), ("fc2", row("input[0]"), row()), ("fc1", row(number=8.0)))
    b = frames(("fc1", row()), ("fc2", row("input[0]"), row(number=1.5)), ("fc1", row(number=2.0)))
    found = difference(a, b)
    assert [(each.module, each.role, each.call, each.factor) for each in found.rows] == [
        ("fc2", "output", 0, 1.5),
        ("fc1", "output", 1, 4.0),
    ]
    assert (found.before, found.first().module, found.first(2.0).module) == (2, "fc2", "fc1")
    assert found.first(5.0) is None


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (row(), row(shape=[3, 2]), "shape"),
        (
            row(),
            row(dtype="float16"),
            "dtype",
        ),
        (row(), row(number=None, flags=2), "non-finite"),
        (row(number=None, flags=2), row(number=None, flags=4), "non-finite"),
        (row(), row(zeros=0.5), "numbers"),
        (row(), row(kind="not_measurable", number=None), "only in A"),
        (row(kind="lost", number=None), row(), "only in B"),
    ],
)
def test_what_differs(a, b, what):
    (found,) = difference(frames(("fc1", a)), frames(("fc1", b))).rows
    assert found.what == what


def test_what_one_side_lacks_is_told():
    a, b = frames(("fc1", row()), ("adapter", row())), frames(("fc1", row()), ("head", row()))
    assert [(each.module, each.what) for each in difference(a, b).rows] == [
        ("adapter", "only in A"),
        ("head", "only in B"),
    ]
    assert difference(a, b).compared == 1


def test_a_factor_to_zero_or_to_a_value_that_is_not_finite_is_none_and_large():
    (zero,) = difference(frames(("fc1", row(number=0.0))), frames(("fc1", row()))).rows
    (inf,) = difference(frames(("fc1", row())), frames(("fc1", row(number=None, flags=2)))).rows
    assert zero.factor is None and zero.exceeds(1e30)
    assert inf.factor is None and inf.exceeds(1e30)


def test_gradients_in_another_order_are_the_same():
    a = [Frame(0, n, "fc1", "Linear", "backward", [row(role)]) for n, role in enumerate(("grad weight", "grad bias"))]
    b = [Frame(0, n, "fc1", "Linear", "backward", [row(role)]) for n, role in enumerate(("grad bias", "grad weight"))]
    assert difference(a, b).rows == []


@st.composite
def batches(draw):
    names = st.sampled_from(["fc1", "fc2", "norm"])
    rows = st.builds(row, role=st.sampled_from(["weight", "output"]), number=st.floats(width=32, allow_infinity=False))
    return frames(*draw(st.lists(st.tuples(names, rows), max_size=6)))


@pytest.mark.slow
@given(batches(), batches())
def test_both_directions_agree(a, b):
    there, back = difference(a, b), difference(b, a)
    assert difference(a, a).rows == []
    assert (there.compared, len(there.rows)) == (back.compared, len(back.rows))
    mirrored = {"only in A": "only in B", "only in B": "only in A"}
    key = lambda each: (each.module, each.role, each.call)  # noqa: E731
    assert {key(each): each.what for each in there.rows} == {
        key(each): mirrored.get(each.what, each.what) for each in back.rows
    }
    assert {key(each): each.factor for each in there.rows} == {key(each): each.factor for each in back.rows}


@pytest.fixture
def runs(make, tmp_path):
    """`same` and `again` are alike in batch 4; `later` differs from fc2 on, and has batch 5, too."""
    folder = tmp_path / "runs"

    def batch_of(number, large, rank=0):
        batch = make.Batch(rank, batch=number, page=number)
        x, h = batch.tensor(), batch.tensor(2.0)
        batch.call("fc1", "Linear", given=[x], returned=[h])
        batch.call("fc2\x1b[2J", "Linear", given=[h], returned=[batch.tensor(large)])
        return batch

    def write(name, *batches, ranks=1):
        bodies = [make.hello(nproc=ranks)]
        for batch in batches:
            bodies += batch.messages()
        for rank in range(ranks):
            bodies += make.finished(rank)
        paths = RunPaths(folder / name)
        paths.folder.mkdir(parents=True)
        store = open_store(paths, 21)
        for n, body in enumerate([*bodies, make.NodeBye("ok")], 1):
            message = AgentMessage(n, body, n - 1)
            store.add("a0", message, encode(message))
        store.close()

    write("same", batch_of(4, 3.0))
    write("again", batch_of(4, 3.0))
    write("later", batch_of(4, 30.0), batch_of(5, 4.0))
    write("two", batch_of(4, 3.0), batch_of(4, 3.5, 1), ranks=2)
    write("empty")
    return folder


def run(folder, *arguments):
    return CliRunner().invoke(
        cli, ["diff", "--runs-dir", str(folder), *arguments], env={**os.environ, "COLUMNS": "160"}
    )


def exit_code(folder, *arguments):
    return cli.main(["diff", "--runs-dir", str(folder), *arguments], standalone_mode=False)


def test_two_runs_that_are_the_same(runs):
    done = run(runs, "same", "again")
    assert exit_code(runs, "same", "again") == 0
    assert "SAME  All 4 tensors are the same" in done.output
    assert "A  run same, rank 0, Net, batch 4, step 4" in done.output


def test_two_runs_that_differ(runs):
    done = run(runs, "same", "later")
    text = " ".join(done.output.split())
    assert (
        "DIFFERENT The first difference is output of `fc2\\x1b[2J` (Linear), forward: abs max is 3.00e+00 in A" in text
    )
    assert "The 3 tensors before it are the same by abs max, abs min and zeros." in text
    assert "\x1b" not in done.output
    assert exit_code(runs, "same", "later") == 1


def test_two_ranks_and_two_batches_of_one_run(runs):
    assert "abs max is 3.00e+00 in A and 3.50e+00 in B" in " ".join(run(runs, "two", "--rank", "0,1").output.split())
    assert "No abs max differs by more than a factor of 2." in run(runs, "two", "--rank", "0,1").output
    assert "3.00e+01 in A and 4.00e+00 in B" in " ".join(run(runs, "later", "--batch", "4,5").output.split())


def test_as_json(runs):
    found = json.loads(run(runs, "same", "later", "--format", "json").output)
    assert (found["a"]["run"], found["b"]["batch"]) == ("same", 4)
    assert [each["role"] for each in found["difference"]["rows"]] == ["output"]
    assert found["difference"]["rows"][0]["factor"] == 10.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected two runs, or one with --rank A,B or --batch A,B, found 0 runs"),
        (("same",), "found 1 run and one rank and batch of it; as: gpuwatch diff same --rank 0,1"),
        (("same", "nowhere"), "found none at 'nowhere'"),
        (("nowhere",), "found none at 'nowhere'"),
        (("smae", "later"), "found none at 'smae'; did you mean same?"),
        (("same", "again", "--rank", "x"), "--rank: expected one number, or one for each side as 0,1, found 'x'"),
        (("same", "again", "--rank", "7"), "--rank: expected a rank of run same (0), found 7"),
        (("same", "later", "--batch", "4,9"), "in the store of run later (4, 5), found 9"),
        (("same", "later", "--batch", "5,4"), "in the store of run same (4), found 5"),
        (("same", "empty"), "in the store of run empty, found none"),
    ],
)
def test_wrong_usage_is_one_sentence(runs, arguments, words):
    done = run(runs, *arguments)
    assert words in str(done.exception)
    assert done.exception.exit_code == 2
