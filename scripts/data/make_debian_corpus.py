"""Make a corpus of English technical prose and code, of Debian's documentation packages.

    python scripts/data/make_debian_corpus.py --output=DIR [--packages=perl-doc,git-doc]
    python -m train.corpus --config.dataset=DIR --config.workdir=W

Downloads documentation packages of Debian 12 with apt-get, without installing them, and writes
their texts as a TFDS dataset, each with its file and its licence: reStructuredText, POD and
AsciiDoc as they are written, HTML without its tags. The same versions of the packages give the same
dataset. Needs apt-get and dpkg-deb. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from specjax.cli import command
from specjax.cli.flags import Listed, Parser
from specjax.errors import InputError, one_line
from specjax.fields import Choice, OutputFolder, optional
from specjax.files import folders
from train.pretraining.documents import Document, write_documents

_SHORTEST = 500
"""Characters of a document; below that it is a list of links."""


@dataclass(frozen=True)
class Package:
    """A Debian package, which of its files are documents, and the licence that its copyright names.

    `left_out` is a pattern of files that are not taken: tables, generated lists, translations.
    """

    name: str
    licence: str
    files: str
    left_out: str = r"^$"


_INDEX = r"(genindex|bookindex|search|py-modindex|changelog)[^/]*$"
PACKAGES = (
    Package("python3.11-doc", "PSF-2.0", "usr/share/doc/python3.11/html/_sources/**/*.txt", _INDEX),
    Package(
        "perl-doc", "GPL-1.0+ or Artistic", "usr/share/perl/*/pod/*.pod", r"perl5\d+delta|perltoc"
    ),
    Package("git-doc", "GPL-2.0", "usr/share/doc/git*/**/*.txt", r"RelNotes/"),
    Package(
        "linux-doc-6.1",
        "GPL-2.0",
        "usr/share/doc/linux-doc-6.1/html/_sources/**/*.txt",
        r"translations/",
    ),
    Package("python-sqlalchemy-doc", "MIT", "usr/share/doc/**/*.rst", _INDEX),
    Package("developers-reference", "GPL-2.0+", "usr/share/developers-reference/_sources/*.txt"),
    Package("debian-policy", "GPL-2.0+", "usr/share/doc/debian-policy/policy.html/_sources/*.txt"),
    Package(
        "debian-handbook",
        "GPL-2.0+ or CC-BY-SA-3.0",
        "usr/share/doc/debian-handbook/html/en-US/*.html",
    ),
    Package("gimp-help-en", "GFDL-1.2+", "usr/share/gimp/2.0/help/en/*.html", _INDEX),
    Package(
        "postgresql-doc-15", "PostgreSQL", "usr/share/doc/postgresql-doc-15/html/*.html", _INDEX
    ),
    Package("python-django-doc", "BSD-3-Clause", "usr/share/doc/**/html/**/*.html", _INDEX),
)
NAMES = tuple(one.name for one in PACKAGES)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _make(**parser().read(arguments))
        return 0

    return command.run(
        act, argv, parser().format_help(), interrupted="interrupted; nothing is written"
    )


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/data/make_debian_corpus.py", __doc__)
    flags.add_field("output", OutputFolder(), "the dataset")
    which = optional(Listed(Choice(NAMES)))
    flags.add_field("packages", which, "with commas; else all", default=None)
    return flags


def _make(output: Path, packages: tuple[str, ...] | None) -> None:
    folders.check_replaceable(output, "corpus", f"output={str(output)!r}")
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise InputError(f"{program} is missing; run this on Debian")
    chosen = [one for one in PACKAGES if one.name in (packages or NAMES)]
    count = write_documents(output, _documents(chosen))
    print(f"{count} documents: {output}")


def _documents(packages: Sequence[Package]) -> Iterator[Document]:
    """The documents of all packages, without those that an earlier one has too."""
    seen: set[bytes] = set()
    for package in packages:
        count = size = 0
        with tempfile.TemporaryDirectory() as folder:
            version = _unpack(package.name, Path(folder))
            for name, text in texts(package, Path(folder) / "files"):
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                count, size = count + 1, size + len(text)
                yield Document(text, f"Debian {package.name} {version}, {name}", package.licence)
        if not count:
            raise InputError(f"packages={package.name}: has no file {package.files}; leave it out")
        print(
            f"{package.name} {version} ({package.licence}): {count} documents, {size / 1e6:.1f} MB"
        )


def _unpack(name: str, folder: Path) -> str:
    """Unpack a package into `folder`/files; returns its version."""
    try:
        subprocess.run(["apt-get", "download", name], cwd=folder, check=True, capture_output=True)
        (file,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", file, folder / "files"], check=True, capture_output=True)
        shown = subprocess.run(["dpkg-deb", "-f", file, "Version"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        reason = one_line(error.stderr.decode(errors="replace"))[:160]
        raise InputError(
            f"packages={name}: cannot be had ({reason}); run apt-get update, or leave it out"
        ) from None
    return shown.stdout.decode().strip()


def texts(package: Package, root: Path) -> Iterator[tuple[str, str]]:
    """The texts of an unpacked package, each with its file's name, in the order of the names."""
    begin = re.match(r"[^*]*/", package.files)
    top = root / begin[0] if begin else root
    for path in sorted(root.glob(package.files)):
        name = path.relative_to(top).as_posix()
        if not path.is_file() or path.is_symlink() or re.search(package.left_out, name):
            continue
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        text = content.decode("utf-8", errors="replace")
        text = plain_text(text) if path.suffix == ".html" else text
        if len(text) >= _SHORTEST:
            yield name, text.strip() + "\n"


def plain_text(html: str) -> str:
    """The text of an HTML page's body, without what leads elsewhere; code keeps its lines."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (line.rstrip() for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Reader(HTMLParser):
    """Collects text; blocks begin on a new line, paragraphs after an empty one."""

    _SKIPPED = frozenset(("head", "script", "style", "nav", "footer", "svg", "button"))
    _SKIPPED_CLASSES = frozenset(
        (
            "navheader",
            "navfooter",
            "docnav",
            "sphinxsidebar",
            "related",
            "footer",
            "toc",
            "headerlink",
        )
    )
    _PARAGRAPHS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "pre", "table", "dl", "ul", "ol"))
    _LINES = frozenset(("div", "li", "dt", "dd", "tr", "br", "section"))
    _EMPTY = frozenset(("br", "hr", "img", "input", "link", "meta", "col", "area", "wbr", "source"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipping: list[str] = []
        self._in_code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if self._skipping or tag in self._SKIPPED or classes & self._SKIPPED_CLASSES:
            if tag not in self._EMPTY:
                self._skipping.append(tag)
            return
        self._break(tag)
        self._in_code += tag == "pre"
        if tag in ("td", "th"):
            self.parts.append(" ")
        if tag == "li":
            self.parts.append("- ")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            # Tags inside may lack an end.
            if tag in self._skipping:
                while self._skipping.pop() != tag:
                    pass
            return
        self._in_code = max(0, self._in_code - (tag == "pre"))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._skipping:
            return
        if not self._in_code:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1].endswith(("\n", " ")):
                data = data.lstrip()
        self.parts.append(data)

    def _break(self, tag: str) -> None:
        if tag in self._PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in self._LINES and self.parts and not self.parts[-1].endswith("\n"):
            self.parts.append("\n")


if __name__ == "__main__":
    raise SystemExit(main())
