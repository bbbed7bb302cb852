"""Hooks of mkdocs: pages that are generated from the code, and links between files of the repository.

Pages are read in the repository as well, where links lead to code and kept results. In the site a link to a file that
is no page becomes its text.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

from tunediff import config as cfg
from tunediff import knobs
from tunediff.__main__ import COMMANDS, module_of

ROOT = Path(__file__).parent.parent
COPIES = {
    "index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md", "tutorials/search.md": "docs/tutorials/search.ipynb",
}  # fmt: skip
"""Pages that are files elsewhere in the repository."""
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the generated pages."""
    pages = {uri: _text(ROOT / path) for uri, path in COPIES.items()} | {
        "reference/commands.md": commands(),
        "reference/outputs.md": outputs(),
        "reference/knobs-diffusion.md": knob_page("digits", "diffusion"),
        "reference/knobs-classification.md": knob_page("digits_classifier", "classification"),
    }
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point the links of a page to the pages of the site."""
    uri = page.file.src_uri
    source = ROOT / COPIES.get(uri, f"docs/{uri}")
    pages = {ROOT / path: name for name, path in COPIES.items()}

    def replace(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(source.parent / target))
        inside = path.is_relative_to(ROOT / "docs") and path.suffix != ".ipynb"
        name = str(path.relative_to(ROOT / "docs")) if inside else pages.get(path)
        if name is None or files.get_file_from_path(name) is None:
            return text.strip("![]") if path.exists() else match[0]
        return f"{text}({os.path.relpath(name, Path(uri).parent)}{anchor})"

    return LINK.sub(replace, markdown)


def on_post_page(output, page, config):
    """Put the Markdown of a page beside it, for programs that read llms.txt."""
    path = Path(config["site_dir"]) / page.file.src_uri
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.markdown, encoding="utf-8")
    return output


def _text(path):
    """Return a Markdown file, or a notebook as Markdown with its outputs."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", ())))
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def commands():
    """Return the page with the options of every command."""
    os.environ["COLUMNS"] = "110"
    parts = ["# Commands", "`tunediff COMMAND` and `python -m tunediff.COMMAND` are the same."]
    for name, purpose in COMMANDS.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            module_of(name).main(["--help"])
        parts.append(
            f"## {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```text\n{text.getvalue()}```"
        )
    return "\n\n".join(parts)


def outputs():
    """Return the page with the keys of every `--json` output, from their schemas."""
    parts = [
        "# JSON outputs",
        "Keys and types of every output; [JSON for scripts](../json.md) has the rules.",
    ]
    for path in sorted((Path(knobs.__file__).parent / "schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        parts.append(
            f"## {schema['title'].removeprefix('tunediff ')}\n\n`tunediff/schemas/{path.name}`"
        )
        parts += [_keys(schema)] if "properties" in schema else []
        for name, of in schema.get("$defs", {}).items():
            parts.append(
                f"`{name}`: {of.get('description', '')}\n\n{_keys(of) if 'properties' in of else _type(of)}"
            )
    return "\n\n".join(parts)


def _keys(schema):
    rows = [
        (f"`{name}`", _type(of), of.get("description", ""))
        for name, of in schema["properties"].items()
    ]
    return _table(("key", "type", "is"), rows)


def _type(schema):
    """Return the type of a value in words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    items = f" of {_type(schema['items'])}" if "items" in schema else ""
    return " or ".join(kind + (items if kind == "array" else "") for kind in kinds)


def knob_page(workload, title):
    """Return the page with all knobs of a workload, a section each."""
    records = knobs.describe(cfg.baseline(workload))
    parts = [f"# Knobs of {title}", f"As `tunediff knobs --workload {workload}` lists them."]
    section = None
    for record in records:
        if (own := record["name"].rpartition(".")[0] or "training") != section:
            section = own
            parts.append(f"## {section}")
        default = json.dumps(record["default"])
        facts = [record["allowed"], f"default `{default}`"]
        if record["belongs_to"] is not None:
            facts.append(
                f"only with `{record['belongs_to']['knob']}` = {', '.join(record['belongs_to']['values'])}"
            )
        facts += [] if record["searchable"] else ["never searched"]
        effect = record["not_effective_on_cpu"]
        parts.append(
            f"**`{record['name']}`**: {'; '.join(facts)}.\n{record['help']}"
            + (f" Without effect on a CPU: {effect}." if effect else "")
        )
    return "\n\n".join(parts)


def _table(head, rows):
    lines = [
        head,
        ("---",) * len(head),
        *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
