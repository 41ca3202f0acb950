"""What faulthandler writes, read again: text as it was written by Python 3.11 and 3.14."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.recorder.stalls import (
    MOST_LINES,
    has_left_backward,
    is_around_collectives,
    is_users,
    parse_fatal,
    parse_stack,
    takes_long,
)

from ..test_imports import ROOT

ASKED = """Current thread 0x00007f01 (most recent call first):
  File "/home/me/train.py", line 12 in load
  File "/home/me/train.py", line 41 in <module>
"""
FATAL_3_11 = """Fatal Python error: Bus error

Current thread 0x00007f02 (most recent call first):
  File "/home/me/model.py", line 7 in forward
  File "/home/me/train.py", line 41 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""
FATAL_3_14 = """Fatal Python error: Segmentation fault

Current thread 0x00007f02 [python] (most recent call first):
  File "/home/me/model.py", line 7 in forward

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x31 [0x5e10]
  Binary file "/usr/lib/libc.so.6", at +0x45330 [0x7a]
  Binary file "/site/torch/lib/libtorch_cpu.so", at _ZN2at6native4copyE+0x1f [0x7b]
  <truncated rest of calls>

Extension modules: torch._C (total: 1)
"""
MODEL = StackLine("/home/me/model.py", 7, "forward", "x = y")


def source(file: str, line: int) -> str:
    return "    x = y\n" if file.endswith("model.py") else ""


def test_a_fatal_signals_stack_comes_after_those_that_were_asked_for():
    found = parse_fatal(ASKED + FATAL_3_11, source)
    assert found == ([MODEL, StackLine("/home/me/train.py", 41, "<module>")], [])
    assert parse_stack(ASKED)[0].line == 12


def test_names_of_native_functions_come_first():
    found, _ = parse_fatal(FATAL_3_14, source)

    assert found[-1] == MODEL
    assert found[-2] == StackLine("/site/torch/lib/libtorch_cpu.so", 0, "_ZN2at6native4copyE")
    assert found[-2].short == "_ZN2at6native4copyE of libtorch_cpu.so"
    assert found[-1].short == "model.py:7 in forward: x = y"


def test_the_calls_that_run_the_script_are_left_out():
    start = """Fatal Python error: Segmentation fault

Current thread 0x00007f02 (most recent call first):
  File "/home/me/worker/__main__.py", line 3 in load
  File "/home/me/train.py", line 41 in <module>
  File "/opt/checkout/worker/__main__.py", line 157 in _execute
  File "/opt/checkout/worker/__main__.py", line 78 in main
  File "/opt/checkout/core/guest/start.py", line 45 in _run_gpuwatch
  File "/opt/checkout/core/guest/start.py", line 59 in <module>
"""
    assert [line.line for line in parse_fatal(start).stack] == [3, 41]
    before = [line for line in start.splitlines(keepends=True) if "/me/" not in line]
    assert [line.line for line in parse_fatal("".join(before)).stack] == [157, 78, 45, 59], "the script has not begun"


def test_without_one_there_is_none():
    assert parse_fatal(ASKED) == parse_fatal("") == parse_fatal("Fatal Python error: ") == ([], [])


@pytest.mark.parametrize(
    ("current", "stack"), [("", []), ("Current thread", [StackLine("/home/me/watch.py", 3, "watchdog")])]
)
def test_the_main_threads_stack_is_known_where_another_thread_has_aborted(current, stack):
    """A library's own thread has no Python: then no thread is called the current one."""
    text = f"""Fatal Python error: Aborted

{current or "Thread"} 0x00007f01 (most recent call first):
  File "/home/me/watch.py", line 3 in watchdog

Thread 0x00007f02 (most recent call first):
  File "/home/me/model.py", line 7 in forward
"""
    assert parse_fatal(text, source) == (stack, [MODEL])


def test_the_call_that_runs_the_script_is_not_the_users():
    """Its two lines, as they stand in core/guest/start.py, wherever that lies."""
    lines = [line.strip() for line in (ROOT / "core" / "guest" / "start.py").read_text().splitlines()]
    (function,) = (line.split()[1].partition("(")[0] for line in lines if line.startswith("def _run_gpuwatch"))
    assert lines.count(f"{function}()") == 1
    inner = StackLine("/home/me/checkout/core/guest/start.py", 45, function, "sys.exit(module.main())")
    outer = StackLine("/home/me/checkout/core/guest/start.py", 59, "<module>", f"{function}()")
    assert not is_users(inner.shown) and not is_users(outer.shown)
    assert is_users(StackLine("/home/me/core/guest/start.py", 4, "_main", "train()").shown)


def test_a_call_of_gpuwatchs_own_hooks_is_not_the_users_wherever_it_lies():
    hook = ROOT / "worker" / "hooks" / "backward.py"
    assert hook.is_file()
    assert not is_users(StackLine(str(hook), 188, "watch_graph", "leaf = tensor.grad_fn").shown)
    assert is_users(StackLine(str(ROOT / "examples" / "faults.py"), 3, "main", "train()").shown)


def test_a_stack_without_autograds_engine_has_left_the_backward():
    loading, engine = StackLine("/home/me/data.py", 7, "load"), StackLine("/torch/graph.py", 9, "_engine_run_backward")
    assert has_left_backward([loading])
    assert not has_left_backward([loading, engine]) and not has_left_backward([])
    assert not has_left_backward([loading] * MOST_LINES), "its outer calls are not there"


def test_a_compiled_model_that_runs_does_not_compile():
    runs = [StackLine("/site/torch/_dynamo/eval_frame.py", 700, "compile_wrapper")]

    assert not takes_long(runs)
    assert takes_long([*runs, StackLine("/site/torch/_dynamo/convert_frame.py", 1, "__call__")])
    assert takes_long([StackLine("/site/torch/serialization.py", 900, "save")])


def test_our_own_functions_around_collectives_are_known_by_the_file_that_they_are_in():
    files = [path for path in (ROOT / "worker").rglob("*.py") if "def _around(self" in path.read_text()]
    assert [is_around_collectives(str(file)) for file in files if "METHODS" in file.read_text()] == [True]
