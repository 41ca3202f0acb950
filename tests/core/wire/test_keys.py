from __future__ import annotations

import pytest
import zmq
from gpuwatch.core.errors import UsageError
from gpuwatch.core.wire.keys import (
    MIN_SECRET_CHARACTERS,
    SECRET_VARIABLE,
    derive_keys,
    others_may_read,
    random_secret,
    read_secret,
)

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_the_same_secret_and_job_give_the_same_keys():
    assert derive_keys(SECRET, "job") == derive_keys(SECRET, "job")


def test_another_job_another_secret_and_the_other_role_have_other_keys():
    pairs = [
        pair for secret, job in ((SECRET, "a"), (SECRET, "b"), ("x" * 20, "a")) for pair in derive_keys(secret, job)
    ]
    assert len({pair.private for pair in pairs}) == len({pair.public for pair in pairs}) == 9


def test_the_public_key_belongs_to_the_private_one():
    for pair in derive_keys(SECRET, "job"):
        assert len(pair.private) == len(pair.public) == 40
        assert zmq.curve_public(pair.private) == pair.public


def test_random_secrets_differ_and_are_long_enough():
    assert random_secret() != random_secret()
    assert len(random_secret()) >= MIN_SECRET_CHARACTERS


def test_no_secret_is_none():
    assert read_secret(None) is None


def test_the_variable_is_read_without_white_space_around_it(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, f"  {SECRET}\n")
    assert read_secret(None) == SECRET


def test_a_file_is_preferred_to_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET_VARIABLE, "y" * 20)
    path = tmp_path / "the secret"
    path.write_text(SECRET + "\n")
    assert read_secret(str(path)) == SECRET


@pytest.mark.parametrize("secret", ["", "short", "x" * (MIN_SECRET_CHARACTERS - 1)])
def test_a_short_secret_is_refused_and_not_shown(secret, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(
        UsageError, match=f"{SECRET_VARIABLE}: expected .* {MIN_SECRET_CHARACTERS} characters"
    ) as caught:
        read_secret(None)
    assert not secret or secret not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--secret-file: expected .*nowhere"):
        read_secret(str(tmp_path / "nowhere"))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(UsageError, match="--secret-file: expected a readable text file"):
        read_secret(str(path))


@pytest.mark.parametrize(("mode", "told"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True)])
def test_a_file_that_others_may_read_is_told_with_the_mend(tmp_path, mode, told):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    sentence = others_may_read(str(path))
    expected = f"--secret-file: other users may read {path} (mode {mode:04o}): chmod 600 {path}"
    assert sentence == (expected if told else "")
    assert others_may_read(None) == ""
