"""Publishes a checkpoint on the Hub: checks everything first, then uploads it in one commit."""

import io
import json
import re
import shutil
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lsgpt.configuration import load_config, load_recipe
from lsgpt.training.folders import free_folder
from lsgpt.utilities import fits_vocabulary, load_complete, load_tokenizer, refuse_not_finite

from .card import HEADS_PICTURE, PLOTS, draw_heads, lineage, make_card


_OPTIONAL_FILES = ("generation_config.json", "recipe.yaml", "metrics.jsonl", "results.json", "LICENSE")

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

_TEMPLATES = "additional_chat_templates"
"""The folder in which Transformers saves the chat templates of a tokenizer that has several."""


def publish(
    folder: str | Path,
    repo_id: str,
    private: bool = False,
    dry_run: bool = False,
    license: str | None = None,
    output: str | Path | None = None,
) -> str:
    """
    Publishes a checkpoint in a new repository on the Hub: weights, configuration, tokenizer, code, a model card, and
    the files of the run (plots, recipe, metrics), in one commit. Everything is checked before anything is created, and
    if the upload fails, the new repository is deleted again.

    Args:
        folder: The checkpoint, such as the output folder of `lsgpt train`. It is not changed.
        repo_id: The name on the Hub, `USER/NAME` or `ORGANIZATION/NAME`.
        private: Whether to make the repository private.
        dry_run: Whether to write what would be uploaded into `output` instead, without using the network.
        license: The weights' license; see `make_card`.
        output: A new or empty folder; by default `FOLDER-card`, or `FOLDER-card-2`, ... if that is taken.

    Returns:
        The address of the repository, or the output folder of a dry run.

    Raises:
        ValueError: If the folder is not a complete checkpoint, there is no license or no token, the name is taken or
            does not belong to the token's user, the output folder of a dry run is not empty, or the Hub refuses the
            upload.
    """
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"`repo_id` must be USER/NAME; got {repo_id!r}")
    if output is not None and not dry_run:
        raise ValueError("`output` can only be set with `dry_run`, because an upload writes no folder")
    files = collect_files(folder, repo_id, license)
    if dry_run:
        return str(_write(files, output, Path(folder)))
    _check_access(repo_id)
    return _upload(files, repo_id, private)


def collect_files(folder: str | Path, repo_id: str, license: str | None) -> dict[str, Path | bytes]:
    """
    Returns what is uploaded: for each file name, the path of the file, or its content if it is generated here.

    The checkpoint is loaded as a user would load it, and the card is read back. Raises `ValueError` as `publish` does.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} must be a checkpoint; it has no config.json")
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, local_files_only=True)
    if not fits_vocabulary(tokenizer, config.vocab_size):
        raise ValueError(
            f"the tokenizer in {str(folder)!r} must be the model's: it has {len(tokenizer):,} tokens, and the model's "
            f"`vocab_size` is {config.vocab_size:,}"
        )
    required = ["config.json", *_weight_files(folder), *_code_files(folder, config.auto_map)]
    optional = [*_OPTIONAL_FILES, *_TOKENIZER_FILES, *tokenizer.vocab_files_names.values()]
    optional += [f"{_TEMPLATES}/{file.name}" for file in sorted((folder / _TEMPLATES).glob("*.jinja"))]
    optional += [file for plots in PLOTS.values() for file in plots.values()]
    missing = [name for name in required if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{str(folder)!r} must be a complete checkpoint; it lacks {', '.join(missing)}")
    _check_secrets(folder / "recipe.yaml")
    card = str(make_card(folder, repo_id, license))
    _check_loading(folder)
    picture = io.BytesIO()
    draw_heads(config, picture)
    files = {name: folder / name for name in (*required, *optional) if (folder / name).is_file()}
    files |= {"README.md": card.encode(), HEADS_PICTURE: picture.getvalue()}
    # A run's folder does not have the license file of the checkpoint that it started from.
    link = ModelCard(card).data.get("license_link")
    if link and Path(link).name == link and link not in files:
        files.update((link, place / link) for place in reversed(lineage(folder)) if (place / link).is_file())
    _check_card(card, files)
    return files


def _weight_files(folder: Path) -> list[str]:
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise ValueError(
            f"{str(folder)!r} must be a checkpoint; it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
        )
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r}") from error
    return [SAFE_WEIGHTS_INDEX_NAME, *sorted(shards)]


def _code_files(folder: Path, auto_map: dict[str, str]) -> list[str]:
    modules = {f"{reference.split('.')[0]}.py" for reference in auto_map.values()}
    try:
        imported = {Path(file).name for module in modules for file in get_relative_import_files(folder / module)}
    except FileNotFoundError as error:
        raise ValueError(
            f"{str(folder)!r} must hold the model's code; it lacks {Path(error.filename).name}, which "
            "`save_pretrained` of a loaded model writes"
        ) from error
    return sorted(modules | imported)


def _check_loading(folder: Path):
    try:
        model = load_complete(folder, may_have_more=False, local_files_only=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the weights in {str(folder)!r} cannot be loaded: {error}") from error
    refuse_not_finite(model.named_parameters(), f"the weights in {str(folder)!r}")


def _check_secrets(recipe: Path):
    if recipe.is_file() and load_recipe(recipe).get("hub_token"):
        raise ValueError(f"{recipe} must not hold `hub_token`, which everyone could read; remove the line")


def _check_card(text: str, files: dict[str, Path | bytes]):
    """Checks what the Hub would check about the card, as far as possible offline."""
    card = ModelCard(text)
    if str(card) != text:
        raise ValueError("the model card changes when it is read back, so its metadata must be wrong")
    prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)  # without code
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose):
        if link not in files:
            raise ValueError(f"the model card links to {link}, which is not among the files")


def _write(files: dict[str, Path | bytes], output: str | Path | None, folder: Path) -> Path:
    if output is None:
        folder = folder.resolve()
        output = free_folder(folder.with_name(f"{folder.name}-card"))
    output = Path(output)
    if free_folder(output) != output:
        raise ValueError(f"`output` must be a new or an empty folder; got {str(output)!r}")
    output.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        (output / name).parent.mkdir(exist_ok=True)
        if isinstance(source, Path):
            shutil.copy(source, output / name)
        else:
            (output / name).write_bytes(source)
    return output


def _check_access(repo_id: str):
    api = HfApi()
    try:
        user = api.whoami()
        if api.repo_exists(repo_id):
            raise ValueError(
                f"`repo_id` must be a new name; {repo_id!r} is taken. To upload a new version of your own model: "
                f"`lsgpt publish ... --dry-run`, then `hf upload {repo_id} FOLDER`"
            )
    except LocalTokenNotFoundError as error:
        raise ValueError(
            "there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN; "
            "create a token at https://huggingface.co/settings/tokens"
        ) from error
    except (OSError, HTTPError) as error:
        raise ValueError(f"cannot ask the Hub about {repo_id!r}: {error}") from error
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
    if repo_id.partition("/")[0] not in owners:
        raise ValueError(
            f"`repo_id` must begin with your name or that of your organization ({', '.join(owners)}); got {repo_id!r}"
        )
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError("the token for the Hub must have write access; it has read access only")


def _upload(files: dict[str, Path | bytes], repo_id: str, private: bool) -> str:
    api = HfApi()
    try:
        ModelCard(bytes(files["README.md"]).decode()).validate()
        url = api.create_repo(repo_id, private=private, exist_ok=False)
    except (OSError, HTTPError) as error:
        raise ValueError(f"the Hub refused {repo_id!r}, and nothing was created: {error}") from error
    try:
        operations = [CommitOperationAdd(name, source) for name, source in files.items()]
        api.create_commit(repo_id, operations, commit_message="Model, tokenizer, code and card")
    except BaseException as error:  # also an interruption by the user
        remains = _delete(api, repo_id)
        if isinstance(error, (OSError, HTTPError, ValueError)):
            raise ValueError(f"the upload to {repo_id!r} failed, {remains}: {error}") from error
        raise
    return str(url)


def _delete(api: HfApi, repo_id: str) -> str:
    try:
        api.delete_repo(repo_id)
    except (OSError, HTTPError) as error:
        return f"and its new, empty repository could not be deleted ({error}): delete it before you try again"
    return "and its new repository was deleted again"
