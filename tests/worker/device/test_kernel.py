"""Reading a tensor into a row: by torch's operations here, by the Triton kernel in Triton's interpreter and on CUDA.

The interpreter has to be chosen before Triton is imported, so this file is run once more in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
import warnings
import weakref
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.values import COUNTED, SHARE
from gpuwatch.worker.device.grouped_readings import GroupedReadings, KnownWeight, PackedRows, WaitingTensors
from gpuwatch.worker.device.kernel_variants import constants_of
from gpuwatch.worker.device.tensor_source import KINDS, _runs, source_of
from gpuwatch.worker.device.torch_reader import LARGEST, TorchReader, fresh_rows, graph_numbers, graph_source
from gpuwatch.worker.device.triton_reader import _OPTIONS, TritonReader
from gpuwatch.worker.record.float_formats import LOW_PRECISION
from gpuwatch.worker.record.tensor_stats import measure
from hypothesis import given, settings
from hypothesis import strategies as st

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

READERS = (
    [pytest.param("triton", "cpu", id="triton-interpreted")]
    if INTERPRETED
    else [
        pytest.param("torch", "cpu", id="torch-cpu"),
        pytest.param("torch", "cuda", marks=ON_CUDA, id="torch-cuda"),
        pytest.param("triton", "cuda", marks=ON_CUDA, id="triton-cuda"),
    ]
)
each_reader = pytest.mark.parametrize(("reader", "device"), READERS)
each_dtype = pytest.mark.parametrize("dtype", list(KINDS), ids=lambda dtype: str(dtype).removeprefix("torch."))

FLOATS = [dtype for dtype in KINDS if dtype.is_floating_point]
QUIET_NAN = 0x7FC0_0000


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (it comes with torch's CUDA wheels)")
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("--sample", "--each=8"), marks=pytest.mark.slow, id="a sample"),
        pytest.param((), marks=pytest.mark.soak, id="all"),
    ],
)
def test_the_kernel_in_tritons_interpreter(tmp_path, chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", *chosen, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def reader_of(name):
    return TorchReader() if name == "torch" else TritonReader()


def read(reader, tensor, count=True):
    """What the recorder would be told of a tensor; its row must be as new afterwards."""
    source = source_of(tensor)
    assert source is not None
    rows = fresh_rows(3, tensor.device)
    maker = reader_of(reader)
    maker.read(source, rows, 1, count)
    packed = maker.pack(rows, 3)
    assert rows.tolist() == [[LARGEST, 0, 0, 0, 0, 0]] * 3
    assert packed[0].tolist() == packed[2].tolist() == [LARGEST, 0, 0]
    return tuple(packed[1].tolist())


def expected(tensor, count=True):
    """The host's numbers; a nan of a float8 dtype has no bits of its own."""
    low, high, meta, _ = measure(tensor.cpu(), count)
    if tensor.is_floating_point() and tensor.element_size() == 1:
        low, high = (QUIET_NAN if bits > 0x7F80_0000 else bits for bits in (low, high))
    return low, high, meta


def random_bits(dtype, count, seed=0):
    """Every kind of number that the dtype has, the odd ones too."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1).to(torch.bool) if dtype is torch.bool else raw.view(dtype)


def some(dtype, count, seed=0):
    """Ordinary numbers."""
    if not dtype.is_floating_point:
        return random_bits(dtype, count, seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(dtype)


# -- every dtype and size -------------------------------------------------------------------------------------------


@pytest.mark.quick(6)
@pytest.mark.sample(2)
@each_reader
@each_dtype
def test_numbers_are_those_of_the_host(reader, device, dtype):
    for count in (1, 2, 7, 255, 1024, 4096, 4097, 40_001):
        tensor = some(dtype, count, seed=count)
        assert read(reader, tensor.to(device)) == expected(tensor), count


@each_reader
@each_dtype
def test_any_bits_at_all(reader, device, dtype):
    for count in (3, 5000):
        tensor = random_bits(dtype, count, seed=count)
        assert read(reader, tensor.to(device)) == expected(tensor), count


@pytest.mark.quick(6)
@pytest.mark.sample(2)
@each_reader
@each_dtype
def test_two_at_once_have_the_rows_of_two_reads(reader, device, dtype):
    for count, others in ((1, 40_001), (40_001, 3), (4096, 4096), (255, 1)):
        for start in (0, 1):
            check_two_at_once(reader, device, dtype, count, others, start)


def check_two_at_once(reader, device, dtype, count, others, start):
    tensors = random_bits(dtype, count).to(device), random_bits(dtype, others + start, seed=1).to(device)[start:]
    maker, found = reader_of(reader), []
    for at_once in (True, False):
        rows = fresh_rows(4, torch.device(device))
        if at_once:
            maker.read_dense(list(tensors), [each.numel() for each in tensors], rows, 1, True)
        else:
            for position, tensor in enumerate(tensors, 1):
                maker.read(source_of(tensor), rows, position, True)
        found.append(rows.tolist())
    assert found[0] == found[1], (count, others, start)


@each_reader
@each_dtype
def test_a_tensor_without_dimensions(reader, device, dtype):
    tensor = some(dtype, 1)[0]
    assert read(reader, tensor.to(device)) == expected(tensor)


NOT_FINITE = [
    [math.inf],
    [-math.inf],
    [math.inf, -math.inf],
    [math.nan],
    [math.nan, math.inf],
    [math.nan, -math.inf],
    [math.nan, math.inf, -math.inf],
    [-0.0],
]


@pytest.mark.quick(6)
@pytest.mark.sample(2)
@each_reader
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_what_is_non_finite_and_with_which_sign(reader, device, dtype):
    for values in NOT_FINITE:
        odd = torch.tensor(values).to(dtype)
        around = torch.cat([part.view(torch.uint8) for part in (some(dtype, 9000), odd, some(dtype, 77))])
        for tensor in (odd, around.view(dtype)):
            assert read(reader, tensor.to(device)) == expected(tensor), (values, len(tensor))


@each_reader
@each_dtype
def test_smallest_integers_have_no_positive_twin(reader, device, dtype):
    if dtype.is_floating_point or dtype is torch.bool:
        return
    lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for values in ([lowest], [lowest, lowest + 1], [lowest, 0], [highest, lowest], [highest]):
        tensor = torch.tensor(values, dtype=dtype)
        assert read(reader, tensor.to(device)) == expected(tensor)


# -- shares ---------------------------------------------------------------------------------------------------------


@each_reader
@pytest.mark.parametrize("dtype", sorted(LOW_PRECISION, key=str), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("zeros", "subnormals", "count"), [(0, 0, 10), (1, 0, 70_000), (0, 1, 70_000), (3, 4, 9000)])
def test_shares_of_zeros_and_subnormals(reader, device, dtype, zeros, subnormals, count):
    smallest = torch.finfo(dtype).smallest_normal
    tensor = torch.full((count,), smallest)
    tensor[:zeros] = 0.0
    tensor[zeros : zeros + subnormals] = -smallest / 2
    _, _, meta = read(reader, tensor.to(dtype).to(device))

    def share(number):  # rounded by whole numbers, as nobody else does it
        return max(min(number, 1), round(Fraction(number, count) * SHARE))

    assert meta & COUNTED
    assert (meta >> 16 & SHARE, meta >> 32 & SHARE) == (share(zeros), share(subnormals))


@each_reader
@each_dtype
def test_shares_are_counted_where_they_say_something(reader, device, dtype):
    tensor = some(dtype, 100).to(device)
    assert bool(read(reader, tensor)[2] & COUNTED) == (dtype in LOW_PRECISION)
    assert not read(reader, tensor, count=False)[2] & COUNTED


# -- layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "permuted": lambda x: x.view(20, 30, 50).permute(2, 0, 1),
    "channels last": lambda x: x.view(10, 30, 10, 10).to(memory_format=torch.channels_last),
    "columns": lambda x: x.view(100, 300)[:, 37:52],
    "one column": lambda x: x.view(100, 300)[:, 5],
    "one step": lambda x: x.view(20, 30, 50)[:, 3],
    "every third": lambda x: x[1::3],
    "columns, transposed": lambda x: x.view(100, 300)[:, 37:52].t(),
    "expanded": lambda x: x[:300].view(1, 300, 1).expand(20, 300, 40),
    "expanded columns": lambda x: x.view(100, 300)[:, :7].unsqueeze(1).expand(100, 9, 7),
    "overlapping": lambda x: x.unfold(0, 10, 3),
    "holes of two sizes": lambda x: x.view(20, 30, 50)[:, :11, :13],
    "unaligned": lambda x: x[3:],
    "0-d within": lambda x: x.view(100, 300)[7, 7],
}


@each_reader
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts(reader, device, dtype, layout):
    whole = some(dtype, 30_000)
    if dtype.is_floating_point:
        whole.view(100, 300)[::2] *= 1000  # so that what must not be read is larger
    tensor = LAYOUTS[layout](whole.to(device))
    assert read(reader, tensor) == expected(tensor)


@pytest.mark.skipif(INTERPRETED, reason="needs no reader")
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "holes of two sizes"])
def test_no_layout_is_copied_that_one_stride_describes(layout):
    tensor = LAYOUTS[layout](some(torch.float32, 30_000))
    source = source_of(tensor)
    assert source.tensor.data_ptr() == tensor.data_ptr()
    assert source.elements <= tensor.numel()


@pytest.mark.skipif(INTERPRETED, reason="needs no reader")
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=4))
def test_runs_hold_every_element(dims):
    """As sets of places in memory, what is read is what the tensor has."""
    storage = torch.arange(400)
    tensor = storage.as_strided([size for size, _ in dims], [stride for _, stride in dims])
    source = _runs(tensor)
    if source is not None:
        places = {index // source.inner * source.stride + index % source.inner for index in range(source.elements)}
        assert places == set(tensor.flatten().tolist())


@each_reader
@given(data=st.data())
def test_hypothesis_any_values_any_view(reader, device, data):
    dtype = data.draw(st.sampled_from(list(KINDS)))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    tensor = random_bits(dtype, rows * columns, data.draw(st.integers(0, 1 << 30))).view(rows, columns)
    if dtype.is_floating_point and data.draw(st.booleans()):  # mostly finite
        wide = tensor.double()
        tensor = torch.where(wide.isfinite(), wide, 1.0).to(dtype)
    tensor = tensor[data.draw(st.integers(0, rows - 1)) :, :: data.draw(st.integers(1, 3))]
    if data.draw(st.booleans()):
        tensor = tensor.t()
    assert read(reader, tensor.to(device)) == expected(tensor)


@pytest.mark.skipif(not INTERPRETED, reason="calls the kernel itself")
@pytest.mark.parametrize("_", ["interpreted"])
def test_many_runs_are_counted_in_64_bits(_):
    from gpuwatch.worker.device import kernel

    tensor = some(torch.float16, 30_000).view(100, 300)[:, 37:52]
    rows = fresh_rows(1, tensor.device)
    kernel.read[(2,)](tensor, rows, 0, 1500, 15, 300, 3, False, 2, 1, 256)
    assert tuple(rows[0, :3].tolist()) == expected(tensor, count=False)


# -- what is not read -----------------------------------------------------------------------------------------------


class TestWhatIsNotRead:
    pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs no reader")

    def test_nothing(self):
        assert source_of(torch.empty(0)) is None
        assert source_of(torch.empty(3, 0, 2)) is None

    def test_meta_and_fake_tensors(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        assert source_of(torch.empty(3, device="meta")) is None
        with FakeTensorMode():
            fake = torch.empty(3)
        assert source_of(fake) is None

    def test_memory_that_has_been_given_back(self):
        tensor = torch.ones(10)
        tensor.untyped_storage().resize_(0)
        assert source_of(tensor) is None

    def test_memory_that_ends_before_the_tensor_does(self):
        tensor = torch.ones(100)[50:]
        tensor.untyped_storage().resize_(4 * 99)
        assert source_of(tensor) is None

    def test_a_tensor_under_vmap(self):
        seen = []
        torch.vmap(lambda x: (seen.append(source_of(x)), x)[1])(torch.ones(2, 3))
        assert [source.elements for source in seen] == [6]

    def test_parts_with_holes_between_them(self):
        values, offsets = torch.ones(5, 2), torch.tensor([0, 3, 5])
        whole = torch.nested.nested_tensor_from_jagged(values, offsets)
        holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 1]))
        assert source_of(whole).elements == 10
        assert source_of(holes) is None


@each_reader
@pytest.mark.parametrize("kind", ["sparse", "csr", "complex", "quantized", "negated", "nested", "subclass"])
def test_tensors_that_are_something_else_first(reader, device, kind):
    dense = torch.tensor([[0.0, -3.0], [2.0, 0.0]])
    make = {
        "sparse": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "complex": lambda: torch.complex(dense, dense),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 10, torch.qint8),
        "negated": lambda: torch.complex(dense, dense).conj().imag,
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[1, :1]]),
        "subclass": lambda: dense.as_subclass(type("Mine", (torch.Tensor,), {})),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beta, prototype, to be removed
        tensor = make()
        assert read(reader, tensor.to(device)) == expected(tensor)


@pytest.mark.quick(6)
@pytest.mark.sample(2)
@each_reader
@each_dtype
def test_earlier_numbers_are_kept_unless_a_row_before_is_non_finite(reader, device, dtype):
    for bad in (None, math.nan, math.inf, -math.inf):
        for size in (3, 20_000):
            check_earlier(reader, device, dtype, bad, size)


def check_earlier(reader, device, dtype, bad, size):
    maker = reader_of(reader)
    weight = torch.ones(size, device=device).to(dtype)
    rows = fresh_rows(4, weight.device)
    maker.read(source_of(weight), rows, 2, True)
    packed = maker.pack(rows, 4)
    first = packed[2].tolist()

    weight.view(torch.uint8 if dtype.itemsize == 1 else dtype)[size - 1] = 0
    maker.read(source_of(torch.tensor([1.0, 2.0 if bad is None else bad], device=device)), rows, 1, False)
    maker.read_many(GroupedReadings([WaitingTensors([known(weight, packed, 2)], 2, True)], rows.device), rows)
    maker.read(source_of(torch.full((2,), math.nan, device=device)), rows, 3, False)  # after it
    again = maker.pack(rows, 4)[2].tolist()
    assert again == (first if bad is None else list(expected(weight))), (bad, size)
    assert rows.tolist() == [[LARGEST, 0, 0, 0, 0, 0]] * 4


# -- many tensors in one launch -------------------------------------------------------------------------------------


def known(weight, packed, number):
    """A weight with the numbers of a packed row."""
    row = SimpleNamespace(packed=(PackedRows(packed, packed.data_ptr()), number))
    return KnownWeight(weakref.ref(weight), weight._version, 0, row)


def one_by_one(reader, waiting, rows):
    """The rows that single launches give: of a weight with earlier numbers, those are put there or it is read."""
    for items, position, counted in waiting:
        (item,) = items
        source, earlier = item, None
        if isinstance(item, KnownWeight):
            tensor, earlier = item.tensor(), item.row.packed
            source = source_of(tensor) if tensor is not None and tensor._version == item.version else None
        if (earlier is not None and not any(meta & 7 for meta in rows[:position, 2].tolist())) or source is None:
            rows[position, :3] = earlier[0].rows[earlier[1]]
        else:
            reader.read(source, rows, position, counted)
    return rows.tolist()


def many(dtype):
    """Tensors of one dtype whose sizes lie around those of blocks and of the share of a program, in several layouts."""
    block = KINDS[dtype].deep * KINDS[dtype].wide
    sizes = [1, 2, block - 1, block, block + 1, 7, 8 * block - 1, 8 * block, 8 * block + 3, 17 * block + 5, 3]
    tensors = [some(dtype, size, seed=size) for size in sizes]
    whole = some(dtype, 30_000)
    tensors += [LAYOUTS[name](whole) for name in ("permuted", "columns", "one column", "expanded", "unaligned")]
    if dtype.is_floating_point:
        odd = some(dtype, 9 * block)
        odd.view(torch.uint8)[-8 * dtype.itemsize :] = 0xFF  # nan in the share of one program
        tensors.append(odd)
    return tensors


@each_reader
@each_dtype
@pytest.mark.parametrize("counted", [False, True])
def test_many_tensors_get_the_rows_of_single_launches(reader, device, dtype, counted):
    maker = reader_of(reader)
    tensors = [tensor.to(device) for tensor in many(dtype)]
    waiting = [WaitingTensors([source_of(tensor)], 2 * at + 1, counted) for at, tensor in enumerate(tensors)]
    rows = fresh_rows(2 * len(tensors) + 1, tensors[0].device)
    expected_rows = one_by_one(maker, waiting, rows.clone())
    maker.read_many(GroupedReadings(waiting, rows.device), rows)
    assert rows.tolist() == expected_rows
    assert rows[0::2].tolist() == fresh_rows(len(tensors) + 1, rows.device).tolist()


@each_reader
@pytest.mark.parametrize("value", [0.25, math.inf, -math.inf, math.nan], ids=str)
def test_what_a_graph_leaves_is_read_in_place_of_the_tensor(reader, device, value):
    maker = reader_of(reader)
    tensor = torch.tensor([-2.0, 3.0, value, 0.5], device=device)
    left = torch.cat((graph_numbers(tensor), torch.full((1,), 99.0, dtype=torch.float64, device=device)))
    rows = fresh_rows(2, tensor.device)
    maker.read(graph_source(left), rows, 0, True)
    maker.read_many(GroupedReadings([WaitingTensors([graph_source(left)], 1, True)], rows.device), rows)
    packed = [tuple(row) for row in maker.pack(rows, 2).tolist()]
    if math.isnan(value):  # a graph says nothing of the others then
        assert [meta & 7 for *_, meta in packed] == [1, 1]
    else:
        assert packed == [expected(tensor.double())] * 2


@each_reader
def test_tensors_of_all_dtypes_fill_a_list_of_rows(reader, device):
    maker = reader_of(reader)
    tensors = [some(dtype, 5 + 40 * at, seed=at).to(device) for at in range(16) for dtype in KINDS][:240]
    waiting = [WaitingTensors([source_of(tensor)], at, at % 2 == 0) for at, tensor in enumerate(tensors)]
    rows = fresh_rows(240, tensors[0].device)
    maker.read_many(GroupedReadings(waiting, rows.device), rows)
    packed = maker.pack(rows, 240).tolist()
    assert [tuple(row) for row in packed] == [expected(tensor, at % 2 == 0) for at, tensor in enumerate(tensors)]


@each_reader
@pytest.mark.parametrize("bad_at", [None, 0, 3, 6, 9])
@pytest.mark.parametrize("what", ["something else", "a weight's earlier numbers"])
def test_many_weights_keep_their_numbers_up_to_the_first_bad_row(reader, device, bad_at, what):
    """Weights have the odd positions, in two dtypes. All have changed since. One is gone."""
    maker = reader_of(reader)
    dtypes = [torch.float32, torch.bfloat16]
    weights = {
        at: torch.full((at + 4000 * (at % 3),), float(at), dtype=dtypes[at % 4 == 1], device=device)
        for at in range(1, 12, 2)
    }
    if what != "something else" and bad_at is not None:
        weights[bad_at | 1][-1] = math.inf
    rows = fresh_rows(12, torch.device(device))
    for at, weight in weights.items():
        maker.read(source_of(weight), rows, at, True)
    packed = maker.pack(rows, 12)
    for weight in weights.values():
        weight.fill_(-1000.0)
    for at in range(0, 12, 2):
        value = math.nan if what == "something else" and bad_at is not None and at == bad_at & ~1 else 1.0
        maker.read(source_of(torch.full((9,), value, device=device)), rows, at, True)
    waiting = [WaitingTensors([known(weight, packed, at)], at, True) for at, weight in weights.items()]
    del weights[11], weight
    expected_rows = one_by_one(maker, waiting, rows.clone())
    maker.read_many(GroupedReadings(waiting, rows.device), rows)
    assert rows.tolist() == expected_rows
    kept = [rows[at, :3].tolist() == packed[at].tolist() for at in range(1, 12, 2)]
    last = True  # the one that is gone
    first = 12 if bad_at is None else (bad_at & ~1 if what == "something else" else bad_at | 1)
    assert kept == [at <= first for at in weights] + [last]


# -- without a device -----------------------------------------------------------------------------------------------


def compiled(function, arguments, constants, aligned):
    """A kernel's PTX for an H100, which needs none to be there. `arguments`: their types, before the constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = [*arguments, *["constexpr"] * len(constants)]
    signature = dict(zip(function.arg_names, types, strict=True))
    constexprs = {(len(arguments) + at,): value for at, value in enumerate(constants)}
    source = ASTSource(function, signature, constexprs, {(at,): [["tt.divisibility", 16]] for at in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_OPTIONS).asm["ptx"]


@pytest.mark.quick(1)
@pytest.mark.sample(4)
@pytest.mark.skipif(INTERPRETED, reason="compiles instead")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (it comes with torch's CUDA wheels)")
@pytest.mark.parametrize("layout", [0, 1, 2])
@pytest.mark.parametrize("how", ["one", "many", "many, with earlier numbers"])
@each_dtype
def test_it_compiles_for_a_gpu(dtype, layout, how, monkeypatch, tmp_path):
    """The interpreter takes what the compiler refuses; this needs ptxas, which is a part of Triton."""
    from gpuwatch.worker.device import kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if layout and dtype not in (torch.float16, torch.int64):
        return
    kind, _, constants = constants_of(dtype, True, layout)
    names = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    tensor_type = names.get(kind.read_as) or str(kind.read_as).removeprefix("torch.").replace("uint", "u").replace(
        "int", "i"
    )
    if how == "one":
        arguments = [f"*{tensor_type}", "*i64", "i32", "i32", "i32", "i32"]
        ptx = compiled(kernel.read, arguments, constants, aligned=(0, 1))
    else:
        more = kernel.element(kind.read_as), True, *constants, how != "many"
        ptx = compiled(kernel.read_many, ["*i64", "*i64", "*i64", "i32"], more, aligned=(0, 1, 2))
    assert re.search(r"\b(atom|red)\.global\.gpu\.relaxed\.min\.s64\b", ptx)  # red: nobody reads the result
    if kind.read_as in names and layout == 0:
        assert ".v4.b32" in ptx or ".v2.b64" in ptx  # 16 bytes a load


# -- on a device ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_elements_than_32_bits_count():
    tensor = torch.ones((1 << 31) + 5000, dtype=torch.float16, device="cuda")
    tensor[-1] = -math.inf
    tensor[-2] = 0.0
    low, high, meta = read("triton", tensor, count=False)
    assert (low, high, meta & 0xFF) == (0, 0x7C00, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reader", ["torch", "triton"])
def test_reading_does_not_wait(reader):
    tensors = [some(dtype, 5000).to("cuda") for dtype in KINDS]
    for tensor in tensors:
        read(reader, tensor)  # compiled now
    torch.cuda.synchronize()
    maker, rows = reader_of(reader), fresh_rows(len(tensors), torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for position, tensor in enumerate(tensors):
            maker.read(source_of(tensor), rows, position, True)
        maker.pack(rows, len(tensors))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reading_takes_no_memory():
    maker, rows = TritonReader(), fresh_rows(1, torch.device("cuda"))
    tensor = torch.ones(64 << 20, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for view in (tensor, tensor.view(1 << 13, -1).t(), tensor.view(1 << 13, -1)[:, 10:500]):
        maker.read(source_of(view), rows, 0, True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
