import fcntl

from gpuwatch.launcher.run import tasks as module
from gpuwatch.launcher.run.tasks import Tasks


def test_a_task_that_is_coming_has_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    owner = Tasks("a job", number=2)
    flock, seen = fcntl.flock, []

    def the_owner_looks_first(fd, operation):
        if operation == fcntl.LOCK_EX:
            seen.append(owner.any_failed())
        flock(fd, operation)

    monkeypatch.setattr(module.os, "getpid", lambda: 2)
    monkeypatch.setattr(module.fcntl, "flock", the_owner_looks_first)
    other = Tasks("a job", number=2)
    assert seen == [False], "a task that had not said anything was told as one that had failed"
    assert owner.is_owner
    assert not other.is_owner
    assert len(owner.results()) == 1
    other.close()
    assert owner.any_failed(), "a task that ended without a word has failed"
    owner.close()
    assert not list(tmp_path.iterdir())
