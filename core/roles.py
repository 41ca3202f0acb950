"""What a row is about: a kind and a name. The text of a role is parsed here, and nowhere else.

text                        kind          name            key
input[0], kwargs.mask       INPUT         the text
output, output[1]           OUTPUT        the text
weight, parameters.input    WEIGHT        weight, input
grad output[1]              GRAD_OUTPUT   output[1]
grad input[0]               GRAD_INPUT    input[0]
grad weight                 GRAD_WEIGHT   weight
state exp_avg weight        STATE         weight          exp_avg
before input[0]             BEFORE        input[0]
buffer running_var          BUFFER        running_var

Users know the short names of parameters, so `weight` stands alone. `parameters.` stands in front of the few names that
would be read as something else, such as a parameter called `input`.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

PARAMETERS = "parameters."
"""Marks a parameter whose bare name would be misread. A parameter's name holds no dot, so nothing else begins so."""

_PARAM_GROUP = "optimizer.param_groups["

_INPUT = re.compile(r"(input|kwargs)(\.|\[|\Z)")
_OUTPUT = re.compile(r"output(\.|\[|\Z)")
_CACHED = 1 << 16
"""Texts that are remembered: more than the roles of a large model, and bounded, as they come from the network."""


def param_group(number: int) -> str:
    """The place of parameters that no module has: the group of the optimizer that steps on them."""
    return f"{_PARAM_GROUP}{number}]"


def is_param_group(place: str) -> bool:
    """Whether a frame is about parameters that no module has."""
    return place.startswith(_PARAM_GROUP)


class RoleKind(Enum):
    """What a row is about."""

    INPUT = "input"
    """An argument of the call, positional or by keyword."""
    OUTPUT = "output"
    """What the call returned."""
    WEIGHT = "weight"
    """A parameter of the module."""
    GRAD_OUTPUT = "grad_output"
    """The gradient of what the call returned."""
    GRAD_INPUT = "grad_input"
    """The gradient of an argument. No row is about one; a diagnosis can be."""
    GRAD_WEIGHT = "grad_weight"
    """The gradient of a parameter."""
    STATE = "state"
    """What an optimizer keeps of a parameter."""
    BEFORE = "before"
    """An argument as it was last seen, before the call changed it in place."""
    BUFFER = "buffer"
    """A buffer of the module, before the forward of its root."""


GRADIENTS = (RoleKind.GRAD_OUTPUT, RoleKind.GRAD_INPUT, RoleKind.GRAD_WEIGHT)


class Role(NamedTuple):
    """A role's text, parsed."""

    kind: RoleKind
    name: str
    """The parameter's name for WEIGHT, GRAD_WEIGHT and STATE; else the argument's or the output's."""
    key: str = ""
    """For STATE: the optimizer's name for it."""


@lru_cache(_CACHED)
def parse_role(text: str) -> Role:
    """Parse a role's text. Never fails: any other text is a parameter's name.

    >>> parse_role("grad weight")
    Role(kind=<RoleKind.GRAD_WEIGHT: 'grad_weight'>, name='weight', key='')
    """
    if _INPUT.match(text):
        return Role(RoleKind.INPUT, text)
    if _OUTPUT.match(text):
        return Role(RoleKind.OUTPUT, text)
    first, _, rest = text.partition(" ")
    if first == "grad":
        if _OUTPUT.match(rest):
            return Role(RoleKind.GRAD_OUTPUT, rest)
        if _INPUT.match(rest):
            return Role(RoleKind.GRAD_INPUT, rest)
        return Role(RoleKind.GRAD_WEIGHT, rest.removeprefix(PARAMETERS))
    if first == "state":
        key, marked, name = rest.partition(f" {PARAMETERS}")
        if not marked:
            key, _, name = rest.rpartition(" ")
        return Role(RoleKind.STATE, name, key)
    if first == "before" and _INPUT.match(rest):
        return Role(RoleKind.BEFORE, rest)
    if first == "buffer" and rest:
        return Role(RoleKind.BUFFER, rest)
    return Role(RoleKind.WEIGHT, text.removeprefix(PARAMETERS))


@lru_cache(_CACHED)
def role_of_parameter(name: str) -> str:
    """The role of a parameter: its name, or `parameters.<name>` where the name alone would be misread.

    `grad {role}` and `state {key} {role}` are the roles of its gradient and of what an optimizer keeps of it.

    >>> role_of_parameter("weight"), role_of_parameter("output_bias"), role_of_parameter("input")
    ('weight', 'output_bias', 'parameters.input')
    """
    as_meant = (
        parse_role(name) == (RoleKind.WEIGHT, name, "")
        and parse_role(f"grad {name}") == (RoleKind.GRAD_WEIGHT, name, "")
        and parse_role(f"state key {name}") == (RoleKind.STATE, name, "key")
    )
    return name if as_meant else f"{PARAMETERS}{name}"
