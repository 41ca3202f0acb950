"""Pages of a rank are found without walking over all of them."""

from __future__ import annotations

from gpuwatch.collector.facts import replicas as same_point
from gpuwatch.collector.facts.fold import FactFold, fold


def clean(make, rank, number):
    batch = make.Batch(rank, batch=number, step=number, page=number)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    return batch


def test_pages_are_found_by_step_and_batch_and_the_fuller_copy_takes_the_place(make):
    first = clean(make, 0, 3).messages()
    other = make.Batch(0, batch=4, step=3, page=4)
    other.call("fc", "Linear", given=[other.tensor()], returned=[other.tensor(make.INF)])
    longer = make.Batch(0, batch=5, step=4, page=3)
    for _ in range(2):
        longer.call("fc", "Linear", given=[longer.tensor()], returned=[longer.tensor()])
    pages = fold(("a0", n, body) for n, body in enumerate([*first, *other.messages()], 1)).ranks[0, 0].pages
    assert [page.batch for page in pages.of_step(3)] == [3, 4]
    assert [page.number for page in pages.of_batch(4)] == [4]
    assert list(pages.suspicious) == [4]
    after = [*first, *other.messages(), *longer.messages()]
    pages = fold(("a0", n, body) for n, body in enumerate(after, 1)).ranks[0, 0].pages
    assert [page.batch for page in pages.of_step(3)] == [4]
    assert [page.batch for page in pages.of_step(4)] == [5]
    assert (pages.of_batch(3), sorted(pages)) == ([], [3, 4])


def test_the_same_point_is_not_looked_for_in_every_page(make, monkeypatch):
    folded, n = FactFold(), 0
    for rank in range(2):
        for number in range(300):
            for body in clean(make, rank, number).messages():
                n += 1
                folded.add("a0", n, body)
    facts = folded.facts()
    looked = []
    alike = same_point._is_alike
    monkeypatch.setattr(same_point, "_is_alike", lambda *args: looked.append(args) or alike(*args))
    assert list(same_point.peers_of(facts, facts.ranks[0, 0].pages[250])) == [1]
    assert len(looked) == 1
