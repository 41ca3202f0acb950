"""A role's text: what it means, and that no name of a parameter is taken for something else."""

from __future__ import annotations

import pytest
from gpuwatch.core.frames import Frame, Row
from gpuwatch.core.roles import Role, RoleKind, parse_role, role_of_parameter
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("input", Role(RoleKind.INPUT, "input")),
        ("input[0]", Role(RoleKind.INPUT, "input[0]")),
        ("kwargs.mask", Role(RoleKind.INPUT, "kwargs.mask")),
        ("kwargs['a b']", Role(RoleKind.INPUT, "kwargs['a b']")),
        ("output", Role(RoleKind.OUTPUT, "output")),
        ("output.logits[1]", Role(RoleKind.OUTPUT, "output.logits[1]")),
        ("weight", Role(RoleKind.WEIGHT, "weight")),
        ("input_scale", Role(RoleKind.WEIGHT, "input_scale")),
        ("output_bias", Role(RoleKind.WEIGHT, "output_bias")),
        ("input\n", Role(RoleKind.WEIGHT, "input\n")),
        ("parameters.input", Role(RoleKind.WEIGHT, "input")),
        ("grad output[1]", Role(RoleKind.GRAD_OUTPUT, "output[1]")),
        ("grad input[0]", Role(RoleKind.GRAD_INPUT, "input[0]")),
        ("grad weight", Role(RoleKind.GRAD_WEIGHT, "weight")),
        ("grad output_bias", Role(RoleKind.GRAD_WEIGHT, "output_bias")),
        ("grad parameters.output", Role(RoleKind.GRAD_WEIGHT, "output")),
        ("grad params[3]", Role(RoleKind.GRAD_WEIGHT, "params[3]")),
        ("state exp_avg weight", Role(RoleKind.STATE, "weight", "exp_avg")),
        ("state my key weight", Role(RoleKind.STATE, "weight", "my key")),
        ("state exp_avg parameters.my weight", Role(RoleKind.STATE, "my weight", "exp_avg")),
        ("before input[0]", Role(RoleKind.BEFORE, "input[0]")),
        ("before kwargs.x", Role(RoleKind.BEFORE, "kwargs.x")),
        ("before weight", Role(RoleKind.WEIGHT, "before weight")),
        ("", Role(RoleKind.WEIGHT, "")),
    ],
)
def test_what_a_role_means(text, meaning):
    assert parse_role(text) == meaning


@pytest.mark.parametrize(
    "name", ["weight", "bias", "output_bias", "inputs", "kwargs_scale", "0", "gradient", "beforehand"]
)
def test_an_ordinary_name_is_its_own_role(name):
    assert role_of_parameter(name) == name


@pytest.mark.parametrize(
    "name", ["input", "output", "kwargs", "input[0]", "output[1]", "grad x", "state a b", "before input", "my weight"]
)
def test_a_name_that_would_be_misread_is_marked(name):
    assert role_of_parameter(name) == f"parameters.{name}"


names = st.text(st.characters(blacklist_characters=".", blacklist_categories=["Cs"]), min_size=1)


@given(names | st.sampled_from(["input", "output", "kwargs"]).flatmap(lambda word: names.map(lambda rest: word + rest)))
@example("input")
@example("grad output")
@example("state exp_avg weight")
@example("before input[0]")
@example(" ")
def test_every_name_of_a_parameter_is_read_as_one(name):
    """torch allows any text without a dot."""
    role = role_of_parameter(name)
    assert parse_role(role) == Role(RoleKind.WEIGHT, name)
    assert parse_role(f"grad {role}") == Role(RoleKind.GRAD_WEIGHT, name)
    assert parse_role(f"state exp_avg {role}") == Role(RoleKind.STATE, name, "exp_avg")


def frame(*roles: str) -> Frame:
    rows = [Row(role, 1.0, 1.0, False, False, False, "float32", [2]) for role in roles]
    return Frame(0, 0, "fc", "Odd", "forward", rows)


def test_a_parameter_called_input_is_a_weight_and_no_argument():
    odd = frame("parameters.input", "parameters.output", "input[0]", "output", "grad parameters.output")
    assert [row.role for row in odd.weights] == ["parameters.input", "parameters.output"]
    assert [row.role for row in odd.inputs] == ["input[0]"]
    assert [row.role for row in odd.outputs] == ["output"]
    assert [row.role for row in odd.gradients] == ["grad parameters.output"]


def test_an_argument_before_the_call_changed_it_is_no_argument_and_no_weight():
    changed = frame("before input[0]", "input[0]", "weight")
    assert [row.role for row in changed.inputs] == ["input[0]"]
    assert [row.role for row in changed.weights] == ["weight"]
    assert [row.role for row in changed.rows if row.role_kind is RoleKind.BEFORE] == ["before input[0]"]
