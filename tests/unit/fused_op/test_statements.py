"""The page that maps statements to tests."""

from __future__ import annotations

import statements


def test_every_statement_has_a_test():
    found = statements.tests_by_statement()

    assert [] == [number for number in range(1, statements.LAST + 1) if number not in found]
    assert statements.LAST == max(found)


def test_the_page_is_what_the_tests_say():
    assert statements.page() == statements.PAGE.read_text(), "write it again: python tests/statements.py"
