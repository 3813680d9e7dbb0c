"""
Hooks of the site, which MkDocs runs: the site consists of the same files that one reads in the repository.

Pages lead to files outside `docs/`, too. Reports and pictures become part of the site. Links to other files, such as
code, lead to the repository, if its address is known (`REPOSITORY_URL`, or `url` in setup.cfg); else the words stay
without a link. Pages under `reference/` are made from the code by `reference_pages.py`.
"""

import configparser
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import reference_pages  # noqa: E402


RENAMED = {"README.md": "index.md", "docs/README.md": "pages.md"}
"""Files of the repository whose place on the site is not their own, or their own within `docs/`."""

EXPLAINED = {
    "modeling_lsgpt/configuration_lsgpt.py": "reference/configuration.md",
    "training/arguments.py": "reference/command-line.md",
    "model_cards": "reference/recipes.md",
    "configuration/recipes": "reference/recipes.md",
    "configuration/arms.yaml": "reference/recipes.md",
}
"""What has a page of its own on the site."""

PAGES = ("README.md", "docs/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
"""Pages of the site that are not in `docs/`, or are there under another name."""

SHOWN = (".md", ".png", ".svg", ".json", ".html")
"""Kinds of files that the site shows itself."""

LINK = re.compile(r"(\]\(|\b(?:srcset|src|href)=\")([^()\s\"]+)(?=[)\"])")
"""A link or an image, up to where it leads."""

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    return RENAMED.get(path, path.removeprefix("docs/"))


def links(text: str, path: str) -> Iterator[str]:
    """The files of the repository to which a page leads; `path` is the page's own."""
    for _, link in LINK.findall(CODE.sub("", text)):
        if target := resolve(link, path):
            yield target[0]


def resolve(link: str, path: str) -> tuple[str, str] | None:
    """The file of the repository to which a link on the page `path` leads, and the anchor; `None` for other links."""
    target, _, anchor = link.partition("#")
    if not target or re.match("[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target)), anchor


def repository_url() -> str:
    """The address of the repository, without a slash at the end; empty if it is not known."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return (os.environ.get("REPOSITORY_URL") or setup["metadata"].get("url", "")).rstrip("/")


def rewrite(text: str, path: str, known: set[str], url: str) -> str:
    """
    Rewrites the links of a page.

    Args:
        text: The page, in Markdown.
        path: Its path in the repository.
        known: The paths of all files of the site.
        url: The address of the repository, or nothing.
    """
    here = posixpath.dirname(place(path))

    def lead(match: re.Match) -> str:
        found = resolve(match[2], path)
        if found is None:
            return match[0]
        target, anchor = found
        on_site = EXPLAINED.get(target, place(target))
        if on_site in known:
            return match[1] + posixpath.relpath(on_site, here or ".") + (f"#{anchor}" if anchor else "")
        if not (ROOT / target).exists():
            return match[0]  # MkDocs says that it is broken
        if url:
            return f"{match[1]}{url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"
        return f"{match[1]}off-site:{target}"

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(lead, part) for part in parts[::2]]
    # Without an address, the words stay. They may be code, so that they are only found in the whole text.
    return re.sub(r"(?<!!)\[([^][]*)\]\(off-site:[^()\s]+\)", r"\1", "".join(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is not in `docs/`: pages of the repository, what they lead to, and the generated reference."""
    waiting = [path for path in PAGES if (ROOT / path).is_file()]
    waiting += [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_uri != "README.md"]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.endswith(SHOWN) or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += links((ROOT / path).read_text(encoding="utf-8"), path)
    for name, text in reference_pages.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    config.extra["places"] = {place(path): path for path in seen}
    config.repo_url = repository_url() or None
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page; generated pages have none that need it."""
    path = config.extra["places"].get(page.file.src_uri)
    if path is None:
        return text
    return rewrite(text, path, {file.src_uri for file in files}, repository_url())
