"""The walls between the folders: every import of ours is one that the table in CONTRIBUTING.md allows."""

import ast
import configparser
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
UNIX_ONLY = {
    "crypt",
    "fcntl",
    "grp",
    "nis",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
    "termios",
}
"""Modules of the standard library that Windows does not have, as their documentation says."""


def read_table():
    """The folders of CONTRIBUTING.md's table, from the bottom up, with what each may import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \|[^|]*\|(.*)\|$", text, re.MULTILINE)
    return {folder: set(re.findall("`([a-z_]+)`", imports)) for folder, imports in rows}


def read_folders():
    """The packages of setup.cfg by their folders."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    pairs = (line.split("=") for line in setup["options"]["package_dir"].split("\n") if line)
    return {folder.strip(): package.strip() for package, folder in pairs}


TABLE, FOLDERS = read_table(), read_folders()
MODULES = {
    ".".join([package, *([] if file.stem == "__init__" else [file.stem])]): file
    for folder, package in FOLDERS.items()
    for file in sorted((ROOT / folder).glob("*.py"))
} | {"lsgpt_cli": ROOT / "lsgpt_cli.py"}


def imports_of(name, file, late=True):
    """The full names of all that a module imports; `late`: inside functions, too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes, names = [tree], set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    while nodes:
        node = nodes.pop()
        if late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


def module_of(name):
    """Our module that an imported name is or is in; `None` for others' modules."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def folder_of(module):
    package = module if module in FOLDERS.values() else module.rpartition(".")[0]
    return next((folder for folder, name in FOLDERS.items() if name == package), module)


def test_the_table_has_every_folder_and_points_downwards():
    assert set(TABLE) == {*FOLDERS, "lsgpt_cli"}
    folders = list(TABLE)
    for number, folder in enumerate(folders):
        assert TABLE[folder] <= set(folders[:number]), f"`{folder}` may import only rows above its own"


@pytest.mark.parametrize("name", MODULES)
def test_imports_are_those_of_the_table(name):
    folder = folder_of(name)
    for imported in filter(None, map(module_of, imports_of(name, MODULES[name]))):
        assert folder_of(imported) in {folder, *TABLE[folder]}, f"{name} imports {imported}: see CONTRIBUTING.md"


def test_no_module_imports_itself_through_others():
    graph = {name: set(filter(None, map(module_of, imports_of(name, file)))) for name, file in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", [name for name in MODULES if folder_of(name) == "modeling_lsgpt"])
def test_files_of_checkpoints_import_only_what_every_user_has(name):
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "lsgpt"}
    for imported in imports_of(name, MODULES[name]):
        assert imported.partition(".")[0] in allowed
    source = MODULES[name].read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) lsgpt", source, re.MULTILINE), (
        "siblings are imported as `from .x import y`"
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_work_on_every_system(name):
    """Windows has none of these; a module that needs one imports it in the function that does."""
    imported = {module.partition(".")[0] for module in imports_of(name, MODULES[name], late=False)}
    assert not imported & UNIX_ONLY


def test_oracles_import_nothing_of_ours():
    assert not [name for name in imports_of("reference", ROOT / "tests" / "reference.py") if module_of(name)]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "lsgpt"])
def test_editors_find_every_folder_where_its_import_name_says(folder):
    assert FOLDERS[folder] == f"lsgpt.{folder}"
    assert (ROOT / "lsgpt" / folder).resolve() == ROOT / folder, f"ln -s ../{folder} lsgpt/{folder}"
