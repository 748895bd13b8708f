"""Profiles of hypothesis, and the fixtures that run a test once for every instruction set and type."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from cases import ISAS, TYPES

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """An instruction set that this machine can run."""
    return request.param


@pytest.fixture(params=TYPES)
def type_name(request: pytest.FixtureRequest) -> str:
    """A type of the table."""
    return request.param
