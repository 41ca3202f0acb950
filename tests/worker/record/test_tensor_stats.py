"""The numbers of a tensor against torch's own abs, min and max."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from gpuwatch.core.frames import RowKind
from gpuwatch.core.values import NonFinite, Value
from gpuwatch.worker.record import host_reduce as bits
from gpuwatch.worker.record import tensor_stats as measure_module
from gpuwatch.worker.record.float_formats import CODES
from gpuwatch.worker.record.host_reduce import CHUNK
from gpuwatch.worker.record.tensor_stats import in_memory, measure
from hypothesis import given
from hypothesis import strategies as st

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True, scope="module", params=["compiled", "numpy"])
def loops(request):
    """Everything here holds for either kind of loop."""
    if request.param == "compiled" and bits.read_floats is bits.slow_read_floats:
        pytest.skip("worker/native was not built where gpuwatch was installed")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(measure_module, "read_floats", bits.slow_read_floats)
            patch.setattr(measure_module, "below", bits.slow_below)
        yield


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def look(tensor) -> Value:
    numbers = measure(tensor)
    assert numbers.content == RowKind.MEASURED
    return Value(*numbers[:3])


def check(tensor, reference=None) -> None:
    """abs min and abs max of the elements that are no nan, and which kinds of non-finite values there are."""
    value = look(tensor)
    wide = (tensor if reference is None else reference).to(torch.float64)
    expected = NonFinite.NONE
    for flag, mask in (
        (NonFinite.NAN, wide.isnan()),
        (NonFinite.POSINF, wide == INF),
        (NonFinite.NEGINF, wide == -INF),
    ):
        expected |= flag if mask.any() else NonFinite.NONE
    assert value.flags == expected
    numbers = wide[~wide.isnan()].abs()
    if numbers.numel():
        assert value.abs_min == numbers.min().item()
    else:
        assert math.isnan(value.abs_min)
    assert math.isnan(value.abs_max) if expected & NonFinite.NAN else value.abs_max == numbers.max().item()


SPECIAL = [0.0, -0.0, 1.0, -2.5, 1e-45, 5e-324, 65504.0, -3e38, INF, -INF, NAN]


@pytest.mark.quick(48)
@pytest.mark.parametrize("dtype", FLOATS + FLOAT8)
@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0, 0.5], [-0.0], [1.0, INF], [-INF, 3.0], [INF, -INF], [NAN, 1.0], [NAN], [NAN, INF, -INF, 1.0], SPECIAL],
    ids=str,
)
def test_every_float_type_with_every_kind_of_value(dtype, values):
    check(torch.tensor(values, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_with_its_sign_bit_set_is_a_nan(dtype):
    tensor = torch.tensor([1.0, NAN], dtype=dtype)
    negative = torch.copysign(tensor, torch.tensor(-1.0, dtype=dtype))
    assert look(negative).flags == NonFinite.NAN


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch has had it since 2.7")
def test_float8_e8m0_is_measured():
    check(torch.tensor([1.0, 4.0, 0.25]).to(torch.float8_e8m0fnu))


@pytest.mark.parametrize("dtype", SIGNED)
def test_signed_integers(dtype):
    check(torch.tensor([-3, 2, 100], dtype=dtype))
    check(torch.tensor([5, 7], dtype=dtype))


@pytest.mark.parametrize("dtype", SIGNED)
def test_the_smallest_integer_has_no_positive_twin_and_is_measured_all_the_same(dtype):
    smallest = torch.iinfo(dtype).min
    value = look(torch.tensor([smallest, 3], dtype=dtype))
    assert value.abs_min == 3
    assert value.abs_max == pytest.approx(-smallest)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_integers(dtype):
    biggest = torch.iinfo(dtype).max
    value = look(torch.tensor([biggest, 3], dtype=dtype))
    assert value.abs_min == 3
    assert value.abs_max == pytest.approx(min(biggest, (1 << 63) - 1))


def test_booleans():
    for values in ([True], [False], [True, False]):
        check(torch.tensor(values))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_complex_numbers_are_measured_by_their_magnitude(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ComplexHalf support is experimental
        value = look(torch.tensor([3 + 4j, 1j, -6], dtype=dtype))
    assert (value.abs_min, value.abs_max, value.flags) == (1.0, 6.0, NonFinite.NONE)


def test_a_bad_part_of_a_complex_number_is_seen():
    assert look(torch.complex(torch.tensor([1.0]), torch.tensor([NAN]))).flags & NonFinite.NAN
    assert look(torch.complex(torch.tensor([INF]), torch.tensor([NAN]))).flags & NonFinite.NAN
    assert look(torch.complex(torch.tensor([1.0]), torch.tensor([-INF]))).flags not in (NonFinite.NONE, NonFinite.NAN)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32])
def test_a_finite_complex_number_with_a_magnitude_beyond_its_type_is_no_overflow(dtype):
    part = {torch.complex64: 3e38, torch.complex32: 6e4}[dtype]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert look(torch.tensor([complex(part, part)], dtype=dtype)).flags == NonFinite.NONE


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_empty_is_a_kind_of_its_own(dtype, shape):
    assert measure(torch.empty(shape, dtype=dtype)).content == RowKind.EMPTY


def test_a_scalar():
    check(torch.tensor(-3.5))
    check(torch.tensor(NAN))


# -- memory layouts -----------------------------------------------------------------------------------------------

big = torch.linspace(-3, 5, 12 * CHUNK + 17)

VIEWS = {
    "transposed": lambda t: t[: 600 * 1000].view(600, 1000).t(),
    "strided": lambda t: t[::2],
    "two strides": lambda t: t[: 700 * 1000].view(700, 1000)[::2, 1::3],
    "expanded": lambda t: t[:3, None].expand(3, CHUNK),
    "all expanded": lambda t: t[:1].expand(2 * CHUNK),
    "offset": lambda t: t[5:],
    "overlapping": lambda t: t.as_strided((2, CHUNK), (1, 1)),
    "channels last": lambda t: (
        t[: 2 * 8 * 200 * 200].view(2, 8, 200, 200).contiguous(memory_format=torch.channels_last)
    ),
    "permuted": lambda t: t[: 64 * 80 * 120].view(64, 80, 120).permute(2, 0, 1),
}


@pytest.mark.quick(30)
@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("bad", [None, NAN, -INF])
def test_views_of_more_than_a_chunk(name, dtype, bad):
    base = big.to(dtype, copy=True)
    if bad is not None:
        base[1] = bad
    view = VIEWS[name](base)
    before = base.clone()
    check(view)
    assert torch.equal(base.nan_to_num(9), before.nan_to_num(9)), "looking changed the tensor"


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 17])
def test_a_bad_value_at_the_very_end_is_found(count):
    tensor = big[:count].clone()
    check(tensor)
    tensor[-1] = INF
    check(tensor)


SMALL = st.one_of(st.floats(width=32), st.sampled_from(SPECIAL))


@given(
    data=st.lists(SMALL, min_size=1, max_size=48),
    dtype=st.sampled_from(FLOATS),
    step=st.integers(1, 3),
    flip=st.booleans(),
    expand=st.booleans(),
    chunk=st.sampled_from([1, 5, CHUNK]),
)
def test_any_values_shapes_and_strides(data, dtype, step, flip, expand, chunk):
    tensor = torch.tensor(data, dtype=torch.float64).to(dtype)[::step]
    if tensor.numel() % 2 == 0:
        tensor = tensor.view(2, -1)
    tensor = tensor.t() if flip and tensor.dim() == 2 else tensor
    tensor = tensor.expand(3, *tensor.shape) if expand else tensor
    before, bits.CHUNK = bits.CHUNK, chunk
    try:
        check(tensor)
    finally:
        bits.CHUNK = before


# -- tensors that are not plain -----------------------------------------------------------------------------------


def test_sparse_tensors_show_what_they_store():
    dense = torch.tensor([[0.0, -3.0], [INF, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR support is in beta
        for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1))):
            value = look(sparse)
            assert (value.abs_max, value.flags) == (INF, NonFinite.POSINF)


def test_nested_tensors_show_what_is_not_finite():
    parts = [torch.tensor([1.0, NAN]), torch.tensor([-INF])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototype
        for layout in (torch.strided, torch.jagged):
            value = look(torch.nested.nested_tensor(parts, layout=layout))
            assert value.flags == NonFinite.NAN | NonFinite.NEGINF


def test_nested_tensors_show_all_their_parts():
    parts = [torch.tensor([1.0, -7.0]), torch.tensor([[0.5]]).reshape(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototype
        for layout in (torch.strided, torch.jagged):
            value = look(torch.nested.nested_tensor(parts, layout=layout))
            assert (value.abs_min, value.abs_max) == (0.5, 7.0)


def test_quantized_tensors_show_what_their_integers_stand_for():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = torch.quantize_per_tensor(torch.tensor([-1.0, 0.5]), 0.5, 0, torch.qint8)
        except (RuntimeError, AttributeError):
            pytest.skip("this torch has no quantized tensors")
        value = look(tensor)
    assert (value.abs_min, value.abs_max) == (0.5, 1.0)


def test_tensors_without_values_are_not_measurable_and_no_error():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert measure(torch.empty(3, device="meta")).content == RowKind.NOT_MEASURABLE
    assert measure(torch.empty(3, device="meta", dtype=torch.int64)).content == RowKind.NOT_MEASURABLE
    with FakeTensorMode() as mode:
        fake = torch.empty(3)
        assert measure(fake).content == RowKind.NOT_MEASURABLE
    assert measure(fake).content == RowKind.NOT_MEASURABLE
    assert measure(mode.from_tensor(torch.ones(2))).content == RowKind.NOT_MEASURABLE


class Plain(torch.Tensor):
    pass


class Hostile(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("do not touch")


def test_a_subclass_is_measured_and_a_hostile_one_is_no_error():
    check(torch.tensor([1.0, -INF]).as_subclass(Plain), torch.tensor([1.0, -INF]))
    check(torch.nn.Parameter(torch.tensor([1.0, -4.0])))
    assert measure(torch.ones(2).as_subclass(Hostile)).content in (RowKind.NOT_MEASURABLE, RowKind.MEASURED)


def test_under_vmap_all_calls_are_measured_at_once():
    found = []

    def inside(x):
        found.append(look(x))
        return x

    torch.func.vmap(inside)(torch.tensor([[1.0, -2.0], [3.0, -4.0], [0.5, 1.0]]))
    assert [(value.abs_min, value.abs_max) for value in found] == [(0.5, 4.0)]


def test_a_conjugate_view_and_a_negated_one():
    numbers = torch.tensor([3 + 4j, 1 - 2j])
    assert look(numbers.conj()).abs_max == 5.0
    check(numbers.conj().imag, torch.tensor([-4.0, 2.0]))


def test_a_default_device_of_the_users_does_not_get_in_the_way():
    with torch.device("meta"):
        assert look(big).abs_max == 5.0


def test_a_view_of_a_leaf_that_requires_gradients():
    leaf = torch.ones(3, requires_grad=True)
    check(leaf, leaf.detach())
    assert leaf.grad is None


def test_inference_tensors():
    with torch.inference_mode():
        tensor = torch.tensor([1.0, NAN])
    assert look(tensor).flags == NonFinite.NAN


def test_no_dtype_of_this_torch_raises():
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tensor = torch.zeros(3, dtype=torch.uint8).to(dtype)
            except Exception:
                continue
            assert measure(tensor).content in (RowKind.MEASURED, RowKind.NOT_MEASURABLE)


def test_every_measured_dtype_has_a_code():
    for dtype in [*FLOATS, *FLOAT8, *SIGNED, *UNSIGNED, torch.bool, torch.complex64]:
        assert CODES[dtype] > 0


VIEWS_OF_100 = {
    "further on": lambda tensor: tensor[50:],
    "one element": lambda tensor: tensor[50],
    "with holes": lambda tensor: tensor.view(10, 10)[2:, 3:],
    "transposed": lambda tensor: tensor.view(10, 10).t()[1:],
}


@pytest.mark.quick(20)
@pytest.mark.parametrize("left", [0, 40], ids=["all given back", "a part is left"])
@pytest.mark.parametrize("name", VIEWS_OF_100)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_a_view_into_memory_that_was_given_back_is_not_read(dtype, name, left):
    """It has an address all the same: to read there may be the end of the process."""
    tensor = torch.ones(100).to(dtype)
    view = VIEWS_OF_100[name](tensor)
    tensor.untyped_storage().resize_(left * tensor.itemsize)
    assert in_memory(view) is None
    assert measure(view, count=True).content == RowKind.NOT_MEASURABLE


def test_zeros_that_have_no_memory_are_not_read():
    zeros = torch._efficientzerotensor(3)
    assert in_memory(zeros) is None
    assert measure(zeros).content == RowKind.NOT_MEASURABLE
