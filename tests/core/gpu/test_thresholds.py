from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.core.gpu.health_grades import judge, load_thresholds
from gpuwatch.core.gpu.limits import CHECKS, DEFAULTS, CheckLimits
from gpuwatch.core.gpu.nvml_child import GpuReading

toml = pytest.mark.skipif(not (find_spec("tomllib") or find_spec("tomli")), reason="Python 3.10 without tomli")


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "limits.json") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_no_file_is_the_table_itself():
    assert load_thresholds("") == DEFAULTS


def test_every_row_has_a_source_in_the_docs_and_something_to_do():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    page = (Path(__file__).parents[3] / "docs" / "preflight.md").read_text()
    for check in CHECKS:
        limits = [f"{limit:g}" if limit is not None else "" for limit in (check.warn, check.fail)]
        row = f"| `{check.name}` | {check.what} | {limits[0]} | {limits[1]} | "
        assert re.search(f"^{re.escape(row)}\\S.* \\|$", page, re.MULTILINE), row
        assert check.next.endswith(".")
        assert check.needs
        assert check.value is not None or len(check.needs) == 1


def test_a_row_of_the_file_takes_the_place_of_the_tables_and_leaves_the_others(write):
    path = write('{"ecc_corrected_volatile": {"warn": 100, "fail": 1000}, "remap_pending": {"fail": 1}}')
    limits = load_thresholds(path)
    assert limits["ecc_corrected_volatile"] == CheckLimits(100, 1000)
    assert limits["remap_pending"] == CheckLimits(warn=1, fail=1), "what it does not say stays"
    changed = {"ecc_corrected_volatile", "remap_pending"}
    assert {name: row for name, row in limits.items() if name not in changed} == {
        name: row for name, row in DEFAULTS.items() if name not in changed
    }


@toml
def test_a_toml_file_says_the_same(write):
    path = write("[pcie_lanes_lost]\nfail = 8\n[ecc_uncorrected_aggregate]\nwarn = false\n", "limits.toml")
    limits = load_thresholds(path)
    assert limits["pcie_lanes_lost"] == CheckLimits(warn=1, fail=8)
    assert limits["ecc_uncorrected_aggregate"] == CheckLimits()


@pytest.mark.parametrize(
    ("value", "limits", "grade"),
    [
        (7, {"warn": 8, "fail": 10}, "ok"),
        (8, {"warn": 8, "fail": 10}, "warn"),
        (10, {"warn": 8, "fail": 10}, "fail"),
        (10, {"warn": 8, "fail": False}, "warn"),
        (10, {"warn": False, "fail": False}, "ok"),
        (10, {"warn": False, "fail": 9.5}, "fail"),
    ],
)
def test_from_a_limit_on_the_grade_is_the_limits(write, value, limits, grade):
    found = load_thresholds(write(json.dumps({"ecc_corrected_volatile": limits})))
    judged = {one.check: one for one in judge(GpuReading("GPU-1", values={"ecc_corrected_volatile": value}), found)}
    assert judged["ecc_corrected_volatile"].grade == grade


@pytest.mark.parametrize(("temperature", "grade"), [(86, "ok"), (87, "warn"), (89, "warn"), (90, "fail"), (95, "fail")])
def test_where_small_numbers_are_bad_the_limit_is_reached_from_above(write, temperature, grade):
    limits = load_thresholds(write('{"temperature_margin": {"warn": 5, "fail": 2}}'))
    reading = GpuReading("GPU-1", values={"temperature": temperature, "temperature_slowdown": 92})
    judged = {one.check: one for one in judge(reading, limits)}
    assert judged["temperature_margin"].grade == grade


BAD = [
    ("[1, 2]", "expected a table per check in", "found list"),
    ('{"ecc": {"warn": 1}}', "expected checks out of lost, recovery_action, ecc_uncorrected_volatile", "found 'ecc'"),
    ('{"remap_pending": {}}', "expected warn, fail or both for remap_pending", "found {}"),
    ('{"remap_pending": 3}', "expected warn, fail or both for remap_pending", "found 3"),
    ('{"remap_pending": {"wran": 3}}', "expected warn, fail or both for remap_pending", "found wran"),
    ('{"remap_pending": {"warn": "3"}}', "expected a number, or false for never, as remap_pending.warn", "found '3'"),
    ('{"remap_pending": {"fail": true}}', "expected a number, or false for never, as remap_pending.fail", "found True"),
    ('{"remap_pending": {"fail": null}}', "expected a number, or false for never, as remap_pending.fail", "found None"),
    ("{", "expected JSON in", "found: "),
]


@pytest.mark.parametrize(("text", "expected", "found"), BAD, ids=[text for text, *_ in BAD])
def test_a_bad_file_is_one_sentence(write, text, expected, found):
    path = write(text)
    with pytest.raises(UsageError) as raised:
        load_thresholds(path)
    sentence = str(raised.value)
    assert sentence.startswith("expected")
    assert expected in sentence
    assert found in sentence
    assert path in sentence
    assert raised.value.exit_code == 2


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"expected a file that can be read, found .*nowhere.toml.*No such"):
        load_thresholds(str(tmp_path / "nowhere.toml"))


@toml
def test_tomli_reads_it_for_a_python_without_a_reader(write, monkeypatch):
    path = write("[pcie_lanes_lost]\nfail = 8\n", "limits.toml")
    monkeypatch.setitem(sys.modules, "tomli", import_module("tomllib" if find_spec("tomllib") else "tomli"))
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert load_thresholds(path)["pcie_lanes_lost"] == CheckLimits(warn=1, fail=8)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(UsageError, match=r"expected Python 3\.11 or the package tomli to read it, found neither"):
        load_thresholds(path)


@toml
@pytest.mark.parametrize("data", [b"[remap_pending\n", b"\xff\xfe"], ids=["not TOML", "not text"])
def test_a_toml_file_that_is_none_is_one_sentence(tmp_path, data):
    path = tmp_path / "limits.toml"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="expected TOML in"):
        load_thresholds(str(path))


@toml
def test_toml_nan_is_no_number(write):
    with pytest.raises(UsageError, match="expected a number"):
        load_thresholds(write("[remap_pending]\nwarn = nan\n", "limits.toml"))
