"""Loads the fixtures that all tests share, with assertions of helpers that explain themselves."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
pytest_plugins = ["tests.helpers.fixtures"]
