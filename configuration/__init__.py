"""Named configurations to start from: model presets (JSON) and training recipes (YAML)."""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path

import yaml
from huggingface_hub.errors import StrictDataclassError

from lsgpt.modeling_lsgpt import LSGPTConfig


_FOLDER = Path(__file__).parent


def list_presets() -> list[str]:
    """Names of the model presets."""
    return sorted(file.stem for file in (_FOLDER / "presets").glob("*.json"))


def load_preset(name: str, **overrides) -> LSGPTConfig:
    """
    The configuration of a model preset.

    Args:
        name: One of `list_presets()`.
        **overrides: Fields of `LSGPTConfig` that replace the preset's.

    Raises:
        ValueError: An unknown preset or field, with the nearest known name; or values that no model can have.
    """
    if name not in list_presets():
        raise ValueError(
            f"`preset` must be one of {', '.join(list_presets())}; got {name!r}{suggest(name, list_presets())}"
        )
    fields = LSGPTConfig.__dataclass_fields__
    for field in overrides:
        if field not in fields:
            raise ValueError(f"LSGPTConfig has no field {field!r}{suggest(field, fields)}")
    preset = json.loads((_FOLDER / "presets" / f"{name}.json").read_text(encoding="utf-8"))
    try:
        return LSGPTConfig(**{**preset, **overrides})
    except StrictDataclassError as error:  # a value of the wrong type, and no ValueError
        raise ValueError(str(error.__cause__ or error)) from error


def list_recipes() -> list[str]:
    """Names of the training recipes."""
    return sorted(file.stem for file in (_FOLDER / "recipes").glob("*.yaml"))


def load_recipe(name_or_path: str | Path) -> dict:
    """
    The fields of a training recipe.

    Args:
        name_or_path: One of `list_recipes()`, or the path of a YAML file.

    Raises:
        ValueError: No such recipe or file, or a file that is not a mapping from field names to values.
    """
    file = _FOLDER / "recipes" / f"{name_or_path}.yaml"
    if name_or_path not in list_recipes():
        file = Path(name_or_path)
        if not file.is_file():
            raise ValueError(
                f"recipe must be one of {', '.join(list_recipes())} or a YAML file; got {str(name_or_path)!r}"
                f"{suggest(str(name_or_path), list_recipes())}"
            )
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {file} must be a mapping from field names to values; got {type(recipe).__name__}")
    return recipe


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


__all__ = ["LSGPTConfig", "list_presets", "list_recipes", "load_preset", "load_recipe", "suggest"]
