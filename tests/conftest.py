"""Hypothesis profiles: "fast" by default, "deep" with HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Machines with other work to do are slow now and then; a deadline would only measure that.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "fast",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=25,
    stateful_step_count=15,
    suppress_health_check=_SLOW,
)
settings.register_profile("deep", deadline=None, max_examples=500, stateful_step_count=60, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
