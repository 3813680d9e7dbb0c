"""
The front page stays short, the pages under docs/ hang together, and their code runs as printed.

The pages whose code takes more than a moment have tests of their own: `test_other_decoders.py`,
`test_other_libraries.py`, `training/test_fine_tuning.py`.
"""

import re
import shlex
from pathlib import Path

import pytest

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import load_documents, train_tokenizer


ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page, language):
    """The code blocks of a page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def links(text):
    """Where the links and images of a page lead."""
    return re.findall(r"\]\(([^()\s]+)\)", without_code(text))


def anchors(text):
    """What GitHub makes of the headings of a page: `## The paper's code` is `#the-papers-code`."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = anchors(target.read_text(encoding="utf-8")) if target.suffix == ".md" and target.is_file() else ()
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    return broken


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `runs/demo`, with a small untrained model in place of the demo's."""
    folder = tmp_path_factory.mktemp("readme")
    tokenizer = train_tokenizer(load_documents("stdlib")["validation"]["text"][:50], vocab_size=400)
    config = LSGPTConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
    LSGPTForCausalLM(config).save_pretrained(folder / "runs" / "demo")
    tokenizer.save_pretrained(folder / "runs" / "demo")
    paragraphs = [f"Paragraph {i} of the notes: {i * i} is the square of {i}." for i in range(20)]
    (folder / "notes.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


def test_front_page_is_short():
    readme = read("README.md")
    assert len(readme.split()) <= 1100
    assert len(readme.splitlines()) <= 170


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A title: `x`, and more\n```bash\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#a-title-x-and-more) [b](#here) [c](https://example.org/#x) `[d](code.md)`\n"
        "[two\nlines](gone.md) ![e](gone.png) [f](other.md#no-title) [g](#there)\n"
    )
    assert broken_links(page) == ["gone.md", "gone.png", "other.md#no-title", "#there"]


def test_index_lists_every_page():
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in links(read(index))}
    assert {page.name for page in DOCS if page != index} <= listed


def test_front_page_code_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    """It needs nothing but the installed package: the folder is empty."""
    monkeypatch.chdir(tmp_path)
    (code,), (output,) = blocks("README.md", "python"), blocks("README.md", "text")
    exec(code, {})
    assert capsys.readouterr().out == output


@pytest.mark.parametrize(
    ("page", "numbers", "expected"),
    [("docs/training.md", (0, 1), "tensor([["), ("docs/publishing.md", (1,), "library_name: transformers")],
)
def test_code_in_docs(folder, page, numbers, expected, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for number in numbers:
        exec(blocks(page, "python")[number], {})
    assert expected in capsys.readouterr().out


def test_code_of_averaging_and_losses(folder, monkeypatch, capsys):
    """One block goes on with what another has made."""
    monkeypatch.chdir(folder)
    namespace = {"__name__": "__main__"}
    for code in blocks("docs/averaging-and-losses.md", "python"):
        exec(code, namespace)
    output = capsys.readouterr().out
    assert len(re.findall(r"^\d+ eval_loss [\d.]+ eval_averaged_loss [\d.]+$", output, re.MULTILINE)) == 3
    assert "\nParagraph" in output
    for name, average in namespace["averaging"].averages.items():
        assert average.equal(namespace["averaged"].get_parameter(name))
    assert (folder / "runs" / "notes" / "averaged-so-far" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("page", "command", "printed"),
    [
        ("docs/engines-and-caches.md", "lsgpt info gpt2-small --length 8192", r"at 8,192 tokens .*MHSA"),
        ("README.md", 'lsgpt generate runs/demo "def"', r"\Adef"),
        (
            "docs/publishing.md",
            "lsgpt publish runs/demo your-name/your-lsgpt --license apache-2.0 --dry-run",
            r"uploaded to your-name/your-lsgpt.*\n  README\.md +[\d,]+ bytes",
        ),
    ],
)
def test_commands(folder, page, command, printed, monkeypatch, capsys):
    assert command in read(page)
    monkeypatch.chdir(folder)
    assert lsgpt_cli.main(shlex.split(command)[1:]) == 0
    assert re.search(printed, capsys.readouterr().out, re.DOTALL)


def test_make_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {first or second for first, second in named} <= targets, page
