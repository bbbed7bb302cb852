"""What tests read of a report."""

import csv
import html.parser
import re

from tunediff.report import context, page


def written(folder, **more):
    page.write_search(context.read(folder, **more), folder)
    return (folder / "report.html").read_text()


def words(text):
    """What a reader sees, without markup, in one line."""
    text = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.S)
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"</(td|th|p|li|dd|dt|h\d)>", " ", text))))
    return text.replace("\N{NO-BREAK SPACE}", " ")


class Elements(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def rows(path):
    return list(csv.DictReader(path.open()))
