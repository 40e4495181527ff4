"""Recorded runs of the authors' code, replayed; a failed comparison of `cases` shows both sides."""

import pytest

pytest.register_assert_rewrite("tests.golden.cases")
