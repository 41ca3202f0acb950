"""The host's part of a launch: the compiled kernel is looked up once, and never taken for another one."""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.worker.device.grouped_readings import GroupedReadings, WaitingTensors
from gpuwatch.worker.device.kernel_launcher import LAUNCHED_KERNEL, KernelLauncher
from gpuwatch.worker.device.kernel_variants import constants_of, layout_of, read_key
from gpuwatch.worker.device.tensor_source import KINDS, source_of
from gpuwatch.worker.device.torch_reader import fresh_rows
from gpuwatch.worker.device.triton_reader import TritonReader, launch_reads
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_kernel_launcher import LAUNCH, given_to

NATIVE = "gpuwatch.worker.native.core"
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Function:
    """A kernel as Triton has it: a launch returns what was compiled for it, which can be launched itself."""

    def __init__(self):
        self.ordinary = []
        self.options = []
        self.direct = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.options.append(options)
            self.ordinary.append((grid, args))
            return Compiled(self)

        return launch


class Compiled:
    def __init__(self, function):
        self.function = function


class Launcher(KernelLauncher):
    """Kernels whose trial has passed: `launched` has what the driver gets for each."""

    def __init__(self):
        self.launched, self.error, self.kernels = {}, 0, {}
        self.driver = LAUNCH(self.launch)
        super().__init__(library=SimpleNamespace(cuLaunchKernel=self.driver, cuFuncGetParamInfo=None))

    def launch(self, function, programs, y, z, threads, ty, tz, shared, stream, arguments, extra):
        kernel, sizes = self.kernels[function]
        given = tuple(given_to(sizes, arguments))
        self.launched.setdefault(kernel, []).append((programs, stream, given))
        return self.error

    @staticmethod
    def stream(device):
        return 70 + device

    def tried(self, key, compiled, sizes, begin):
        handle = len(self.kernels) + 1
        self.kernels[handle] = compiled.function, sizes
        return LAUNCHED_KERNEL.pack(handle, 128, 0, len(sizes), sizes)


@pytest.fixture
def launcher():
    if launch_reads.__module__ != NATIVE:
        pytest.skip("worker/native was not built where gpuwatch was installed")
    return Launcher()


@pytest.fixture
def kernel():
    functions = {name: Function() for name in ("read", "read_two", "read_many", "pack")}
    return SimpleNamespace(**functions, element=str, INTERPRETED=False)


def test_the_second_launch_of_a_kind_is_the_drivers_and_has_the_same_arguments(kernel, launcher):
    reader = TritonReader(kernel, launcher)
    rows = fresh_rows(4, torch.device("cpu"))
    tensors = [torch.ones(5000, dtype=torch.float16), torch.ones(30, dtype=torch.float16)]
    for position, tensor in enumerate(tensors):
        reader.read(source_of(tensor), rows, position, True)
        packed = reader.pack(rows, 2)
    ((grid, first),) = kernel.read.ordinary
    assert grid == (2,)
    assert first == (tensors[0], rows, 0, 5000, 5000, 0, 3, True, 0, 4, 1024)
    assert launcher.launched[kernel.read] == [(1, 69, (tensors[1].data_ptr(), rows.data_ptr(), 1, 30, 30, 0))]
    assert launcher.launched[kernel.pack] == [(1, 69, (rows.data_ptr(), packed.data_ptr(), 2))]


def test_a_launch_that_the_driver_refuses_is_made_by_triton(kernel, launcher):
    reader, rows, tensor = TritonReader(kernel, launcher), fresh_rows(4, torch.device("cpu")), torch.ones(30)
    launcher.error = 201  # no context is current in this thread
    for position in range(3):
        reader.read(source_of(tensor), rows, position, True)
        reader.pack(rows, 2)
    assert (len(kernel.read.ordinary), len(kernel.pack.ordinary)) == (3, 3)
    assert [arguments[2] for _, arguments in kernel.read.ordinary] == [0, 1, 2]


def memory_of(dtype, *places):
    """Tensors of 8 elements at these places, of 16 bytes each, in one memory; half a place is not aligned."""
    memory = torch.ones(1024, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    return [memory[int(16 * place) : int(16 * place) + 8 * dtype.itemsize].view(dtype) for place in places]


def addresses(arguments):
    return tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)


@pytest.mark.parametrize(
    ("tensors", "pairs", "alone"),
    [
        (memory_of(torch.float16, 0, 1), [(0, 1)], []),
        (memory_of(torch.float16, 0, 1, 2, 3, 4), [(0, 1), (2, 3)], [4]),
        (memory_of(torch.float16, 0, 1.5, 2, 3), [(2, 3)], [0, 1]),
        ([*memory_of(torch.float16, 0), *memory_of(torch.float32, 1, 4)], [], [0, 1, 2]),
    ],
    ids=["two", "five", "one is not aligned", "another dtype"],
)
def test_two_tensors_that_are_alike_share_a_launch(kernel, launcher, tensors, pairs, alone):
    reader, rows, sizes = TritonReader(kernel, launcher), fresh_rows(9, torch.device("cpu")), [8] * len(tensors)
    for _ in range(3):  # Triton launches the first of each kind
        reader.read_dense(tensors, sizes, rows, 2, False)
    at = [each.data_ptr() for each in tensors]
    by_two = [(2, (at[one], at[other], rows.data_ptr(), 2 + one, 8, 8, 1)) for one, other in pairs]
    by_one = [(1, (at[one], rows.data_ptr(), 2 + one, 8, 8, 0)) for one in alone]
    for function, parameters, expected in ((kernel.read_two, 7, by_two), (kernel.read, 6, by_one)):
        ordinary = [(*grid, addresses(args[:parameters])) for grid, args in function.ordinary]
        direct = [(programs, arguments) for programs, stream, arguments in launcher.launched.get(function, [])]
        assert sorted(ordinary + direct) == sorted(3 * expected)
        assert len(direct) >= 2 * len(expected)


@given(data=st.data())
def test_the_key_of_a_read_in_c_is_that_in_python(data):
    launcher = Launcher() if launch_reads.__module__ == NATIVE else pytest.skip("worker/native was not built")
    dtype, count = data.draw(st.sampled_from(list(KINDS))), data.draw(st.booleans())
    start = data.draw(st.integers(0, 40)) * dtype.itemsize
    tensor = torch.zeros(4096, dtype=torch.uint8)[start : start + 64 * dtype.itemsize].view(dtype)
    size = st.sampled_from([1, 16, 17, 5000, (1 << 31) - 1, 1 << 31, 1 << 33])
    elements, inner, stride = data.draw(size), data.draw(size), data.draw(st.sampled_from([0, -1]) | size)
    inner = inner if stride else elements
    rows = torch.zeros(49, dtype=torch.int64)[data.draw(st.integers(0, 1)) :]
    key = read_key(dtype, count, -1, tensor.data_ptr(), rows.data_ptr(), elements, inner, stride)
    sizes = bytes((8, 8, 4, *(8 if each >= 1 << 31 else 4 for each in (elements, inner, stride))))
    kernel = launcher.tried(key, Compiled("read"), sizes, None)
    about = launcher.stream, (tensor,), (elements,), 0, inner, stride, rows, 3, count
    assert launch_reads({}, *about) == (0, 1)
    assert launcher.launched == {}
    assert launch_reads({key: (kernel, 1024, 132)}, *about) is None
    arguments = tensor.data_ptr(), rows.data_ptr(), 3, elements, inner, stride
    assert launcher.launched == {"read": [(min(132, -(-elements // 1024)), 69, arguments)]}


@pytest.mark.parametrize(
    ("kernels", "elements", "error"),
    [
        ({"key": (b"short", 8, 8)}, 8, TypeError),
        ({"key": (LAUNCHED_KERNEL.pack(1, 128, 0, 3, bytes((8, 8, 4))), 8, 8)}, 8, TypeError),
        ({"key": (LAUNCHED_KERNEL.pack(1, 128, 0, 6, bytes((8, 8, 4, 4, 4, 4))), 8, 8)}, 1 << 31, OverflowError),
        ({"key": (LAUNCHED_KERNEL.pack(1, 128, 0, 6, bytes((8, 8, 4, 4, 4, 4))), 8, 8)}, 0, ValueError),
    ],
    ids=["no kernel", "other parameters", "32 bits", "no element"],
)
def test_a_read_that_does_not_fit_its_kernel_launches_nothing(launcher, kernels, elements, error):
    tensor, rows = torch.ones(8), fresh_rows(4, torch.device("cpu"))
    key = read_key(torch.float32, False, -1, tensor.data_ptr(), rows.data_ptr(), elements, elements, 0)
    with pytest.raises(error):
        launch_reads({key: kernels["key"]}, launcher.stream, [tensor], [elements], 0, 0, 0, rows, 1, False)
    assert launcher.launched == {}


def test_tensors_of_one_dtype_and_layout_share_a_launch_and_a_table(kernel, launcher):
    reader = TritonReader(kernel, launcher)
    reader._programs[torch.device("cpu")] = 3
    rows = fresh_rows(40, torch.device("cpu"))
    large, small, half = torch.ones(40_000), torch.ones(30), torch.ones(30, dtype=torch.float16)
    for _ in range(2):
        sources = [source_of(each) for each in (large, half, small, small[::2])]
        reader.read_many(GroupedReadings([WaitingTensors(sources, 10, True)], rows.device), rows)
    assert len(kernel.read_many.ordinary) == len(launcher.launched[kernel.read_many]) == 3
    ((grid, (table, earlier, target, *constants)), *_) = kernel.read_many.ordinary
    assert (grid, target) == ((4,), rows)
    assert table[:16].view(2, 8).tolist() == [  # three programs, then one
        [0, 3, large.data_ptr(), 10, 40_000, 40_000, 0, 10],
        [3, 1, small.data_ptr(), 12, 30, 30, 0, 12],
    ]
    assert earlier[:256].tolist() == [0] * 256
    assert constants == [2, "torch.float32", large.data_ptr() % 16 == 0, 2, False, 0, 4, 512, False]
    programs, _, again = launcher.launched[kernel.read_many][0]
    assert (programs, again[2:]) == (4, (rows.data_ptr(), 2))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (it comes with torch's CUDA wheels)")
def test_a_launch_leaves_no_option_open_of_which_triton_warns_the_script(kernel):
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    reader, rows = TritonReader(kernel), fresh_rows(4, torch.device("cpu"))
    reader.read(source_of(torch.ones(30)), rows, 0, False)
    reader.pack(rows, 1)
    reader.read_many(GroupedReadings([WaitingTensors([source_of(torch.ones(30))], 1, True)], rows.device), rows)
    launches = [options for one in (kernel.read, kernel.pack, kernel.read_many) for options in one.options]
    assert len(launches) == 3
    for options in launches:
        parsed = make_backend(GPUTarget("cuda", 90, 32)).parse_options(dict(options))  # a warning is an error here
        assert options.keys() <= parsed.__dict__.keys()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (it comes with torch's CUDA wheels)")
@settings(max_examples=40)
@given(data=st.data())
def test_calls_with_one_key_are_one_specialisation_to_triton(data):
    """Asks Triton's own rule, with the arguments of two calls."""
    from gpuwatch.worker.device import kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    function = kernel.read
    if not hasattr(function, "signature"):
        pytest.skip("Triton runs in its interpreter")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    if len(inspect.signature(create_function_from_signature).parameters) < 3:
        pytest.skip("this Triton's rule needs no backend")
    bind = create_function_from_signature(function.signature, function.params, backend)
    memory = torch.zeros(4096, dtype=torch.uint8)

    dtypes = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2))

    def call():
        dtype = data.draw(st.sampled_from(dtypes))
        start = data.draw(st.integers(0, 40)) * dtype.itemsize
        tensor = memory[start : start + 64 * dtype.itemsize].view(dtype)
        kind = KINDS[dtype]
        rows = fresh_rows(4, torch.device("cpu"))
        size = st.sampled_from([0, 1, 16, 17, 5000, (1 << 31) - 1, 1 << 31, 1 << 33])
        position, sizes, count = (
            data.draw(st.integers(0, 239)),
            [data.draw(size) for _ in range(3)],
            data.draw(st.booleans()),
        )
        _, _, constants = constants_of(dtype, count, layout_of(sizes[0], sizes[2]))
        key = read_key(dtype, count, -1, tensor.data_ptr(), rows.data_ptr(), *sizes)
        _, specialisation, _ = bind(tensor.view(kind.read_as), rows, position, *sizes, *constants)
        return key, specialisation

    key, specialisation = call()
    for _ in range(6):
        other, its = call()
        assert other != key or its == specialisation


# -- on CUDA only ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_direct_launches_give_what_ordinary_ones_give():
    notes = []
    direct, ordinary = TritonReader(launcher=KernelLauncher(notes.append)), TritonReader()
    ordinary._tried = lambda *about: None
    memory = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    for dtype in KINDS:
        if dtype is torch.bool:
            continue
        tensors = [memory.view(dtype)[start : start + size] for start in (0, 1, 16) for size in (1, 16, 1000, 50_000)]
        tensors += [memory.view(dtype)[:6400].view(80, 80)[:, start : start + 7] for start in (0, 3)]
        tensors += [memory.view(dtype)[:size] for size in (1000, 50_000)]
        found = []
        for reader in (direct, ordinary):
            rows = fresh_rows(len(tensors), torch.device("cuda"))
            for _ in range(3):
                for position, tensor in enumerate(tensors[:-2]):
                    reader.read(source_of(tensor), rows, position, True)
                sizes = [each.numel() for each in tensors[-2:]]
                reader.read_dense(tensors[-2:], sizes, rows, len(tensors) - 2, True)
                packed = reader.pack(rows, len(tensors))
                torch.cuda.synchronize()  # trials have arrived
            found.append(packed.tolist())
            for _ in range(3):
                reader.read_many(
                    GroupedReadings([WaitingTensors([source_of(each) for each in tensors], 0, True)], rows.device), rows
                )
                packed = reader.pack(rows, len(tensors))
                torch.cuda.synchronize()
            found.append(packed.tolist())
        assert found == [found[0]] * 4
    assert notes == []
    assert {key[0] for key in direct.reads} == {"two", *KINDS} - {torch.bool}
    assert {key[1] for key in direct._kernels} == {"many", "pack"}
    assert not ordinary.reads
    assert not ordinary._kernels
