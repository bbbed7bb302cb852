"""The page of benchmarks holds what its rows give."""

from benchmarks import page


def test_tables_of_the_page_are_made_of_the_kept_rows():
    text = page.PAGE.read_text()
    assert text.count("<!-- end -->") == 4
    assert page.filled(text) == text
