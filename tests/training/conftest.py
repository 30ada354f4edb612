"""The tiny target and its store that most of these files train on, once per file."""

from __future__ import annotations

import pytest

from tests.training.small import tiny_store, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return tiny_store(tmp_path_factory.mktemp("store"), target)
