"""Hypothesis where it is installed; elsewhere its tests are skipped and the others still run.

A borrowed GPU machine has no more than torch, triton and pytest.
"""

import pytest

try:
    from hypothesis import HealthCheck, given, settings, strategies
except ImportError:

    class _Anything:
        """Takes part in a decorator of a test that is skipped."""

        def __getattr__(self, name):
            return self

        def __call__(self, *arguments, **options):
            return self

    def given(*arguments, **options):
        return pytest.mark.skip(reason="hypothesis is not installed")

    def settings(*arguments, **options):
        return lambda test: test

    HealthCheck = strategies = _Anything()

__all__ = ["HealthCheck", "given", "settings", "strategies"]
