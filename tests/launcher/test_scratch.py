from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from gpuwatch.core.host import boot_id, host_name
from gpuwatch.core.recorder import run_folder
from gpuwatch.core.recorder.layout import file_bytes


@pytest.fixture
def bases(tmp_path, monkeypatch):
    """Two folders stand for /dev/shm and /tmp; there is no /var/tmp."""
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(run_folder, "_DISK", tmp_path / "none")
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return shared, temporary


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def folder_of(base: Path, name: str, pid: int, created: int) -> Path:
    folder = base / f"gpuwatch-{os.getuid()}-{name}"
    folder.mkdir()
    (folder / "owner").write_text(f"{pid} {created} {run_folder._pid_namespace()} {boot_id()} {host_name()}")
    (folder / "rank-00000.attempt-000.recorder").write_bytes(b"x")
    return folder


def test_the_folder_is_private_and_in_shared_memory_where_there_is_room(bases):
    folder = run_folder.make_scratch(1)
    assert folder.parent == bases[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_room_in_shared_memory_a_disk_takes_it_and_that_is_said(bases, small_disk, monkeypatch):
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", small_disk)
    said = []
    assert run_folder.make_scratch(2, said.append).parent == bases[1]
    (sentence,) = said
    assert f"{small_disk} has 0 MiB free, and 2 recorders need 12 MiB" in sentence
    assert f"the recorders are in {bases[1]}" in sentence


def test_half_of_the_shared_memory_is_left_to_the_script(bases, monkeypatch):
    needed = file_bytes()
    for free, base in ((2 * needed + 1, bases[0]), (2 * needed, bases[1])):
        monkeypatch.setattr(run_folder, "_free", lambda path, free=free: free if path == bases[0] else 1 << 40)
        assert run_folder.make_scratch(1).parent == base


def test_of_two_disks_the_first_with_room_takes_it(bases, small_disk, monkeypatch):
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", small_disk)
    monkeypatch.setattr(run_folder, "_DISK", bases[0])
    assert run_folder.make_scratch(1).parent == bases[1]
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    assert run_folder.make_scratch(1).parent == bases[0]


def test_without_shared_memory_a_disk_takes_it(bases):
    bases[0].rmdir()
    assert run_folder.make_scratch(1).parent == bases[1]


def test_where_shared_memory_takes_no_folder_a_disk_does_and_why_is_said(bases, monkeypatch):
    bases[0].rmdir()
    free = run_folder._free
    monkeypatch.setattr(run_folder, "_free", lambda base: 1 << 40 if base == bases[0] else free(base))
    said = []
    assert run_folder.make_scratch(1, said.append).parent == bases[1]
    (sentence,) = said
    assert "No such file or directory" in sentence


def test_where_no_folder_can_be_made_that_is_said_and_the_path_leads_nowhere(bases):
    for base in bases:
        base.rmdir()
    said = []
    folder = run_folder.make_scratch(1, said.append)
    assert not folder.exists()
    (sentence,) = said
    assert "the ranks go on unwatched" in sentence
    run_folder.remove_scratch(folder)


def test_a_folder_that_cannot_be_signed_is_used_all_the_same(bases, monkeypatch):
    owner = Path("no such folder") / "owner"
    monkeypatch.setattr(run_folder, "_OWNER", owner)
    folder = run_folder.make_scratch(1)
    assert list(folder.iterdir()) == []


def test_a_folder_of_a_dead_process_is_removed(bases):
    stale = [folder_of(base, "stale", dead_pid(), 1) for base in bases]
    made = run_folder.make_scratch(1)
    assert not any(folder.exists() for folder in stale)
    assert made.exists()


def test_a_folder_of_a_live_process_stays(bases):
    mine = run_folder.make_scratch(1)
    run_folder.remove_stale()
    assert mine.exists()


def test_a_folder_of_a_live_process_stays_when_the_clock_is_set(bases, tmp_path):
    """psutil's create_time is the boot time plus ticks; the boot time in /proc/stat moves with the clock."""
    folders = [run_folder.make_scratch(1), bases[1] / f"gpuwatch-{os.getuid()}-earlier"]
    folders[1].mkdir()
    (folders[1] / "owner").write_text(f"{os.getpid()} {psutil.Process().create_time()} {run_folder._pid_namespace()}")
    stat_file = tmp_path / "stat"
    text = Path("/proc/stat").read_text()
    boot = next(line for line in text.splitlines() if line.startswith("btime "))
    stat_file.write_text(text.replace(boot, f"btime {int(boot.split()[1]) - 3600}"))
    code = (
        "import psutil, tempfile; from pathlib import Path; from gpuwatch.core.recorder import run_folder\n"
        f"run_folder._SHARED_MEMORY = Path({str(bases[0])!r}); tempfile.tempdir = {str(bases[1])!r}\n"
        f"print(psutil.Process({os.getpid()}).create_time())\n"
        "run_folder.make_scratch(1)"
    )
    inside = f"mount --bind {stat_file} /proc/stat && exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", inside], capture_output=True, text=True, timeout=60)
    if "not permitted" in done.stderr or "denied" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < psutil.Process().create_time() - 3000, "the clock has been set back"
    assert all(folder.exists() for folder in folders)


def test_of_an_earlier_boot_only_this_hosts_folders_are_removed(bases):
    mine, others = (folder_of(bases[0], name, os.getpid(), 1) for name in ("mine", "others"))
    for folder, host in ((mine, host_name()), (others, "another-host")):
        (folder / "owner").write_text(f"{os.getpid()} 1 {run_folder._pid_namespace()} earlier {host}")
    run_folder.remove_stale()
    assert (mine.exists(), others.exists()) == (False, True)


def test_a_folder_of_another_pid_namespace_stays(bases):
    """Two nodes, or two containers, that share /dev/shm: a pid says nothing there."""
    folder = folder_of(bases[0], "elsewhere", dead_pid(), 1)
    (folder / "owner").write_text(f"{dead_pid()} 1.0 {run_folder._pid_namespace() + 1}")
    run_folder.remove_stale()
    assert folder.exists()


def test_a_pid_that_now_belongs_to_another_process_does_not_keep_the_folder(bases):
    stale = folder_of(bases[0], "reused", os.getpid(), run_folder._began(os.getpid()) - 100)
    run_folder.remove_stale()
    assert not stale.exists()


@pytest.mark.parametrize("owner", ["", "x", "1", "one two", "one two three", "1 1.0"])
def test_a_folder_whose_owner_cannot_be_read_stays(bases, owner):
    folder = folder_of(bases[0], "odd", 1, 1)
    (folder / "owner").write_text(owner)
    run_folder.remove_stale()
    assert folder.exists()


def test_folders_of_other_users_are_not_looked_at(bases):
    other = bases[0] / f"gpuwatch-{os.getuid() + 1}-x"
    other.mkdir()
    (other / "owner").write_text(f"{dead_pid()} 1.0")
    run_folder.remove_stale()
    assert other.exists()


def test_an_adopted_folder_outlives_its_launch(bases):
    folder = folder_of(bases[0], "adopted", dead_pid(), 1)
    run_folder.adopt_scratch(folder)
    run_folder.remove_stale()
    assert folder.exists()


def test_removing_twice_does_no_harm(bases):
    folder = run_folder.make_scratch(1)
    run_folder.remove_scratch(folder)
    run_folder.remove_scratch(folder)
    run_folder.adopt_scratch(folder)
    assert not folder.exists()


@pytest.mark.parametrize("what", ["fifo", "link", "folder", "long", "bytes"])
def test_whatever_somebody_has_put_in_place_of_an_owner_file_a_launch_goes_on(bases, what, tmp_path):
    """Run in a process of its own: one that waits is killed, and the test fails."""
    trap = bases[1] / f"gpuwatch-{os.getuid()}-trap"
    trap.mkdir()
    owner = trap / "owner"
    if what == "fifo":
        os.mkfifo(owner)
    elif what == "link":
        owner.symlink_to("/dev/zero")
    elif what == "folder":
        owner.mkdir()
    else:
        owner.write_bytes(b"1" * 10_000_000 if what == "long" else b"\xff\xfe \0")
    code = (
        "import tempfile; from pathlib import Path; from gpuwatch.core.recorder import run_folder\n"
        f"run_folder._SHARED_MEMORY = Path({str(bases[0])!r}); tempfile.tempdir = {str(bases[1])!r}\n"
        "run_folder.remove_stale()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert trap.exists()


def test_a_link_to_another_folder_is_not_removed_through(bases, tmp_path):
    target = folder_of(tmp_path, "target", dead_pid(), 1)
    (bases[1] / f"gpuwatch-{os.getuid()}-link").symlink_to(target)
    run_folder.remove_stale()
    assert (target / "owner").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder another user's")
def test_a_folder_of_another_user_is_not_believed(bases):
    folder = folder_of(bases[1], "other", dead_pid(), 1)
    os.chown(folder, 12345, 12345)
    run_folder.remove_stale()
    assert folder.exists()


def test_what_the_runs_folder_took_no_more_of_is_kept(bases):
    made = run_folder.make_scratch(1)
    assert run_folder.keep_rescued(made) is None
    (made / run_folder.RESCUED).mkdir()
    (made / run_folder.RESCUED / "run.sqlite").write_text("x")
    kept = run_folder.keep_rescued(made)
    assert kept is not None
    assert [path.name for path in kept.iterdir()] == ["run.sqlite"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_a_file_that_vanishes_meanwhile_does_not_hide_the_others(bases, monkeypatch):
    """A collector that closes its store removes the journals."""
    made = run_folder.make_scratch(1)
    source = made / run_folder.RESCUED
    source.mkdir()
    for name in ("first", "second"):
        (source / name).touch()
    move = shutil.move

    def move_one(path, target):
        move(path, target)
        for other in source.iterdir():
            other.unlink()

    monkeypatch.setattr(run_folder.shutil, "move", move_one)
    said = []
    kept = run_folder.keep_rescued(made, said.append)
    assert kept is not None and len(list(kept.iterdir())) == 1
    assert str(kept) in said[0]


def test_where_nothing_has_room_it_is_told_before_the_training_starts(bases, small_disk, monkeypatch):
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", small_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    said = []
    assert run_folder.make_scratch(8, said.append).parent == small_disk
    assert "has 0 MiB free, and 8 recorders need 48 MiB: ranks that find no room go on unwatched" in said[1]
    assert "TMPDIR" in said[1]


def test_a_folder_is_removed_although_a_descriptor_was_lacking_for_a_moment(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "recorder").touch()
    opened, fails = os.open, [OSError(errno.EMFILE, "Too many open files")]

    def lacking_once(*arguments, **options):
        if fails:
            raise fails.pop()
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "open", lacking_once)
    run_folder.remove_scratch(folder)
    assert fails == []
    assert not folder.exists()
