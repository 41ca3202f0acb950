"""How peers' programs are graded, and a sample of those that were rewritten, under the real command."""

from __future__ import annotations

import pytest
from gpuwatch.tests.cases import case
from gpuwatch.tests.causes.benchmark import verdict_on
from gpuwatch.tests.peers import formulas
from gpuwatch.tests.peers.grades import EndedRun, PeerGrade, grade, table_of
from gpuwatch.tests.peers.programs import (
    HEALTHY,
    LATENT,
    PROGRAMS,
    REWRITTEN_NUMBER,
    REWRITTEN_SILENT,
    SILENT,
    KnownFault,
    PeerProgram,
)
from gpuwatch.tests.peers.run import main, run, written_words

RECORD = {"steps": 3, "weights": "aa", "leaves": 2, "random": "bb", "bad": None}
LOG = next(program for program in REWRITTEN_NUMBER if program.name == "log_of_sigmoid")
CLEAN = {"kind": "clean", "certainty": "established", "statement": "No overflow."}


def overflow(
    kind: str = "", certainty: str = "supported", says: str = "`log`: the log of 0", advice: str = ""
) -> dict[str, object]:
    cause = {"kind": kind, "certainty": certainty, "statement": says} if kind else None
    steps = ["Look at what computes `loss`.", advice, "In the script's loss, look at `exp`."]
    said = {"statement": "Rank 0 overflowed first.", "cause": cause, "next": steps}
    return {"kind": "overflow", "certainty": "established", **said}


def graded(
    program: PeerProgram, verdict: dict[str, object], code: int = 0, bad: int | None = None, **changed: object
) -> PeerGrade:
    alone = EndedRun(0, [{**RECORD, "bad": bad}], None, "")
    return grade(
        program, alone, EndedRun(code, [{**RECORD, "bad": bad, **changed}], {"verdict": verdict, "insights": []}, "")
    ).grade


def test_a_healthy_program_may_be_neither_alarmed_nor_changed():
    healthy = HEALTHY[0]

    assert graded(healthy, CLEAN) is PeerGrade.RIGHT
    assert graded(healthy, overflow()) is PeerGrade.FALSE_ALARM
    assert graded(healthy, {**CLEAN, "kind": "hang"}) is PeerGrade.FALSE_ALARM
    assert graded(healthy, {**CLEAN, "kind": "unknown"}, code=6) is PeerGrade.LESS
    assert graded(healthy, {**CLEAN, "kind": "unknown"}, code=6, weights="cc") is PeerGrade.CHANGED
    for name in ("weights", "random"):
        with case(name):
            assert graded(healthy, CLEAN, **{name: "cc"}) is PeerGrade.CHANGED
    assert graded(healthy, CLEAN, steps=2) is PeerGrade.CHANGED
    assert graded(healthy, CLEAN, code=1) is PeerGrade.CHANGED


def test_a_silent_error_is_not_in_scope_and_may_not_be_alarmed():
    assert graded(SILENT[0], CLEAN) is PeerGrade.NOT_IN_SCOPE
    assert graded(SILENT[0], overflow("domain")) is PeerGrade.FALSE_ALARM
    assert graded(SILENT[0], CLEAN, weights="cc") is PeerGrade.CHANGED


def test_the_peers_own_check_says_whether_a_latent_bug_came_about():
    latent = LATENT[0]

    assert graded(latent, CLEAN) is PeerGrade.RIGHT
    assert graded(latent, overflow("domain", says="`exp`")) is PeerGrade.FALSE_ALARM
    assert graded(latent, overflow("domain", says="`exp`"), bad=7) is PeerGrade.RIGHT
    assert graded(latent, CLEAN, bad=7) is PeerGrade.MISSED


def test_a_bad_number_is_right_only_by_the_operation_and_its_kind():
    for verdict, expected in (
        (overflow("domain"), PeerGrade.RIGHT),
        (overflow("domain", says="`cost = -(y * torch.log(p)).sum()`"), PeerGrade.RIGHT),
        (overflow("domain", says="`div`: 0 / 0 in log_of_sigmoid"), PeerGrade.LESS),
        (overflow("script", says="`loss` was nan"), PeerGrade.LESS),
        (overflow("script", says="`loss` was nan", advice="In the script's loss, look at `log`."), PeerGrade.RIGHT),
        (overflow("domain", says="`div`: 0 / 0", advice="In the script's loss, look at `log`."), PeerGrade.LESS),
        (overflow(), PeerGrade.LESS),
        (overflow("data"), PeerGrade.WRONG),
        (overflow("data", "established"), PeerGrade.OVER_SURE),
        (CLEAN, PeerGrade.MISSED),
        ({**CLEAN, "kind": "crash"}, PeerGrade.OVER_SURE),
        ({**CLEAN, "kind": "crash", "certainty": "unknown"}, PeerGrade.MISSED),
    ):
        with case(verdict):
            assert graded(LOG, verdict, code=4) is expected


def test_a_program_that_fails_without_gpuwatch_is_not_run():
    assert grade(LOG, EndedRun(1, [], None, ""), None).grade is PeerGrade.NOT_RUN
    assert grade(LOG, EndedRun(0, [RECORD], None, ""), EndedRun(1, [], None, "")).grade is PeerGrade.WRONG


def test_the_table_counts_each_program_once_and_has_the_median_seconds():
    alone = EndedRun(0, [RECORD], None, "")
    clean = EndedRun(0, [RECORD], {"verdict": CLEAN, "insights": []}, "")
    found = [grade(program, alone, clean) for program in (HEALTHY[0], SILENT[0], LOG)]
    found = [*(graded._replace(seconds=(at, at + 2.04)) for at, graded in enumerate(found[:2], 3)), found[2]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table_of(found).splitlines()]

    assert rows[-1][:2] == ["**all**", "3"]
    assert [row[-2:] for row in rows[2:]] == [["3.5", "5.5"], ["-", "-"], ["3.5", "5.5"]]
    assert [sum(map(int, row[2:-2])) for row in rows[2:]] == [int(row[1]) for row in rows[2:]]


def test_of_a_loss_that_has_returned_the_division_is_proved(tmp_path, monkeypatch):
    """There is a square in its graph, too."""
    monkeypatch.chdir(tmp_path)
    verdict = verdict_on(formulas.division_by_a_sum_of_exp)

    assert verdict.cause.statement.startswith("`div`: 0 / 0 (first element: 0, 0 in)")
    assert verdict.cause.certainty == "established"
    assert "`pow`" not in " ".join(verdict.next)


def test_each_program_is_there_once_and_what_is_rewritten_is_written():
    assert len({(program.source, program.path, program.args) for program in PROGRAMS}) == len(PROGRAMS)
    assert len(PROGRAMS) > 90
    for program in (*REWRITTEN_NUMBER, *REWRITTEN_SILENT):
        with case(program.name):
            assert callable(getattr(formulas, program.name))
            assert (program.fault is KnownFault.NUMBER) == bool(program.kinds)


def test_drawn_words_are_the_same_ones_each_time(tmp_path):
    texts = [written_words(tmp_path).joinpath("train.txt").read_text() for _ in range(2)]

    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 6000


def test_a_checkout_that_is_not_there_is_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "--checkout", "GRIST=/nowhere"])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert "--checkout GRIST=/nowhere: NAME=FOLDER, with a folder that is there" in capsys.readouterr().err


REWRITTEN = [*REWRITTEN_NUMBER, *REWRITTEN_SILENT]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("program", REWRITTEN, ids=[program.name for program in REWRITTEN])
def test_a_rewritten_program_is_neither_misnamed_nor_changed(program):
    ended = run(program, {})

    assert ended.grade in (PeerGrade.RIGHT, PeerGrade.LESS, PeerGrade.NOT_IN_SCOPE), ended
