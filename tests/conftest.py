"""Loads the fixtures that all tests share, starts the fork server, and orders tests."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
pytest_plugins = ["tests.helpers.fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    """In a run of many tests the fork server imports torch while the workers collect, so that no test waits for it."""
    if hasattr(config, "workerinput"):  # one of xdist's workers
        from tests.helpers.forked import start_server  # assertions of helpers are rewritten by now

        start_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: at the end, no process works on while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
