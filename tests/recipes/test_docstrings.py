"""The examples in the recipes' docstrings; the suite's own doctest collection does not reach recipes/."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest


NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = getattr(module, public)
        if callable(thing):
            assert inspect.getdoc(thing), public
