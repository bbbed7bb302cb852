"""The keys and types of `--json`, as docs/json.md lists them."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
NUMBER, TEXT, LIST, OBJECT, BOOL = (int, float), str, list, dict, bool
TYPES = {"number": NUMBER, "text": TEXT, "list": LIST, "object": OBJECT, "true/false": BOOL}


def documented(command):
    """{key: (types, whether null is allowed)} of the table of a command in docs/json.md."""
    section = PAGE.split(f"\n## `{command}`\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| ([^|]+) \|", section, re.M)
    return {
        key: (TYPES[kind.removesuffix(" or null").strip()], kind.strip().endswith(" or null"))
        for keys, kind in rows
        for key in re.findall(r"`(\w+)`", keys)
    }


def check_types(block, command):
    """Every documented key is there, nothing else, and each has its type."""
    expected = documented(command)
    assert set(block) == set(expected)
    for key, value in block.items():
        types, nullable = expected[key]
        if value is None:
            assert nullable, key
        else:
            assert isinstance(value, types), (key, value)
            assert types is BOOL or not isinstance(value, bool), (key, value)
