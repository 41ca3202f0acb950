"""Our class beside transformers' own: the same model, the same seed, both texts compared."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuwatch import DebugUnderflowOverflow
from gpuwatch.worker import debug_underflow_overflow as module_under_test
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NAN, INF = float("nan"), float("inf")
INDENT = " " * 18


# -- two outputs side by side -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Told:
    """What a run printed and raised."""

    text: str
    error: str

    @property
    def frames(self) -> list[tuple[str, dict[str, str]]]:
        """("name class", {role: numbers}) of every frame, in the order in which they were printed."""
        found: list[tuple[str, dict[str, str]]] = []
        for line in self.text.splitlines():
            if line.startswith(INDENT):
                if "***" not in line:
                    found.append((line[len(INDENT) :], {}))
            elif (row := re.fullmatch(r"(.{17}) (\S.*)", line)) and found:
                found[-1][1][row[2]] = row[1]
        return found

    @property
    def around_frames(self) -> list[str]:
        """The lines that are no part of a frame."""
        return [
            line
            for line in self.text.splitlines()
            if not (line.startswith(INDENT) and "***" not in line) and not re.fullmatch(r"[ \dinfa].{16} \S.*", line)
        ]


def tell(capsys: pytest.CaptureFixture[str], scenario: Callable[[Any], None], debug_class: Any) -> Told:
    torch.manual_seed(0)
    capsys.readouterr()
    error = ""
    try:
        scenario(debug_class)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Told(capsys.readouterr().out, error)


@pytest.fixture
def both(capsys):
    """Runs a scenario with their class and with ours."""
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs  # by the worker that needs it alone

    return lambda scenario: (tell(capsys, scenario, Theirs), tell(capsys, scenario, DebugUnderflowOverflow))


def seen_by_both(theirs: Told, ours: Told) -> list[tuple[str, dict[str, str]]]:
    """Our frames without the rows that they do not have, and without those where they say that it is no tensor."""
    return [
        (
            title,
            {
                role: numbers
                for role, numbers in rows.items()
                if "not a tensor" not in theirs_rows.get(role, "not a tensor")
            },
        )
        for (title, rows), (_, theirs_rows) in zip(ours.frames, theirs.frames, strict=True)
    ]


def numbers_of(theirs: Told) -> list[tuple[str, dict[str, str]]]:
    return [
        (title, {role: numbers for role, numbers in rows.items() if "not a tensor" not in numbers})
        for title, rows in theirs.frames
    ]


# -- T5 ---------------------------------------------------------------------------------------------------------


def t5(dtype: torch.dtype = torch.float32) -> Any:
    """Made from a configuration: nothing is fetched."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    torch.manual_seed(7)
    return T5ForConditionalGeneration(config).to(dtype)


def t5_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 9))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_frames_of_t5_are_theirs_number_for_number(both, dtype):
    def train_one_batch(debug_class):
        model = t5(dtype).train()  # with dropout: the seed makes both runs the same
        debug_class(model, trace_batch_nums=[0])
        model(**t5_batch()).loss.backward()

    theirs, ours = both(train_one_batch)

    assert theirs.error == ours.error == ""
    assert len(theirs.frames) == 98
    assert seen_by_both(theirs, ours) == numbers_of(theirs)
    assert [list(rows) for _, rows in seen_by_both(theirs, ours)] == [list(rows) for _, rows in numbers_of(theirs)]
    assert ours.around_frames == theirs.around_frames


def test_what_is_not_a_tensor_to_them_has_numbers(both):
    def one_batch(debug_class):
        model = t5().eval()
        debug_class(model, trace_batch_nums=[0])
        model(**t5_batch())

    theirs, ours = both(one_batch)

    blind = {(title, role) for title, rows in theirs.frames for role, text in rows.items() if "not a tensor" in text}
    assert blind == {
        ("encoder T5Stack", "output"),
        ("decoder T5Stack", "output"),
        (" T5ForConditionalGeneration", "output"),
    }
    rows = dict(ours.frames)
    assert rows["encoder T5Stack"]["output.last_hidden_state"] == rows["encoder.dropout Dropout"]["output"]
    assert rows["decoder T5Stack"]["output.last_hidden_state"] == rows["decoder.dropout Dropout"]["output"]
    root = rows[" T5ForConditionalGeneration"]
    assert root["output.logits"] == rows["lm_head Linear"]["output"]
    assert re.fullmatch(r"\d\.\d\de[+-]\d\d \d\.\d\de[+-]\d\d", root["output.loss"])
    assert root["kwargs.input_ids"] == rows["encoder.embed_tokens Embedding"]["input[0]"]


def test_an_overflow_in_t5_raises_and_prints_the_same(both):
    def overflow(debug_class):
        model = t5(torch.float16).eval()
        with torch.no_grad():
            model.encoder.block[1].layer[1].DenseReluDense.wi.weight.mul_(30000)
        debug_class(model)
        model(**t5_batch())

    theirs, ours = both(overflow)

    assert theirs.error.startswith("ValueError: DebugUnderflowOverflow: inf/nan detected")
    assert ours.error == theirs.error
    assert len(theirs.frames) == 21
    assert seen_by_both(theirs, ours) == numbers_of(theirs)
    assert theirs.frames[-1][0] == "encoder.block.1.layer.1.DenseReluDense.wi Linear"
    assert "inf" in theirs.frames[-1][1]["output"]
    assert ours.around_frames == theirs.around_frames
    assert (
        "output has infs" in ours.text
        and "\nDetected inf/nan during batch_number=0\nLast 21 forward frames:" in ours.text
    )


# -- models of which they see everything: the same text to the last character ---------------------------------------


class Tuples(nn.Module):
    """Outputs of every shape that they look into."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.shared = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: Any, nothing: Any) -> Any:
        out, state = self.lstm(x)
        again = self.shared(self.shared(out)).relu_()
        named = namedtuple("Named", "first second")(again, state[0])
        return out, (again, None, 3), named, factor, [], ()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4, bias=False)), nn.Tanh())


def batches(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.randn(2, 4)).sum().backward()


def traced_batches(debug_class):
    model = mlp()
    debug_class(model, trace_batch_nums=[0, 2, 3])
    batches(model, 5)


def ends_after_a_batch(debug_class):
    model = mlp()
    debug_class(model, abort_after_batch_num=1)
    batches(model, 5)


def ends_after_a_traced_batch(debug_class):
    model = mlp()
    debug_class(model, trace_batch_nums=[1], abort_after_batch_num=1)
    batches(model, 5)


def nan_in_a_weight(debug_class):
    model = mlp()
    debug_class(model)
    batches(model, 2)
    model[1][1].weight.data[1, 2] = NAN  # no version counter moves
    batches(model, 2)


def inf_in_the_batch(debug_class):
    model = mlp()
    debug_class(model, max_frames_to_save=3)
    batches(model, 2)
    model(torch.tensor([[1.0, -INF, 2.0, 3.0]]))


def nan_and_inf_at_once(debug_class):
    model = nn.Linear(2, 2)  # the root's own frame
    debug_class(model)
    model(torch.tensor([[NAN, INF]]))


def overflow_in_a_traced_batch(debug_class):
    model = mlp()
    debug_class(model, trace_batch_nums=[1])
    batches(model, 1)
    with torch.no_grad():
        model[0].bias[0] = INF
    batches(model, 1)
    with torch.no_grad():
        model[0].bias[0] = 0
    batches(model, 1)


def goes_on_after_an_overflow(debug_class):
    model = mlp()
    debug_class(model)
    for value in (1.0, NAN, 1.0):
        try:
            model(torch.full((2, 4), value))
        except ValueError as error:
            print(error)


def a_part_is_called_alone(debug_class):
    model = mlp()
    debug_class(model, trace_batch_nums=[0])
    model[0](torch.ones(2, 4))
    batches(model, 1)


def all_that_they_open(debug_class):
    model = Tuples()
    debug_class(model, trace_batch_nums=[0])
    model(torch.randn(2, 3, 4), 2.0, None)


def integers_and_complex_numbers(debug_class):
    model = nn.Identity()
    debug_class(model, trace_batch_nums=[0, 1, 2, 3])
    model(torch.arange(-3, 4))
    model(torch.tensor([3 + 4j, 1j]))
    model(torch.tensor(2.5, dtype=torch.float64))
    model(torch.tensor([1e-40, 3e38]))


SAME_TEXT = [
    traced_batches,
    ends_after_a_batch,
    ends_after_a_traced_batch,
    nan_in_a_weight,
    inf_in_the_batch,
    nan_and_inf_at_once,
    overflow_in_a_traced_batch,
    goes_on_after_an_overflow,
    a_part_is_called_alone,
    all_that_they_open,
    integers_and_complex_numbers,
]


@pytest.mark.parametrize("scenario", SAME_TEXT, ids=lambda scenario: scenario.__name__)
def test_the_text_and_the_error_are_theirs(both, scenario):
    theirs, ours = both(scenario)
    assert ours.text == theirs.text
    assert ours.error == theirs.error
    assert len(theirs.text + theirs.error) > 50


def test_the_arguments_are_theirs():
    debug = DebugUnderflowOverflow(nn.Linear(1, 1), 5, None, 7)
    assert (debug.frames.maxlen, debug.trace_batch_nums, debug.abort_after_batch_num) == (5, (), 7)
    assert DebugUnderflowOverflow(nn.Linear(1, 1)).frames.maxlen == 21


# -- beyond theirs ----------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """Returns whatever the function makes of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rows_of_one_call(capsys, function, *args, **kwargs) -> dict[str, str]:
    model = Calls(function)
    with DebugUnderflowOverflow(model, trace_batch_nums=[0]):
        model(*args, **kwargs)
    ((_, rows),) = Told(capsys.readouterr().out, "").frames
    return {role: numbers.strip() for role, numbers in rows.items()}


def test_keyword_inputs_have_rows(capsys):
    rows = rows_of_one_call(
        capsys,
        lambda x, **rest: x,
        torch.ones(2),
        mask=torch.tensor([0.0, 2.0]),
        cache=None,
        flag=True,
        deep={"a": [torch.ones(1)]},
    )
    assert rows == {
        "input[0]": "1.00e+00 1.00e+00",
        "kwargs.mask": "0.00e+00 2.00e+00",
        "kwargs.cache": "None",
        "kwargs.flag": "not a tensor",
        "kwargs.deep.a[0]": "1.00e+00 1.00e+00",
        "output": "1.00e+00 1.00e+00",
    }


def test_nested_outputs_are_opened(capsys):
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        states: Any

    one = torch.ones(1)
    assert rows_of_one_call(capsys, lambda: Output(one, [one, {"k": one}])) == {
        "output.logits": "1.00e+00 1.00e+00",
        "output.states[0]": "1.00e+00 1.00e+00",
        "output.states[1].k": "1.00e+00 1.00e+00",
    }
    assert list(rows_of_one_call(capsys, lambda: (one, {"a": one}, ((one, (one, [])),)))) == [
        "output[0]",
        "output[1].a",
        "output[2][0][0]",
        "output[2][0][1][0]",
    ]


def test_an_overflow_in_a_keyword_input_or_a_nested_output_is_found():
    model = Calls(lambda mask: None)
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf/nan detected"):
        model(mask=torch.tensor([NAN]))
    model = Calls(lambda: {"loss": torch.tensor(INF)})
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf/nan detected"):
        model()


def test_a_mask_of_minus_inf_that_they_do_not_see_stays_visible_and_does_not_raise(capsys):
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    x = torch.randn(1, 3, 4)
    with DebugUnderflowOverflow(layer) as debug:
        layer(x, x, x, attn_mask=mask, need_weights=False)
        assert "0.00e+00      inf kwargs.attn_mask" in debug.frames[-1]
    assert "infs" not in capsys.readouterr().out


class Unreadable(dict):
    def __getitem__(self, key):
        raise RuntimeError("not for you")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*:UserWarning")  # they go away some day
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_no_tensor_raises(capsys):
    odd = {
        "bool": torch.tensor([True, False]),
        "int8": torch.tensor([-128, 3], dtype=torch.int8),
        "int64": torch.tensor([-(2**63)]),
        "uint64": torch.ones(2, dtype=torch.uint64),
        "float8": torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([3 + 4j]),
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "empty": torch.empty(0, 3),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        "zero_dim": torch.tensor(5.0),
        "expanded": torch.ones(1).expand(1000, 1000),
        "unreadable": Unreadable(a=1),
    }
    rows = rows_of_one_call(capsys, lambda **given: given, **odd)
    one = "1.00e+00 1.00e+00"
    expected = {
        "bool": "0.00e+00 1.00e+00",
        "int8": "3.00e+00 1.28e+02",
        "int64": "9.22e+18 9.22e+18",
        "uint64": one,
        "float8": "5.00e-01 4.48e+02",
        "complex": "5.00e+00 5.00e+00",
        "sparse": one,
        "csr": one,
        "empty": "empty",
        "nested": one,
        "jagged": one,
        "meta": "not measurable",
        "quantized": one,
        "zero_dim": "5.00e+00 5.00e+00",
        "expanded": one,
        "unreadable.a": "not a tensor",  # read by dict itself
    }
    assert {role: text for role, text in rows.items() if role.startswith("kwargs")} == {
        f"kwargs.{name}": text for name, text in expected.items()
    }
    assert rows["output.float8"] == expected["float8"]


def test_fake_tensors_and_vmap_have_no_numbers_and_do_not_raise(capsys):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    with DebugUnderflowOverflow(model, trace_batch_nums=[0, 1]):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(2, 4))
        torch.func.vmap(nn.Sequential(model[0], model[2]))(torch.ones(3, 2, 4))
        model(torch.ones(2, 4))
    frames = Told(capsys.readouterr().out, "").frames
    assert frames[0][1]["input[0]"].strip() == "not measurable"
    assert frames[-1][1]["input[0]"] == "1.00e+00 1.00e+00"


def test_modules_that_come_later_are_seen(capsys):
    model = mlp()
    debug = DebugUnderflowOverflow(model)
    batches(model, 1)
    model.append(nn.Linear(4, 4))
    model[1][0] = nn.Sigmoid()
    model[0].register_module("extra", nn.Identity())
    model[1].append(copy.copy(model[0]))  # shares the hooks of the one it is a copy of
    debug.frames.clear()
    batches(model, 1)

    titles = [title for title, _ in Told("\n".join(debug.frames), "").frames]
    assert titles == [
        "0 Linear",
        "1.0 Sigmoid",
        "1.1 Linear",
        "1.2 Linear",
        "1 Sequential",
        "2 Tanh",
        "3 Linear",
        " Sequential",
    ]
    debug.remove()
    assert all(not part._forward_hooks for part in model.modules())


def test_a_copy_outside_of_the_model_is_no_key_error():
    model = mlp()
    with DebugUnderflowOverflow(model) as debug:
        copy.copy(model[0])(torch.ones(2, 4))
        assert "(not in the model) Linear" in debug.frames[-1]


def hooks_on(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(part, table)) for part in model.modules() for table in tables)


def test_it_can_be_taken_off(capsys):
    model = mlp()
    mine = model[0].register_forward_hook(lambda *_: None)
    with DebugUnderflowOverflow(model, trace_batch_nums=range(10)) as debug:
        batches(model, 1)
        assert capsys.readouterr().out
    assert hooks_on(model) == 1
    batches(model, 1)
    debug.remove()
    debug.remove()
    mine.remove()
    assert hooks_on(model) == 0
    assert capsys.readouterr().out == ""
    assert debug.batch_number == 1


def test_it_is_taken_off_after_an_overflow_too():
    model = mlp()
    with pytest.raises(ValueError, match="inf/nan detected"):
        with DebugUnderflowOverflow(model):
            model(torch.full((1, 4), NAN))
    assert hooks_on(model) == 0


def test_the_buffer_keeps_its_bound_after_a_traced_batch(capsys):
    model = mlp()
    with DebugUnderflowOverflow(model, max_frames_to_save=4, trace_batch_nums=[1]) as debug:
        batches(model, 5)
        assert len(debug.frames) == 4
        model[2].register_buffer("unused", torch.zeros(1))
        with pytest.raises(ValueError, match="inf/nan detected"):
            model(torch.full((1, 4), NAN))
    assert "Last 4 forward frames:" in capsys.readouterr().out


def test_two_models_at_once_and_two_on_one_model():
    first, second = mlp(), nn.Sequential(nn.Linear(4, 4))
    with (
        DebugUnderflowOverflow(first) as one,
        DebugUnderflowOverflow(second) as two,
        DebugUnderflowOverflow(first) as three,
    ):
        batches(first, 2)
        batches(second, 1)
        with pytest.raises(ValueError, match="inf/nan detected"):
            second(torch.full((1, 4), NAN))
        batches(first, 1)
        assert (one.batch_number, two.batch_number, three.batch_number) == (3, 1, 3)
        assert (one.detected_overflow, two.detected_overflow) == (False, True)
        assert list(one.frames) == list(three.frames)


def test_each_tensor_is_read_once_per_forward(monkeypatch):
    looked: list[int] = []
    real = module_under_test.look
    monkeypatch.setattr(module_under_test, "look", lambda tensor: looked.append(tensor.numel()) or real(tensor))
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), shared, nn.ReLU(inplace=True))
    with DebugUnderflowOverflow(model):
        model(torch.randn(3, 4))
        # the weight and the bias once each; the batch, three outputs, and the last one again after it was written into
        assert sorted(looked) == sorted([16, 4, 12, 12, 12, 12, 12])
        looked.clear()
        model(torch.randn(3, 4))
        assert sorted(looked) == sorted([16, 4, 12, 12, 12, 12, 12])


def test_what_is_written_in_place_is_read_again():
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    batch = torch.tensor([-8.0, 2.0])
    with DebugUnderflowOverflow(model) as debug:
        for mode in (torch.no_grad(), torch.inference_mode()):  # the latter's tensors do not count what is done to them
            with mode:
                model(batch * 1)
            frames = Told("\n".join(debug.frames), "").frames[-3:]
            assert frames[0][1]["output"] == "2.00e+00 8.00e+00"
            assert frames[1][1]["output"] == "0.00e+00 2.00e+00"
            assert frames[2][1]["input[0]"] == "0.00e+00 2.00e+00"


def test_copies_of_the_model_and_saved_ones_bring_their_own(capsys):
    model = mlp()
    debug = DebugUnderflowOverflow(model)
    batches(model, 1)
    model[0](torch.ones(2, 4))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        twin[1][1](torch.full((1, 4), 2.0))
        batches(twin, 1)
        with pytest.raises(ValueError, match="inf/nan detected"):
            twin(torch.full((1, 4), NAN))
        printed = capsys.readouterr().out
        assert "Detected inf/nan during batch_number=2" in printed
        assert "1.1 Linear" in printed and "(not in the model)" not in printed
    assert debug.batch_number == 1
    assert not debug.detected_overflow


def test_a_watched_model_computes_the_same_bits():
    def gradients(watched: bool) -> list[torch.Tensor]:
        model = t5().train()
        debug = DebugUnderflowOverflow(model) if watched else None
        torch.manual_seed(3)
        loss = model(**t5_batch()).loss
        assert torch.is_grad_enabled()
        loss.backward()
        if debug is not None:
            debug.remove()
        return [parameter.grad for parameter in model.parameters()] + [torch.rand(3)]

    for watched, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(watched, plain)


class Operations(TorchDispatchMode):
    """What a mode of the script's own sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_scripts_does_not_see_the_looks():
    model = mlp()
    with Operations() as plain:
        model(torch.ones(2, 4))
    with DebugUnderflowOverflow(model), Operations() as watched, torch.device("meta"):
        model(torch.ones(2, 4, device="cpu"))
    assert watched.seen == plain.seen


def test_a_compiled_model_breaks_its_graphs_and_is_seen():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    with DebugUnderflowOverflow(model) as debug, torch.no_grad():
        for _ in range(3):
            compiled(torch.ones(2, 4))
        assert debug.batch_number == 3
        titles = [title for title, _ in Told("\n".join(debug.frames), "").frames]
        assert titles == ["0 Linear", "1.0 ReLU", "1.1 Linear", "1 Sequential", "2 Tanh", " Sequential"] * 3
        with pytest.raises(ValueError, match="inf/nan detected"):
            compiled(torch.full((2, 4), NAN))


def test_an_exported_model_is_left_alone(capsys):
    model = mlp()
    with DebugUnderflowOverflow(model, trace_batch_nums=[0]) as debug:
        exported = torch.export.export(model, (torch.ones(2, 4),), strict=False)
        assert debug.batch_number == 0
    assert capsys.readouterr().out == ""
    assert torch.equal(exported.module()(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_cuda_the_numbers_are_theirs(both, dtype):
    def one_batch(debug_class):
        model = t5(dtype).eval().cuda()
        debug_class(model, trace_batch_nums=[0])
        model(**{name: tensor.cuda() for name, tensor in t5_batch().items()})

    theirs, ours = both(one_batch)
    assert seen_by_both(theirs, ours) == numbers_of(theirs)
