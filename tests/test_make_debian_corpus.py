"""The corpus of Debian's documentation: what of a package becomes a document."""

import gzip
import re

import pytest
from script_modules import script_module

from train.pretraining.tokens import NAMES, open_texts

with script_module("data.make_debian_corpus") as script:
    pass

PAGE = """<html><head><title>No</title><style>p {}</style></head><body>
<nav>menu<ul><li>one</ul></nav><div class="related"><a href="x">back</a></div>
<h1>Title<a class="headerlink" href="#t">&#182;</a></h1>
<p>First &amp; second
line.<br>Third.</p><ul><li>one</li><li>two <b>bold</b></li></ul>
<pre>if x:
    y()
</pre><table><tr><td>a</td><td>b</td></tr></table><script>no()</script></body></html>"""


def test_text_of_a_page():
    assert script.plain_text(PAGE) == (
        "Title\n\nFirst & second line.\nThird.\n\n- one\n- two bold\n\nif x:\n    y()\n\n a b"
    )


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A package in place of Debian's: its files, as if they had been downloaded."""
    long = "words of a document " * 40
    package = script.Package("a-doc", "MIT", "usr/doc/**/*.*", r"index")
    monkeypatch.setattr(script, "PACKAGES", (package,))
    monkeypatch.setattr(script, "NAMES", ("a-doc",))
    monkeypatch.setattr(script.shutil, "which", lambda name: name)

    def unpack(name, folder):
        root = folder / "files" / "usr" / "doc" / "more"
        root.mkdir(parents=True)
        (root / "a.html").write_text(f"<p>{long}</p>")
        (root / "b.txt.gz").write_bytes(gzip.compress(f"{long}\n\n".encode()))
        (root / "c.rst").write_text(f"third: {long}")
        (root / "index.rst").write_text(long * 2)
        (root / "short.rst").write_text("too short")
        return "1.2-3"

    monkeypatch.setattr(script, "_unpack", unpack)
    return long


def test_documents_of_a_package(unpacked, tmp_path, capsys):
    assert script.main([f"--output={tmp_path / 'text'}"]) == 0
    assert "a-doc 1.2-3 (MIT): 2 documents" in capsys.readouterr().out
    texts = list(open_texts(str(tmp_path / "text"), None, "train", "text", NAMES))
    # The second is the first again.
    assert [notes["source"] for _, notes in texts] == [
        "Debian a-doc 1.2-3, more/a.html",
        "Debian a-doc 1.2-3, more/c.rst",
    ]
    assert {notes["licence"] for _, notes in texts} == {"MIT"}
    assert texts[0][0] == unpacked.strip() + "\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m.setattr(script.shutil, "which", lambda name: None),
            "apt-get is missing",
        ),
        (
            lambda m: m.setattr(script, "_SHORTEST", 10**6),
            "packages=a-doc: has no file usr/",
        ),
    ],
)
def test_no_corpus(unpacked, tmp_path, monkeypatch, capsys, change, said):
    change(monkeypatch)
    assert script.main([f"--output={tmp_path / 'text'}"]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "text").exists()


def test_a_package_that_is_unknown(tmp_path, capsys):
    assert script.main([f"--output={tmp_path / 'text'}", "--packages=perl-doc,nosuch"]) == 2
    assert "packages='nosuch' is unknown" in capsys.readouterr().err
