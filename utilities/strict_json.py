"""Numbers that are not finite, which JSON itself cannot hold: written as strings, or as null."""

import json
import math
from collections.abc import Callable
from typing import Any


def to_json(value: Any, **options) -> str:
    """
    Writes a value as JSON. JSON has no NaN and infinities: they become the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which Python's `float` reads, too. `options` are those of `json.dumps`.
    """
    return json.dumps(_map(value, lambda x: x if _is_finite(x) else json.dumps(x)), **options)


def from_json(text: str | bytes) -> Any:
    """Reads what `to_json` writes."""
    return _map(json.loads(text), lambda x: float(x) if x in ("NaN", "Infinity", "-Infinity") else x)


def finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent (NaN and infinity) by `None`, also inside lists and dictionaries."""
    return _map(value, lambda x: x if _is_finite(x) else None)


def with_nan(value: Any) -> Any:
    """Replaces `None`, which stands for a number that is not finite, by NaN, also inside lists and dictionaries."""
    return _map(value, lambda x: math.nan if x is None else x)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Changes every value inside lists and dictionaries."""
    if isinstance(value, dict):
        return {name: _map(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return change(value)
