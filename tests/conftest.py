"""Loads the fixtures that all tests share, with assertions of helpers that explain themselves, and orders tests."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
pytest_plugins = ["tests.helpers.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: at the end, no process works on while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
