"""Marks of parameters: `make test` runs a sample, `make test-all` all of them."""

import pytest


def nightly(*values):
    """Mark parameters, tuples or single ones, as nightly."""
    return [_param(value, pytest.mark.nightly) for value in values]


def sample(values, step):
    """Mark parameters as nightly, except every `step`-th, beginning with the first."""
    marks = (pytest.mark.nightly if i % step else () for i in range(len(values)))
    return [_param(value, marked) for value, marked in zip(values, marks, strict=True)]


def _param(value, marks):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
