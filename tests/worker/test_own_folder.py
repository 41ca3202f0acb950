import errno
import fcntl
import os

from gpuwatch.worker import watch as own_folder
from gpuwatch.worker.watch import OwnFolder


def test_a_folder_that_is_being_made_is_nobodys_leftover(tmp_path, monkeypatch):
    flock, swept = fcntl.flock, []

    def another_process_looks_first(fd, operation):
        if operation == fcntl.LOCK_EX:
            swept.extend(tmp_path.iterdir())
            for folder in tmp_path.iterdir():
                own_folder._remove_if_free(folder)
        flock(fd, operation)

    monkeypatch.setattr(own_folder.fcntl, "flock", another_process_looks_first)
    folder = OwnFolder(str(tmp_path))
    assert swept == [folder.path], "the other process did not see it"
    assert folder.path.is_dir()
    own_folder._remove_if_free(folder.path)
    assert (folder.path / "lock").exists()
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_it_is_removed_although_a_descriptor_was_lacking_for_a_moment(tmp_path, monkeypatch):
    folder = OwnFolder(str(tmp_path))
    opened, fails = os.open, [OSError(errno.EMFILE, "Too many open files")]

    def lacking_once(*arguments, **options):
        if fails:
            raise fails.pop()
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "open", lacking_once)
    folder.remove()
    assert fails == []
    assert not folder.path.exists()
