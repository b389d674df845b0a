"""Hypothesis profiles: "fast" by default, "deep" with HYPOTHESIS_PROFILE=deep; one thread for each parallel worker."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported: workers with several threads each would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines with other work to do are slow now and then; a deadline would only measure that.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("fast", deadline=None, derandomize="CI" in os.environ, suppress_health_check=_SLOW)
settings.register_profile(
    "deep", settings.get_profile("fast"), derandomize=False, max_examples=1000, stateful_step_count=80
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
