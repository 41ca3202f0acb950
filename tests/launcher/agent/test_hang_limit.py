"""How long a rank may stand still, learned from its steps."""

import pytest
from gpuwatch.launcher.agent.batch_history import LAST_STEPS
from gpuwatch.launcher.agent.rank_stalls import HangLimit, learned_limit


@pytest.mark.parametrize(
    ("steps_s", "within_s", "elsewhere_s"),
    [
        ([], 300, 300),
        ([0.1, 0.1], 300, 300),
        ([0.1, 0.1, 0.1], 60, 300),
        ([90.0, 0.1, 0.1], 900, 900),  # the first one compiles
        ([5.9, 6.0, 5.9], 60, 300),
        ([12.0, 6.0, 6.0], 120, 300),
        ([45.0] * 10, 450, 450),
    ],
)
def test_it_is_ten_times_the_slowest_of_the_last_steps(steps_s, within_s, elsewhere_s):
    assert learned_limit(steps_s) == HangLimit(within_s, elsewhere_s)


def test_a_slow_step_is_forgotten():
    assert learned_limit([90.0] + [0.1] * (LAST_STEPS - 1)).within_steps_s == 900
    assert learned_limit([90.0] + [0.1] * LAST_STEPS).within_steps_s == 60
