"""Formatting for readers: hints in error messages, numbers with units, tables."""

import difflib
from collections.abc import Iterable, Sequence


def suggest(name: str, known: Iterable[str]) -> str:
    """End of an error message about an unknown name: suggests the nearest known name, or is empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def with_unit(value: float, unit: str = "") -> str:
    """Formats a number with three digits and a decimal prefix: 1234567 -> 1.23 M."""
    prefixes = ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}{unit}".strip()


def format_duration(seconds: float) -> str:
    """Formats a duration: 45 s, 3.4 min, 2.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def table(rows: Iterable[Iterable], head: Sequence[str] = ("", "")) -> str:
    """A Markdown table from rows of cells, with column headings; by default two columns with empty headings."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
