"""The kit's settings of hypothesis: few examples, the same ones every time, and nothing written to disk."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def few(count: int) -> settings:
    """Settings for `count` examples."""
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
