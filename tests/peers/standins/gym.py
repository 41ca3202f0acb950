"""Stands in for gym: a pole on a cart that is pushed left or right, as in Barto, Sutton and Anderson (1983)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

GRAVITY, CART_KG, POLE_KG, HALF_POLE_M, FORCE_N, STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FAR_M, STEEP_RAD = 2.4, 12 * math.pi / 180


class CartPole:
    def __init__(self) -> None:
        self.spec = SimpleNamespace(reward_threshold=475.0)
        self.random = np.random.default_rng(0)
        self.state = np.zeros(4)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.state = self.random.uniform(-0.05, 0.05, 4)
        return self.state.astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, speed, angle, turn = self.state
        force = FORCE_N if action == 1 else -FORCE_N
        mass = CART_KG + POLE_KG
        pushed = (force + POLE_KG * HALF_POLE_M * turn**2 * math.sin(angle)) / mass
        lever = HALF_POLE_M * (4 / 3 - POLE_KG * math.cos(angle) ** 2 / mass)
        turning = (GRAVITY * math.sin(angle) - math.cos(angle) * pushed) / lever
        moving = pushed - POLE_KG * HALF_POLE_M * turning * math.cos(angle) / mass
        self.state = self.state + STEP_S * np.array([speed, moving, turn, turning])
        fell = abs(self.state[0]) > FAR_M or abs(self.state[2]) > STEEP_RAD
        return self.state.astype(np.float32), 1.0, bool(fell), False, {}


def make(name: str) -> CartPole:
    return CartPole()
