"""torch 2.13 aborts every third process under load that ends with a process group of gloo (pytorch/pytorch#179291)."""

from pathlib import Path

from ..cases import case

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "e2e", TESTS / "docs", TESTS / "scenarios", TESTS / "surroundings", TESTS.parent / "examples")
TAKES_IT_DOWN = ("destroy_process_group", "ddp_overflow import", "os._exit")  # train of ddp_overflow.py does
ENDS_BADLY = ("explained.py", "group_timeout.py", "killed.py", "left_alone.py", "raises.py")
"""Not one of their jobs comes to its end, and its tests do not ask with which code a rank has ended."""


def test_a_script_that_makes_a_process_group_takes_it_down_as_it_ends():
    scripts = [path for folder in FOLDERS for path in folder.rglob("*.py") if not path.name.startswith("test_")]
    made = [path for path in scripts if "init_process_group" in path.read_text()]
    assert len(made) > 30
    for path in made:
        with case(path.relative_to(TESTS.parent)):
            found = [what for what in TAKES_IT_DOWN if what in path.read_text()]
            assert bool(found) != (path.name in ENDS_BADLY)
