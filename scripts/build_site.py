"""Hooks of mkdocs: the site's pages from the repository's documents, notebooks and code.

Paths on the site are those of the repository, so links lead to the same files on both. Notebooks,
public modules, and the code files and folders to which a page links have pages of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from lib.api_pages import api_page
from write_api_reference import MODULES

ROOT = Path(__file__).parents[1]
_DOCUMENTS = ("*.md", "scripts/*.md", "docs/**/*.md")
_DATA_CARDS = ("specjax/shipped_heads/*/*.md", "train/datasets/*.md")
_OTHER_FILES = ("docs/*.svg", "docs/*.png", "docs/*.css", "CITATION.cff", "LICENSE")
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, with the repository's in place of those in docs_dir."""
    site = [file for file in files if file.src_dir != config.docs_dir]
    paths = _paths(*_DOCUMENTS, *_DATA_CARDS, *_OTHER_FILES)
    linked_only = set(_paths(*_DATA_CARDS))
    for path in paths:
        site.append(File(_name(path), str(ROOT), config.site_dir, config.use_directory_urls))
        if path in linked_only:
            site[-1].inclusion = InclusionLevel.NOT_IN_NAV
    pages = {f"docs/api/{name}.md": api_page(name) for name in MODULES}
    pages |= {f"{_name(path)}.md": _notebook(path) for path in _paths("notebooks/*.ipynb")}
    site += [File.generated(config, name, content=text) for name, text in pages.items()]

    texts = pages | {_name(path): path.read_text() for path in paths if path.suffix == ".md"}
    for path in sorted(set().union(*(_linked(name, text) for name, text in texts.items()))):
        text = _folder(path) if path.is_dir() else _code(path)
        site.append(
            File.generated(
                config, _page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return Files(site)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links to code, notebooks and folders replaced by their pages."""
    del config
    folder = (ROOT / page.file.src_uri).parent

    def site_link(link: re.Match) -> str:
        target = (folder / link[0]).resolve()
        if not target.is_relative_to(ROOT) or files.get_file_from_path(_name(target)):
            return link[0]
        name = _page_of(target)
        return (
            link[0] + name.removeprefix(_name(target))
            if files.get_file_from_path(name)
            else link[0]
        )

    if page.file.src_uri == "docs/api.md":
        markdown = re.sub(r"(?m)^## (\S+)$", r"## [\1](api/\1.md)", markdown)
    # GitHub wants | in a table's code escaped, Python-Markdown shows the escape.
    markdown = re.sub(r"(?m)^\|.*", lambda row: _CODE.sub(_unescaped, row[0]), markdown)
    return _LINK.sub(site_link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page in which links to a line of code lead to that line.

    mkdocs does not know lines as anchors, and would warn about them in Markdown.
    """
    del page, config, files
    return re.sub(
        r'href="([^"#]*)">([^<]*, line (\d+))</a>', r'href="\1#__codelineno-0-\3">\2</a>', html
    )


def _unescaped(code: re.Match) -> str:
    return code[0].replace("\\|", "|")


def _paths(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _page_of(path: Path) -> str:
    """Return the name of the page of a folder or of a file that is not Markdown."""
    return f"{_name(path)}/index.md" if path.is_dir() else f"{_name(path)}.md"


def _linked(name: str, markdown: str) -> set[Path]:
    """Return the folders and code files to which a page links."""
    targets = {((ROOT / name).parent / link).resolve() for link in _LINK.findall(markdown)}
    return {path for path in targets if path.is_dir() or (path.suffix == ".py" and path.exists())}


def _folder(path: Path) -> str:
    """Return the page of a folder: links to its files that have pages."""
    shown = [each.name for each in sorted(path.iterdir()) if each.suffix in (".md", ".ipynb")]
    return "\n".join([f"# {_name(path)}", "", *(f"- [{name}]({name})" for name in shown)])


def _code(path: Path) -> str:
    """Return the page of a code file, which is excluded from the search."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# {_name(path)}\n"
    return f"{head}\n````python linenums='1'\n{path.read_text(encoding='utf-8')}````\n"


def _notebook(path: Path) -> str:
    """Return a notebook's page, with the texts and pictures stored in it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"````python\n{source}\n````", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/png" in data:
        return f"![figure](data:image/png;base64,{data['image/png'].strip()})"
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f"<div>{data[kind]}</div>"
    text = "".join(output.get("text", "")) or data["text/plain"]
    return f"````text\n{text.rstrip()}\n````"
