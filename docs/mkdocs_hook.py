"""The pages as mkdocs wants them: files outside docs/ that they link to become pages, and links lead there.

README.md is the index; an example or a source file is a page with its text. The pages are written for a forge: here
lists get the indentation and the empty line that Python-Markdown needs.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
PROMISES = "<!-- promises -->"
"""Where the table of promises stands on the site."""
ITEM = re.compile(r"^( *)([*-] |\d+\. )")


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def of_repository(site_path: str) -> str:
    """Which file of the repository a page is made of."""
    if site_path == "index.md":
        return "README.md"
    if site_path.startswith("source/"):
        path = site_path.removeprefix("source/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"docs/{site_path}"


def linked(path: str, text: str) -> list[str]:
    """Files of the repository that a page of it links to."""
    if not path.endswith(".md"):
        return []
    found = [posixpath.normpath(posixpath.join(posixpath.dirname(path), m[2])) for m in LINK.finditer(text)]
    return [target for target in found if (ROOT / target).is_file()]


def on_files(files: Any, config: Any) -> Any:
    """The index, and every file outside docs/ that is linked to, however indirectly."""
    queue = ["README.md", *(f"docs/{f.src_uri}" for f in files.documentation_pages())]
    seen = set(queue)
    while queue:
        path = queue.pop()
        text = (ROOT / path).read_text("utf-8")
        if not path.startswith("docs/"):
            if not path.endswith(".md"):
                kind = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(Path(path).suffix, "text")
                text = f"# {path}\n\n````{kind}\n{text.rstrip()}\n````\n"
            files.append(File.generated(config, in_site(path), content=text))
        new = sorted({t for t in linked(path, text) if t not in seen and not t.endswith(".png")})
        seen.update(new)
        queue += new
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to where their targets are in the site; lists as Python-Markdown wants them."""
    site_path = page.file.src_uri
    path = of_repository(site_path)
    if not path.endswith(".md"):
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
        place = target.removeprefix("docs/") if target.endswith(".png") else in_site(target)
        return f"]({posixpath.relpath(place, posixpath.dirname(site_path) or '.')}{match[3] or ''})"

    return LINK.sub(moved, indented(markdown.replace(PROMISES, promises() if PROMISES in markdown else "")))


def promises() -> str:
    """The promises of the conformance suite as a table."""
    from april.testing.conformance import CHECKS

    return "\n".join(["| check | promise |", "|---|---|", *(f"| `{c.name}` | {c.promise} |" for c in CHECKS)])


def indented(markdown: str) -> str:
    """Contents of list items four spaces deep per level, and an empty line before a list."""
    lines: list[str] = []
    inside: list[int] = []  # indentation of the contents of the items around this line
    fence = ""
    loose = False  # the item before has an empty line in it
    for line in markdown.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        item = None if fence else ITEM.match(line)
        if line.strip() and not fence:
            while inside and depth < inside[-1]:
                inside.pop()
        levels = len([i for i in inside if i <= depth or fence])
        taken = min(depth, inside[levels - 1]) if levels else 0
        continues = ITEM.match(lines[-1]) or lines[-1].startswith(" ") if lines else True
        if item and not levels and lines[-1:] != [""] and (loose or not continues):
            lines.append("")
        lines.append("    " * levels + line[taken:] if line.strip() else "")
        loose = not item and (loose or not line.strip())
        if item:
            inside.append(len(item[0]))
        if found := re.match(r"^ *(`{3,})", line):
            fence = "" if fence and found[1].startswith(fence) else fence or found[1]
    return "\n".join(lines) + "\n"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Roles of docstrings (a word in colons before a name) are for editors; ``~``: only the last part of a name."""

    def plain(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2] if match[1].startswith("~") else match[1]
        return f"<code>{name}</code>"

    return re.sub(r":(?:class|meth|func|data|attr|mod):<code>([^<]*)</code>", plain, html)
