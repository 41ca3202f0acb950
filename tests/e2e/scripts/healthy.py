"""Sixty healthy trainings that make a value which is not finite, on purpose, and never train with it.

`healthy.py [NAME ...]` trains those named, or all of them, and says `NAME trained` after each. In each case all losses,
gradients and trained weights are finite, which is asserted here: whoever reports an overflow is wrong.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

INF, NAN = float("inf"), float("nan")
STEPS, ROWS, WIDTH = 4, 6, 8
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Apply(nn.Module):
    """A function as a module, so that what it returns is in a frame."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Guarded(nn.Module):
    """`make` returns values that are not finite, of the data alone; `guard` takes them away; `head` is trained."""

    def __init__(self, make: Callable[..., torch.Tensor], guard: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make = Apply(make)
        self.guard = guard
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, data):
        return self.head(self.guard(self.make(data)))


def batch(step: int) -> torch.Tensor:
    """Numbers from 0 to 2; the first row is 0."""
    data = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) * 2
    data[0] = 0
    return data


def fit(model: nn.Module, then: Callable[[nn.Module, torch.Tensor], None] | None = None) -> None:
    """Train, and call `then(model, data)` behind each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    for step in range(STEPS):
        data = batch(step)
        loss = model(data).square().mean()
        assert bool(loss.isfinite())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in trained)
        optimizer.step()
        if then is not None:
            then(model, data)
    assert all(bool(p.isfinite().all()) for p in trained if p.grad is not None)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


# -- a parent takes the value away -----------------------------------------------------------------------------------


def guarded(make: Callable[..., torch.Tensor], guard: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fit(Guarded(make, guard))


@case
def nan_to_num_behind_zero_by_zero():
    guarded(lambda x: x / x, torch.nan_to_num)


@case
def nan_to_num_behind_a_logarithm():
    guarded(torch.log, lambda x: torch.nan_to_num(x, neginf=-10.0))


@case
def where_behind_a_root_of_negative_numbers():
    guarded(lambda x: (x - 1).sqrt(), lambda x: torch.where(x.isnan(), torch.zeros_like(x), x))


@case
def masked_fill_behind_a_reciprocal():
    guarded(torch.reciprocal, lambda x: x.masked_fill(x.isinf(), 0.0))


@case
def clamp_behind_an_exponential():
    guarded(lambda x: torch.exp(x * 100), lambda x: x.clamp(max=10.0))


@case
def nansum_over_ratios():
    guarded(lambda x: x / x, lambda x: x.nansum(dim=0).expand(ROWS, WIDTH))


@case
def nanmean_over_ratios():
    guarded(lambda x: x / x, lambda x: x.nanmean(dim=0).expand(ROWS, WIDTH))


@case
def nanmedian_over_ratios():
    guarded(lambda x: x / x, lambda x: x.nanmedian(dim=0).values.expand(ROWS, WIDTH))


@case
def only_finite_rows_are_kept():
    guarded(lambda x: x / x, lambda x: x[x.isfinite().all(dim=1)])


@case
def an_index_selects_finite_rows():
    guarded(torch.reciprocal, lambda x: x[1:])


@case
def a_sigmoid_saturates():
    guarded(torch.reciprocal, torch.sigmoid)


@case
def a_tanh_saturates():
    guarded(torch.reciprocal, torch.tanh)


@case
def a_negative_exponential_vanishes():
    guarded(torch.reciprocal, lambda x: torch.exp(-x))


@case
def one_by_infinity_is_zero():
    guarded(torch.reciprocal, torch.reciprocal)


@case
def an_arctangent_ends_at_a_right_angle():
    guarded(torch.reciprocal, torch.atan)


@case
def a_softmax_of_rows_that_are_masked_whole():
    def attend(x):
        return torch.softmax(x.masked_fill(x == 0, -INF), dim=-1)

    guarded(attend, lambda x: torch.where(x.isnan(), torch.zeros_like(x), x))


@case
def an_average_before_its_first_update():
    average = torch.full((WIDTH,), NAN)

    def update(x):
        average.copy_(torch.where(average.isnan(), x.mean(0), 0.9 * average + 0.1 * x.mean(0)))
        return average

    guarded(lambda x: average.clone(), lambda x: torch.where(x.isnan(), update(batch(0)), x).expand(ROWS, WIDTH))


# -- infinite distances that `min` and its like remove ---------------------------------------------------------------


def distances(x: torch.Tensor) -> torch.Tensor:
    """(ROWS, ROWS), +inf on the diagonal."""
    return torch.cdist(x, x).masked_fill(torch.eye(len(x), dtype=torch.bool), INF)


def from_rows(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One number of each row, for each column of the head."""
    return lambda d: reduce(d).reshape(ROWS, 1).expand(ROWS, WIDTH)


@case
def nearest_other_point_by_min():
    guarded(distances, from_rows(lambda d: d.min(dim=1).values))


@case
def nearest_other_point_by_amin():
    guarded(distances, from_rows(lambda d: d.amin(dim=1)))


@case
def nearest_points_by_topk():
    guarded(distances, from_rows(lambda d: d.topk(2, largest=False).values.mean(dim=1)))


@case
def nearest_points_by_sort():
    guarded(distances, from_rows(lambda d: d.sort(dim=1).values[:, :3].mean(dim=1)))


@case
def nearest_points_by_kthvalue():
    guarded(distances, from_rows(lambda d: d.kthvalue(2, dim=1).values))


@case
def nearest_point_by_argmin():
    guarded(distances, from_rows(lambda d: d.argmin(dim=1).float()))


@case
def soft_minimum_of_distances():
    guarded(distances, from_rows(lambda d: -torch.logsumexp(-d, dim=1)))


@case
def kernel_of_distances():
    guarded(distances, from_rows(lambda d: torch.exp(-d).sum(dim=1)))


@case
def weights_by_softmin():
    guarded(distances, from_rows(lambda d: (F.softmin(d, dim=1) * torch.arange(ROWS)).sum(dim=1)))


@case
def inverse_distance_weighting():
    guarded(distances, from_rows(lambda d: (1 / (1 + d)).sum(dim=1)))


@case
def how_many_neighbours_are_near():
    guarded(distances, from_rows(lambda d: (d < 1).float().sum(dim=1)))


@case
def chamfer_distance_with_padded_points():
    def padded(x):
        d = torch.cdist(x, x.flip(0) + 0.5)
        d[:, -2:] = INF
        return d

    guarded(padded, from_rows(lambda d: d.min(dim=1).values))


@case
def shortest_paths_by_relaxation():
    def paths(x):
        d = distances(x)
        for _ in range(2):
            d = torch.minimum(d, (d[:, :, None] + d[None]).amin(dim=1))
        return d.masked_fill(torch.eye(ROWS, dtype=torch.bool), INF)

    guarded(paths, from_rows(lambda d: d.min(dim=1).values))


@case
def time_warping_begins_with_infinity():
    def costs(x):
        table = torch.full((ROWS + 1, ROWS + 1), INF)
        table[0, 0] = 0
        for row in range(1, ROWS + 1):
            for column in range(1, ROWS + 1):
                step = torch.stack([table[row - 1, column], table[row, column - 1], table[row - 1, column - 1]]).min()
                table[row, column] = (x[row - 1] - x[column - 1]).abs().mean() + step
        return table

    guarded(costs, lambda table: table[1:, 1:].diagonal().reshape(ROWS, 1).expand(ROWS, WIDTH))


@case
def nearest_code_where_some_are_dead():
    def to_codes(x):
        d = torch.cdist(x, torch.linspace(0, 2, 5)[:, None].expand(5, WIDTH).contiguous())
        d[:, 3:] = INF
        return d

    guarded(to_codes, from_rows(lambda d: d.min(dim=1).values))


@case
def hardest_negative_of_a_triplet():
    def negatives(x):
        same = torch.arange(ROWS)[:, None] % 2 == torch.arange(ROWS)[None] % 2
        return torch.cdist(x, x).masked_fill(same, INF)

    guarded(negatives, from_rows(lambda d: d.min(dim=1).values))


@case
def beam_search_begins_with_minus_infinity():
    def scores(x):
        table = torch.full((ROWS, WIDTH), -INF)
        table[:, 0] = 0
        return table + x

    guarded(scores, from_rows(lambda s: s.max(dim=1).values))


# -- metrics under no_grad -------------------------------------------------------------------------------------------


def measured(metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """A metric, as a module without parameters, of the model's output behind each step."""
    module = Apply(metric)

    def measure(model: nn.Module, data: torch.Tensor) -> None:
        with torch.no_grad():
            module(model(data), data)

    fit(plain(), measure)


@case
def metric_precision_without_positives():
    measured(lambda y, x: (y > 1e9).float().sum() / (y > 1e9).float().sum())


@case
def metric_perplexity_of_a_large_loss():
    measured(lambda y, x: torch.exp((y - 1e4).square().mean()))


@case
def metric_psnr_of_equal_pictures():
    measured(lambda y, x: 10 * torch.log10(1 / (x - x).square().mean()))


@case
def metric_correlation_with_a_constant():
    measured(lambda y, x: (y - y.mean()).mul(0.0).mean() / (x * 0).std())


@case
def metric_divergence_with_empty_bins():
    measured(lambda y, x: (torch.log(x) * x).sum())


@case
def metric_relative_error_at_zero():
    measured(lambda y, x: ((y - x) / x).abs().mean())


@case
def metric_r2_of_constant_targets():
    measured(lambda y, x: 1 - y.square().sum() / (x * 0).square().sum())


@case
def metric_cosine_of_zero_rows():
    measured(lambda y, x: (x / x.norm(dim=1, keepdim=True)).sum())


@case
def metric_variance_of_one_sample():
    measured(lambda y, x: (y[:1] - y[:1].mean()).square().sum() / 0)


@case
def metric_score_of_no_matches():
    measured(lambda y, x: torch.log((x < 0).float().mean()))


@case
def metric_mean_of_an_empty_slice():
    measured(lambda y, x: y[y > 1e9].mean())


@case
def metric_ratio_in_inference_mode():
    module = Apply(lambda y: y.sum() / 0)

    def measure(model: nn.Module, data: torch.Tensor) -> None:
        with torch.inference_mode():
            module(model(data))

    fit(plain(), measure)


# -- copies that are only probed -------------------------------------------------------------------------------------


def probed(spoil: Callable[[nn.Module], None]) -> None:
    """A copy of the model is spoilt and called behind each step; what it returns is thrown away."""

    def probe(model: nn.Module, data: torch.Tensor) -> None:
        other = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            spoil(other)
            other(data)

    fit(plain(), probe)


@case
def probe_of_a_copy_with_large_weights():
    probed(lambda model: [p.mul_(1e30) for p in model.parameters()])


@case
def probe_of_a_copy_with_nan():
    probed(lambda model: [p.fill_(NAN) for p in model.parameters()])


@case
def probe_of_a_copy_with_infinite_weights():
    probed(lambda model: [p.fill_(INF) for p in model.parameters()])


@case
def probe_of_a_copy_whose_last_layer_is_bad():
    probed(lambda model: list(model.parameters())[-1].fill_(NAN))


@case
def probe_of_the_range_of_float16():
    def probe(model: nn.Module, data: torch.Tensor) -> None:
        other = copy.deepcopy(model).half().requires_grad_(False)
        with torch.no_grad():
            other((data * 6e4).half())

    fit(plain(), probe)


@case
def probe_of_a_learning_rate():
    def probe(model: nn.Module, data: torch.Tensor) -> None:
        other = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
                if own.grad is not None:
                    parameter.sub_(own.grad * 1e38 * 1e3)
            other(data)

    fit(plain(), probe)


# -- parameters that nothing trains ----------------------------------------------------------------------------------


class Beside(nn.Module):
    """A model that holds something whose value is not finite, and does not train with it."""

    def __init__(self, beside: nn.Module, use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.beside = beside
        self.use = use
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, data):
        return self.head(data + self.use(self.beside, data))


def frozen(module: nn.Module, value: float) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False).fill_(value)
    return module


def nothing(module: nn.Module, data: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(data)


@case
def a_frozen_module_of_nan_that_is_never_called():
    fit(Beside(frozen(nn.Linear(WIDTH, WIDTH), NAN), nothing))


@case
def a_frozen_module_of_nan_whose_output_is_thrown_away():
    def use(module, data):
        module(data)
        return torch.zeros_like(data)

    fit(Beside(frozen(nn.Linear(WIDTH, WIDTH), NAN), use))


@case
def an_embedding_whose_padding_row_is_nan():
    table = frozen(nn.Embedding(4, WIDTH), 0.5)
    with torch.no_grad():
        table.weight[0] = NAN
    fit(Beside(table, lambda module, data: module(torch.ones(ROWS, dtype=torch.long))))


@case
def a_codebook_whose_unused_entries_are_infinite():
    table = frozen(nn.Embedding(4, WIDTH), 0.25)
    with torch.no_grad():
        table.weight[2:] = INF
    fit(Beside(table, lambda module, data: module(torch.arange(ROWS) % 2)))


@case
def the_best_loss_so_far_as_a_parameter():
    model = Beside(nn.ParameterList([nn.Parameter(torch.tensor(INF), requires_grad=False)]), nothing)
    fit(model)


@case
def a_mask_as_a_parameter():
    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = nn.Parameter(torch.full((WIDTH, WIDTH), -INF).triu(1), requires_grad=False)

        def forward(self, data):
            return torch.softmax(data @ data.T @ torch.ones(ROWS, WIDTH) + self.mask[:ROWS], dim=-1)

    fit(Beside(Mask(), lambda module, data: module(data)))


@case
def a_table_of_distances_as_a_parameter():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.eye(WIDTH).masked_fill(torch.eye(WIDTH) == 0, INF), requires_grad=False)

        def forward(self, data):
            return self.table.min(dim=0).values.expand_as(data)

    fit(Beside(Table(), lambda module, data: module(data)))


@case
def an_uninitialised_head_that_is_not_used_yet():
    model = plain()
    model.register_module("next_task", frozen(nn.Linear(WIDTH, 1), NAN))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        loss = model[2](model[1](model[0](batch(step)))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert bool(loss.isfinite())


def main() -> None:
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        CASES[name]()
        sys.stdout.write(f"{name} trained\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
