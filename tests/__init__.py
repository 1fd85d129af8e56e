"""Tests. What asserts and is no test module itself says what was compared, too."""

import pytest

pytest.register_assert_rewrite("tests.refusals")
