"""The `lsgpt` command. It is outside the package and imports late, so that its help does not wait for torch."""

# ruff: noqa: PLC0415

import argparse
import contextlib
import difflib
import importlib.metadata
import logging
import os
import shlex
import sys
from pathlib import Path


COMMANDS = ("train", "generate", "convert", "info", "inspect", "compare", "study", "bench", "publish")
"""The names of the commands."""

ARMS = ("ls", "mhsa", "local-only", "ls-sinks", "ls-rope", "mhsa-rope", "mhsa-qknorm")
"""The arms that the help of `compare` names: it must not wait for what reads them."""

FIRST_STEPS = """\
first steps, which need no network:
  lsgpt train                      train a small model on Python's source code (three minutes on two cores)
  lsgpt generate runs/demo "def"   let it continue a text
  lsgpt info gpt2-small            show what a shape costs, compared with all heads global

lsgpt COMMAND --help describes a command.
"""

TEMPERATURE, TOP_K = 0.8, 50
"""Defaults of sampling in `lsgpt generate`."""


def main(argv: list[str] | None = None) -> int:
    """
    Runs a sub-command and returns the exit status: 0, 2 for user errors, or 130 if it was interrupted. Without one,
    prints the help.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        _make_parser().print_help()
        return 0
    # If torchao is installed, Transformers imports it for every model. It then warns about its libraries for other
    # hardware, and PyTorch warns about how it registers types; our users can do nothing about either.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if argv[0] == "train":
        # Its options are the fields of the training arguments, which have their own parser.
        try:
            return _train(argv[1:])
        except KeyboardInterrupt:  # while modules are imported
            return 130
    try:
        if argv[0] not in COMMANDS and not argv[0].startswith("-"):
            near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the command must be one of {', '.join(COMMANDS)}; got {argv[0]!r}{hint}")
        with_own_parser = {"compare": _compare, "bench": _bench, "study": _study}
        if argv[0] in with_own_parser:
            return with_own_parser[argv[0]](argv[1:])
        args = _make_parser().parse_args(argv)
        return args.run(args)
    except (ValueError, OSError, ImportError) as error:  # ImportError: an option needs a package that is missing
        return _fail(error)
    except KeyboardInterrupt:
        hint = ". Run the same command again to continue" if argv[0] in ("compare", "study") else ""
        print(f"\nInterrupted{hint}", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lsgpt",
        description="LSGPT: a GPT with Long Short-attention (arXiv:2505.15548) for Transformers.",
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lsgpt {importlib.metadata.version('lsgpt')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    commands.add_parser(
        "train",
        help="train a model from a recipe, or a small demo model without arguments: "
        "lsgpt train [RECIPE] [--field value ...]",
    )

    commands.add_parser(
        "compare",
        help="train variants of a recipe with several seeds and compare them: "
        "lsgpt compare [RECIPE] --arms A,B,... [--seeds N] [--field value ...]",
    )

    commands.add_parser(
        "study",
        help="check a claim of the paper by experiment; without a name, list the studies: "
        "lsgpt study [NAME] [--field value ...]",
    )

    commands.add_parser(
        "bench",
        help="time the model against GPT-2 or Llama of the same shape: lsgpt bench [NAME ...] [--quick]",
    )

    text = "continue a text with a trained model, and print it as it is generated"
    generate = commands.add_parser("generate", help=text, description=text.capitalize() + ".")
    generate.add_argument("model", metavar="FOLDER_OR_NAME", help="a folder with a checkpoint, or a model on the Hub")
    generate.add_argument("prompt", help="the text to continue")
    # Underscores work, too, because the field names of Transformers have them.
    generate.add_argument(
        "--max-new-tokens",
        "--max_new_tokens",
        type=_positive_int,
        default=100,
        help="number of tokens to generate; default: %(default)s",
    )
    generate.add_argument("--temperature", type=_positive_float, help=f"sampling temperature; default: {TEMPERATURE}")
    generate.add_argument(
        "--top-k",
        "--top_k",
        type=_positive_int,
        help=f"sample from the K most likely tokens; default: {TOP_K}",
    )
    generate.add_argument("--seed", type=int, help="random seed; makes the continuation repeatable")
    generate.add_argument("--greedy", action="store_true", help="always take the most likely token")
    generate.set_defaults(run=_generate)

    publish = commands.add_parser(
        "publish",
        help="put a trained model on the Hub, with a model card made from its run",
        description="Put a trained model on the Hub in one commit: weights, tokenizer, code, plots, recipe, metrics, "
        "and a model card made from its run. Everything is checked before a repository is created. FOLDER is not "
        "changed. If it has a README.md, the license in its metadata is used; the new card replaces it on the Hub.",
    )
    publish.add_argument("folder", metavar="FOLDER", help="a folder with a checkpoint, such as runs/demo")
    publish.add_argument("repo_id", metavar="USER/NAME", help="the model's name on the Hub; it must not exist yet")
    publish.add_argument(
        "--license",
        metavar="ID",
        help="license of the weights as the Hub names it, such as apache-2.0; default: the one in FOLDER's "
        "README.md or recipe.yaml, or that of the checkpoint the run started from",
    )
    publish.add_argument("--private", action="store_true", help="visible only to you or your organization")
    publish.add_argument(
        "--dry-run", action="store_true", help="check everything, and write what would be uploaded into a folder"
    )
    publish.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the dry run; default: FOLDER-card next to FOLDER, or FOLDER-card-2, ...",
    )
    publish.set_defaults(run=_publish)

    convert = commands.add_parser(
        "convert",
        help="convert a Llama, Mistral, Qwen, OLMo, Gemma, Phi-3, GPT-2, nanoGPT or paper checkpoint to LSGPT",
        description="Convert another model's checkpoint to an LSGPT checkpoint with the same logits: Llama, Mistral, "
        "Qwen2, Qwen3, OLMo-2, OLMo-3, Gemma 2, Gemma 3, Phi-3, GPT-2, nanoGPT, or the paper's code. Tokenizer, chat "
        "template and generation configuration are carried over. Heads of a pretrained model can be made local: those "
        "that your text needs least.",
        allow_abbrev=False,
    )
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="the folder or the Hub name of a pretrained model, a GGUF file, or a file of nanoGPT or the paper's code",
    )
    convert.add_argument("folder", metavar="FOLDER", help="a new or empty folder to write the checkpoint into")
    convert.add_argument(
        "--global-kv-heads",
        metavar="N",
        type=_count_or_share,
        help="key/value heads in the whole model that stay global: their number, or a fraction such as 0.2",
    )
    convert.add_argument(
        "--window",
        metavar="W",
        type=_positive_int,
        help="number of tokens that the local heads see, including the current one",
    )
    convert.add_argument(
        "--cache-share",
        metavar="SHARE",
        type=float,
        help="instead of --global-kv-heads and --window: size of the key/value cache at 8,192 tokens as a fraction of "
        "the source's; default with --calibrate: 0.2",
    )
    convert.add_argument(
        "--calibrate",
        metavar="TEXT",
        help="text to choose the heads on, which the other options about heads need: a file or a folder of .txt, "
        ".jsonl, .json or .parquet files, stdlib, or a dataset on the Hub",
    )
    convert.add_argument(
        "--balance",
        choices=("overall", "layer"),
        help="overall: keep the N most needed heads global, wherever they are; layer: keep the same number in "
        "each layer, the most needed ones there; default: overall",
    )
    convert.add_argument(
        "--max-blocks",
        metavar="N",
        type=_positive_int,
        help="maximum number of blocks of text (about 2,048 tokens, more for wide windows) to measure heads on, "
        "and again to evaluate on; default: 4",
    )
    convert.set_defaults(run=_convert)

    text = "show what the heads of a model attend to in a text"
    inspect = commands.add_parser(
        "inspect",
        help=text,
        description=f"{text.capitalize()}. The model is an LSGPT or any other decoder, such as a Llama or a GPT-2. "
        "Writes report.md, plots, statistics.json, and attention.html, a page for the browser that works offline.",
        allow_abbrev=False,
    )
    inspect.add_argument("model", metavar="MODEL", help="a folder with a checkpoint, or a model on the Hub")
    inspect.add_argument(
        "text",
        metavar="TEXT",
        help="a .txt file, whose beginning is used; or a folder, a file of another kind, stdlib, or a dataset on the "
        "Hub, whose held-out documents are used",
    )
    inspect.add_argument(
        "--output", metavar="FOLDER", help="folder to write into; default: runs/inspect-NAME, with the model's name"
    )
    inspect.add_argument(
        "--length",
        metavar="N",
        type=_positive_int,
        help="tokens in a block of text; default: 512, or the model's limit",
    )
    inspect.add_argument(
        "--blocks", metavar="N", type=_positive_int, default=8, help="maximum number of blocks; default: %(default)s"
    )
    inspect.add_argument(
        "--far",
        metavar="N",
        type=_positive_int,
        help="distance in tokens from which keys count as far; default: the window of LSGPT's local heads, or 128 if "
        "there are none; at most half a block",
    )
    inspect.set_defaults(run=_inspect)

    text = "show a model's shape and size, and its costs compared with the same model with all heads global"
    info = commands.add_parser("info", help=text, description=text.capitalize() + ".")
    info.add_argument("model", metavar="PRESET_OR_FOLDER", help="a preset's name, or a folder with a checkpoint")
    info.add_argument(
        "--length", type=_positive_int, help="number of tokens for the costs; default: max_position_embeddings"
    )
    info.add_argument(
        "--processes", type=_positive_int, default=1, help="number of processes that share each sequence in training"
    )
    info.set_defaults(run=_info)
    return parser


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more; got {text!r}")
    return int(text)


def _count_or_share(text: str) -> int | float:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(
            f"must be an integer of 1 or more, or a fraction between 0 and 1; got {text!r}"
        )
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value


def _fail(error: Exception) -> int:
    print(f"lsgpt: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _train(argv: list[str]) -> int:
    from lsgpt.configuration import list_recipes
    from lsgpt.training.arguments import make_parser, parse_arguments

    parser = make_parser(
        prog="lsgpt train",
        usage="lsgpt train [RECIPE] [--field value ...]",
        description="Train a model. RECIPE is a YAML file with values for the fields below, or the name of a shipped "
        f"one ({', '.join(list_recipes())}); fields on the command line override the recipe's. Default: demo.",
    )
    try:
        arguments = parse_arguments(*_split_recipe(argv), parser)
    except (ValueError, OSError, ImportError) as error:
        # All processes of a launcher on this machine have the same arguments, so only one of them prints the error.
        return _fail(error) if os.environ.get("LOCAL_RANK", "0") == "0" else 2
    folder = arguments.training.output_dir
    makes_folder, makes_parent = not os.path.exists(folder), not os.path.exists(os.path.dirname(folder) or ".")
    try:
        # Imported after parsing, because an error in the arguments should not wait for these imports.
        from lsgpt.model_cards import save_card
        from lsgpt.training.train import build_trainer, train

        trainer = build_trainer(arguments, save_card)
    except (ValueError, OSError, ImportError, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):  # what is not empty stays
            if makes_folder:
                os.rmdir(folder)
            if makes_parent:
                os.rmdir(os.path.dirname(folder))
        return 130 if isinstance(error, KeyboardInterrupt) else _fail(error)
    try:
        train(trainer, arguments)
    except (ValueError, ImportError) as error:  # ImportError: an option needs a package, such as an optimizer's
        return _fail(error)
    except KeyboardInterrupt:
        from lsgpt.training.folders import find_checkpoint

        with contextlib.suppress(ValueError):  # without a checkpoint
            find_checkpoint(folder)
            print(f"\nTo go on from the last checkpoint: lsgpt train --resume_from_checkpoint {shlex.quote(folder)}")
        return 130
    return 0


def _compare(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lsgpt compare",
        usage="lsgpt compare [RECIPE] --arms A,B,... [--arms-file FILE] [--seeds N] [--field value ...]",
        description="Train every arm (a named set of recipe fields) with every seed, and write one report. RECIPE and "
        "fields are those of lsgpt train. If started again with the same arguments, it continues where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arms",
        required=True,
        help=f"comma-separated names, such as {', '.join(ARMS)}; configuration/arms.yaml has more, and "
        "ARMS_FILE adds yours",
    )
    parser.add_argument("--seeds", type=_positive_int, default=3, help="number of seeds; default: %(default)s")
    parser.add_argument("--output-dir", "--output_dir", help="folder to write into; default: runs/compare-NAME")
    parser.add_argument("--arms-file", "--arms_file", help="a YAML file with more arms")
    parser.add_argument(
        "--processes", type=_positive_int, default=1, help="number of runs at a time; default: %(default)s"
    )
    recipe, argv = _split_recipe(argv)
    args, fields = parser.parse_known_args(argv)

    from lsgpt.studies.compare import compare

    arms = [arm.strip() for arm in args.arms.split(",") if arm.strip()]
    if not arms:
        raise ValueError(f"`--arms` must name at least one arm; got {args.arms!r}")
    compare(recipe, arms, args.seeds, args.output_dir, fields, args.arms_file, args.processes)
    return 0


def _study(argv: list[str]) -> int:
    from lsgpt.studies import STUDIES, load_study, read_lines, run_study, write_report

    if not argv or argv[0] in ("-h", "--help"):
        print("usage: lsgpt study NAME [--help] [--field value ...]\n")
        width = max(len(study.title) for study in STUDIES.values()) + 2
        for name, study in STUDIES.items():
            print(f"  {name:<22}{study.title:<{width}}{study.hours:g} h on two CPU cores")
        return 0
    study = load_study(argv[0])
    parser = argparse.ArgumentParser(
        prog=f"lsgpt study {study.name}",
        usage=f"lsgpt study {study.name} [--only ARM,...] [--field value ...]",
        description=study.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=_positive_int, help="number of seeds; default: the study's")
    parser.add_argument("--only", default="", help="comma-separated names of arms, or patterns such as 'ls-*'")
    parser.add_argument(
        "--output-dir", "--output_dir", metavar="FOLDER", help="folder to write into; default: runs/study-NAME"
    )
    parser.add_argument("--processes", type=_positive_int, help="number of runs at a time; default: one per core")
    parser.add_argument("--report", metavar="FOLDER", help="only write the report of the runs in FOLDER again")
    args, fields = parser.parse_known_args(argv[1:])
    if args.report:
        if fields or args.only or args.seeds or args.processes or args.output_dir:
            raise ValueError("`--report` must stand alone: it makes no runs, and writes into the folder that it names")
        if not read_lines(args.report):
            raise ValueError(f"`--report` must be a folder with the runs of a study (runs.jsonl); got {args.report!r}")
        print(write_report(study, args.report))
        return 0
    only = [name for name in args.only.split(",") if name]
    run_study(study, args.seeds, only, args.output_dir, args.processes, fields)
    return 0


def _bench(argv: list[str]) -> int:
    from lsgpt.benchmarks.suite import main

    main(argv)
    return 0


def _split_recipe(argv: list[str]) -> tuple[str | None, list[str]]:
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)


def _generate(args: argparse.Namespace) -> int:
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k") if getattr(args, name) is not None}
    if args.greedy and sampling:
        raise ValueError("`--greedy` must not be given together with `--temperature` or `--top-k`, which it ignores")
    _check_checkpoint(args.model)
    from transformers import TextStreamer, set_seed

    from lsgpt.utilities import encode_prompt

    tokenizer, model = _load(args.model)
    inputs = encode_prompt(tokenizer, args.prompt).to(model.device)
    prompt_length = inputs["input_ids"].shape[1]
    if prompt_length == 0:
        raise ValueError("`prompt` must have at least one token; got an empty text")
    _check_positions(model.config, prompt_length, args.max_new_tokens)
    if args.seed is not None:
        set_seed(args.seed)
    model.generate(
        **inputs,
        max_new_tokens=args.max_new_tokens,
        do_sample=not args.greedy,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **({} if args.greedy else {"temperature": TEMPERATURE, "top_k": TOP_K, **sampling}),
    )
    return 0


def _load(name: str, **options):
    """Loads the tokenizer and the model of a checkpoint; raises `ValueError` if its files lack weights."""
    from huggingface_hub.errors import StrictDataclassError

    import lsgpt  # noqa: F401 (registers LSGPT with the Auto classes)
    from lsgpt.utilities import load_complete, load_tokenizer

    place = repr(name) if os.path.isdir(name) else f"{name!r}, which is not a folder here, from the Hub"
    try:
        tokenizer = load_tokenizer(name)
        model = load_complete(name, device_map="auto", **options)
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ValueError(f"cannot load a model and its tokenizer from {place}: {reason}") from error
    return tokenizer, model


def _check_positions(config, prompt_length: int, max_new_tokens: int):
    """Raises `ValueError` past the end of learned positions; for other positions, prints that quality may suffer."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or prompt_length + max_new_tokens <= positions:
        return
    from lsgpt.utilities import has_learned_positions

    if has_learned_positions(config):
        raise ValueError(
            f"`--max-new-tokens` must be at most {max(positions - prompt_length, 0)}, because the model has "
            f"{positions} learned positions and the prompt takes {prompt_length}; got {max_new_tokens}"
        )
    print(f"lsgpt: note: the model was made for {positions} tokens; text beyond them may be worse", file=sys.stderr)
    # Transformers would say the same in the middle of the text.
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)


def _inspect(args: argparse.Namespace) -> int:
    _check_checkpoint(args.model)
    from lsgpt.inspection.report import FILES, format_kinds, inspect_heads

    tokenizer, model = _load(args.model, attn_implementation="eager")
    name = os.path.normpath(args.model)
    folder = args.output or os.path.join("runs", f"inspect-{os.path.basename(os.path.abspath(name))}")
    statistics = inspect_heads(model, tokenizer, args.text, folder, name, args.length, args.blocks, args.far)
    print(format_kinds(statistics))
    print("\nWritten:")
    for file in FILES:
        print(f"  {os.path.join(folder, file)}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from lsgpt.configuration import list_presets, load_config, load_preset
    from lsgpt.utilities import compare_costs, compare_split, describe, suggest

    if args.model in list_presets():
        config = load_preset(args.model)
    elif os.path.isdir(args.model):
        _check_checkpoint(args.model)
        config = load_config(args.model)
    else:
        raise ValueError(
            f"model must be a preset ({', '.join(list_presets())}) or a folder with a checkpoint; got {args.model!r}"
            f"{suggest(args.model, list_presets())}"
        )
    length = args.length or config.max_position_embeddings
    tables = {f"at {length:,} tokens": compare_costs(config, length)}
    if args.processes > 1:
        tables[f"split over {args.processes} processes"] = compare_split(config, length, args.processes)
    print(args.model)
    for name, value in describe(config).items():
        print(f"  {name:<34}{value}")
    for title, rows in tables.items():
        print(f"\n  {title:<34}{'LSGPT':>10}{'all global':>14}{'ratio':>9}")
        for name, (ours, theirs, ratio) in rows.items():
            print(f"  {name:<34}{ours:>10}{theirs:>14}{ratio:>9}")
    if config.position_embedding_type == "learned" and length > config.max_position_embeddings:
        print(f"\n  The model has only {config.max_position_embeddings:,} learned positions.")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from lsgpt.configuration import load_recipe
    from lsgpt.conversion import convert
    from lsgpt.conversion.calibration import format_quality
    from lsgpt.utilities import describe

    model, calibration = convert(
        args.source,
        args.folder,
        args.global_kv_heads,
        args.window,
        args.calibrate,
        args.balance,
        args.max_blocks,
        args.cache_share,
    )
    print(f"Converted {args.source} to {args.folder}")
    for name, value in describe(model.config).items():
        print(f"  {name:<34}{value}")
    if calibration is not None:
        kinds = next(iter(calibration.retrieval.values()), {})
        found = f", and the fraction of numbers found ({', '.join(kinds)})" if kinds else ""
        print(f"\nPerplexity on held-out text{found}:")
        for name, *values in format_quality(calibration):
            print(f"  {name:<40}{'  '.join(values)}")
        print(f"\nNext:\n  {os.path.join(args.folder, 'report.md')}")
        heal = ["lsgpt", "train", "heal", "--model_name_or_path", args.folder, "--teacher", args.source]
        positions = model.config.max_position_embeddings
        is_short = positions < load_recipe("heal")["block_size"]
        more = ["--block_size", str(positions)] if is_short else []
        print(f"  {shlex.join([*heal, '--dataset_name', args.calibrate, *more])}")
    if not os.path.exists(os.path.join(args.folder, "tokenizer_config.json")):
        print(f"\nThe source has no tokenizer. To use text, save the model's tokenizer into {args.folder}.")
    return 0


def _publish(args: argparse.Namespace) -> int:
    from lsgpt.model_cards import publish

    result = publish(args.folder, args.repo_id, args.private, args.dry_run, args.license, args.output)
    if not args.dry_run:
        print(f"Published: {result}")
        return 0
    print(f"Checked. This would be uploaded to {args.repo_id}; read {os.path.join(result, 'README.md')} first:")
    for file in sorted(path for path in Path(result).rglob("*") if path.is_file()):
        print(f"  {file.relative_to(result)!s:<36}{file.stat().st_size:>16,} bytes")
    return 0


def _check_checkpoint(name: str):
    """Raises `ValueError` if `name` can only be meant as a folder and has no checkpoint."""
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise ValueError(f"{name!r} has no config.json: it is not a checkpoint")
        return
    from lsgpt.utilities import looks_like_a_path

    if os.path.isfile(name):
        raise ValueError(f"{name!r} is a file; give the folder of the checkpoint")
    if name.startswith("runs/") or looks_like_a_path(name):
        raise ValueError(f"there is no folder {name!r}{_suggest_run(name)}")


def _suggest_run(name: str) -> str:
    """End of the message about a missing folder: how to make it, or what was meant."""
    if os.path.normpath(name) == os.path.join("runs", "demo"):
        return "; `lsgpt train` trains the demo and saves it there"
    with contextlib.suppress(OSError):
        parent = os.path.dirname(os.path.normpath(name)) or "."
        if near := difflib.get_close_matches(os.path.basename(os.path.normpath(name)), os.listdir(parent), n=1):
            return f"; did you mean {os.path.join(parent, near[0])!r}?"
    return ""


if __name__ == "__main__":
    sys.exit(main())
