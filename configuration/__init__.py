"""Named configurations to start from: model presets (JSON), training recipes, arms and launch files (YAML)."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from lsgpt.modeling_lsgpt import LSGPTConfig
from lsgpt.utilities import looks_like_a_path, suggest


_FOLDER = Path(__file__).parent


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as YAML 1.2 and JSON do. For YAML 1.1, which PyYAML reads, only 1.0e-5 is one."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """Reads YAML with numbers such as 1e-5. Raises `yaml.YAMLError` if the text is not YAML."""
    return yaml.load(text, _Loader)


def list_presets() -> list[str]:
    """Names of the model presets."""
    return sorted(file.stem for file in (_FOLDER / "presets").glob("*.json"))


def load_preset(name: str, **overrides) -> LSGPTConfig:
    """
    Loads the configuration of a model preset.

    Args:
        name: One of `list_presets()`.
        **overrides: Fields of `LSGPTConfig` that replace the preset's. `num_global_heads="all"` gives plain multi-head
            attention.

    Raises:
        ValueError: If the preset or a field is unknown (the message suggests the nearest name), or values are invalid.
    """
    if name not in list_presets():
        raise ValueError(
            f"`preset` must be one of {', '.join(list_presets())}; got {name!r}{suggest(name, list_presets())}"
        )
    return _build(json.loads((_FOLDER / "presets" / f"{name}.json").read_text(encoding="utf-8")), overrides)


def load_config(name_or_path: str | Path, **overrides) -> LSGPTConfig:
    """
    Loads the configuration of a checkpoint.

    Args:
        name_or_path: Its folder, or its name on the Hub.
        **overrides: As for `load_preset`.

    Raises:
        ValueError: If there is no such checkpoint, it is of another kind of model, or the overrides are invalid.
    """
    if looks_like_a_path(str(name_or_path)) and not Path(name_or_path).is_dir():
        raise ValueError(f"there is no folder {str(name_or_path)!r}")
    try:
        values, _ = LSGPTConfig.get_config_dict(name_or_path)
    except OSError as error:
        raise ValueError(f"there is no checkpoint {str(name_or_path)!r}: {error}") from error
    if values.get("model_type") != LSGPTConfig.model_type:
        raise ValueError(
            f"{str(name_or_path)!r} must be an LSGPT checkpoint; its model type is {values.get('model_type')!r}"
        )
    return _build(values, overrides)


def _build(values: dict, overrides: dict) -> LSGPTConfig:
    fields = LSGPTConfig.__dataclass_fields__
    for field in overrides:
        if field not in fields:
            raise ValueError(f"LSGPTConfig has no field {field!r}{suggest(field, fields)}")
    values = {**values, **overrides}
    if values.get("num_global_heads") == "all":
        values["num_global_heads"] = values.get("num_attention_heads", LSGPTConfig.num_attention_heads)
    try:
        return LSGPTConfig.from_dict(values)
    except StrictDataclassError as error:  # for a value of the wrong type; not a `ValueError`
        reason = str(error.__cause__ or error)
        wrong = re.fullmatch(r"Field '(\w+)' expected (.+), got \w+ \(value: (.*)\)", reason, re.DOTALL)
        raise ValueError("`{}` must be of type {}; got {}".format(*wrong.groups()) if wrong else reason) from error


def list_recipes() -> list[str]:
    """Names of the training recipes."""
    return sorted(file.stem for file in (_FOLDER / "recipes").glob("*.yaml"))


def load_recipe(name_or_path: str | Path) -> dict:
    """
    Loads the fields of a training recipe.

    Args:
        name_or_path: One of `list_recipes()`, or the path of a YAML file.

    Raises:
        ValueError: If there is no such recipe or file, or the file is not a mapping from field names to values.
    """
    file, known = _FOLDER / "recipes" / f"{name_or_path}.yaml", ", ".join(list_recipes())
    if name_or_path not in list_recipes():
        file = Path(name_or_path)
        if not file.is_file():
            if file.suffix in (".yaml", ".yml"):
                raise ValueError(f"there is no file {str(file)!r}; a recipe is a YAML file, or one of {known}")
            raise ValueError(
                f"recipe must be one of {known} or a YAML file; got {str(name_or_path)!r}"
                f"{suggest(str(name_or_path), list_recipes())}"
            )
    return _read_yaml_mapping(file, "recipe")


def load_arms(file: str | Path | None = None) -> dict[str, dict]:
    """
    Loads the arms of comparisons: for each arm's name, the recipe fields that it replaces.

    Args:
        file: A YAML file with more arms, which may also replace those of this package.

    Raises:
        ValueError: If there is no such file, or it is not a mapping from names, which are text, to mappings.
    """
    arms = _read_yaml_mapping(_FOLDER / "arms.yaml", "arms")
    if file is not None:
        arms |= _read_yaml_mapping(Path(file), "arms")
    for name, fields in arms.items():
        if not isinstance(name, str):
            raise ValueError(f"the name of an arm must be text; got {name!r}. In YAML, put such a name in quotes")
        if not isinstance(fields, dict):
            raise ValueError(f"arm {name!r} must be a mapping from field names to values; got {fields!r}")
    return arms


def _read_yaml_mapping(file: Path, kind: str) -> dict:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{kind} {file} cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{kind} {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{kind} {file} must be a mapping from names to values; got {type(content).__name__}")
    return content


__all__ = [
    "LSGPTConfig",
    "list_presets",
    "list_recipes",
    "load_arms",
    "load_config",
    "load_preset",
    "load_recipe",
]
