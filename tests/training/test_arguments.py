from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import TrainingArguments, get_scheduler

from lsgpt.configuration import list_recipes
from lsgpt.training import parse_arguments
from lsgpt.training.arguments import free_folder, make_folder


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_recipe(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_demo_recipe():
    model_args, data_args, run_args, training_args, _ = parse_arguments()
    assert model_args.preset == "demo"
    assert run_args.max_logit_every_n_steps == 50
    assert data_args.dataset_name == "stdlib"
    assert type(training_args) is TrainingArguments
    assert training_args.report_to == []
    assert training_args.output_dir == "runs/demo"


def test_command_line_overrides_recipe(tmp_path):
    recipe = write_recipe(tmp_path, "learning_rate: 3e-4\nmax_steps: 7\nblock_size: 64\n")
    _, data_args, _, training_args, _ = parse_arguments(
        recipe, ["--max_steps", "9", "--config_overrides", "{qk_norm: true}"]
    )
    assert training_args.learning_rate == 3e-4
    assert training_args.max_steps == 9
    assert data_args.block_size == 64
    assert training_args.output_dir == "runs/mine"


def test_config_overrides_change_the_model(tmp_path):
    recipe = write_recipe(tmp_path, "config_overrides: {num_hidden_layers: 5}\n")
    assert parse_arguments(recipe).build_config().num_hidden_layers == 5
    config = parse_arguments(recipe, ["--config_overrides", '{"qk_norm": true}']).build_config()
    assert config.qk_norm
    assert config.num_hidden_layers != 5
    config = parse_arguments("demo", ["--config_overrides", "{num_global_heads: all}"]).build_config()
    assert config.num_global_heads_per_layer == [config.num_attention_heads] * config.num_hidden_layers


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("max_stps: 5", [], r"unknown field 'max_stps'; did you mean 'max_steps'\?"),
        ("{}", ["--max-stps", "5"], r"unknown field '--max-stps'; did you mean '--max_steps'\?"),
        ("{}", ["--zzzzzzzz=5"], r"unknown field '--zzzzzzzz'$"),
        ("{}", ["--learning", "1"], r"unknown field '--learning'"),
        ("{}", ["stray"], "unexpected argument 'stray'"),
        ("max_steps: 5.5", [], "max_steps.*invalid int value: '5.5'"),
        ("{}", ["--block_size", "long"], "block_size.*invalid int value: 'long'"),
        ("lr_scheduler_type: cosin", [], "cosin is not a valid SchedulerType"),
        ("block_size: 513", [], r"`block_size` must be between 2 and `max_position_embeddings` \(512\); got 513"),
        ("preset: dem", [], "did you mean 'demo'"),
        ("config_overrides: {hiden_size: 3}", [], "no field 'hiden_size'; did you mean 'hidden_size'"),
        ("config_overrides: hidden_size=3", [], "`config_overrides` must be a mapping"),
        ("streaming: true\nmax_steps: -1", [], "`max_steps` must be set with `streaming`"),
        ("max_eval_blocks: 0", [], "`max_eval_blocks` must be at least 1; got 0"),
        ("stop_at_step: 0", [], "`stop_at_step` must be at least 1; got 0"),
        ("max_logit_threshold: 0", [], "`max_logit_threshold` must be positive and finite; got 0.0"),
        ("max_logit_threshold: .nan", [], "`max_logit_threshold` must be positive and finite; got nan"),
        ("max_logit_every_n_steps: -1", [], "`max_logit_every_n_steps` must be at least 0; got -1"),
        ("learning_rate: -1", [], "`learning_rate` must be at least 0; got -1.0"),
        ("learning_rate: .nan", [], "`learning_rate` must be at least 0; got nan"),
        ("learning_rate: .inf", [], "`learning_rate` must be at least 0 and finite; got inf"),
        ("adam_beta1: 1.5", [], "`adam_beta1` must be at least 0 and below 1; got 1.5"),
        ("gradient_accumulation_steps: 0", [], "`gradient_accumulation_steps` must be at least 1; got 0"),
        ("per_device_train_batch_size: 0", [], "`per_device_train_batch_size` must be at least 1; got 0"),
        ("max_tokenizer_characters: 0", [], "`max_tokenizer_characters` must be at least 1; got 0"),
        ("{}", ["--max_tokenizer_characters", "-5"], "`max_tokenizer_characters` must be at least 1; got -5"),
        ("max_steps: 0", [], "`max_steps` must be at least 1, or -1 to count epochs instead; got 0"),
        ("num_train_epochs: 0\nmax_steps: -1", [], "`num_train_epochs` must be positive and finite; got 0"),
        (
            "attn_implementation: flex_attention\nuse_cpu: true",
            [],
            "must not be flex_attention for training on the CPU",
        ),
        ("attn_implementation: triton\nuse_cpu: true", [], "must not be triton for training on the CPU"),
        ("report_to: dvclive", [], r"`report_to` must name trackers that are installed .*; got 'dvclive'"),
        ("report_to: tensorbord", [], "did you mean 'tensorboard'"),
        ("license: apach-2.0", [], "`license` must be an identifier .*; got 'apach-2.0'; did you mean 'apache-2.0'"),
        ("on_explosion: panic", [], "`on_explosion` must be one of warn, stop, clip"),
        (
            "stabilizers: [z-loss]",
            [],
            "the field `stabilizers`, which has been replaced: .* z-loss by `z_loss: 1.0e-4`",
        ),
        ("{}", ["--stabilizers", "adagc"], "has been replaced: .* adagc by `optim: adagc` with `max_grad_norm: 0`"),
        ("optim: adagc", [], "`max_grad_norm` must be 0 with `optim: adagc`, .*; got 1.0"),
        ("z_loss: -1", [], "`z_loss` must be at least 0; got -1.0"),
        ("on_explosion: stop\nmax_logit_every_n_steps: 0", [], "`max_logit_every_n_steps` must be at least 1 with"),
        ("on_explosion: clip\nconfig_overrides: {qk_norm: true}", [], "QK-clip must not be combined with QK-norm"),
        ("averaging: emma", [], "`kind` of average must be one of .*; got 'emma'; did you mean 'ema'"),
        ("averaging: {kind: ema, decay: 1e0}", [], "`decay` must be at least 0 and below 1; got '1e0'"),
        ("averaging: {kind: bema, decay: 0.9}", [], "the average bema has the settings .*; got 'decay'"),
        (
            "averaging: {decay: 0.9}",
            [],
            "`averaging` must be a kind, or a mapping of a kind and .*; got",
        ),
        ("{}", ["--averaging", "{kind: ema, name: x}"], "the average ema has the settings .*; got 'name'"),
        ("model_name_or_path: nowhere/at-all", [], "there is no checkpoint 'nowhere/at-all'"),
    ],
)
def test_mistakes_are_explained(tmp_path, recipe, overrides, message, offline):
    with pytest.raises(ValueError, match=message):
        parse_arguments(write_recipe(tmp_path, recipe), overrides)


def test_recipe_of_a_run_repeats_it(tmp_path):
    overrides = ["--config_overrides", "{sliding_window: 20}", "--learning_rate", "3e-5", "--seed", "7"]
    overrides += ["--averaging", "{kind: bema, every_n_steps: 10, kappa: 4e-1}"]
    overrides += [
        "--z_loss",
        "1e-3",
        "--optim",
        "adagc",
        "--max_grad_norm",
        "0",
        "--lr_scheduler_kwargs",
        '{"num_cycles": 0.4}',
    ]
    arguments = parse_arguments("demo", overrides)
    assert arguments.recipe["learning_rate"] == 3e-5
    assert arguments.recipe["averaging"] == {
        "kind": "bema",
        "every_n_steps": 10,
        "kappa": 0.4,
        "eta": 0.2,
        "rho": 10.0,
        "gamma": 1.0,
    }
    assert str(arguments.recipe["warmup_steps"]) == "60"  # as the recipe has it, although the field is a float
    assert not {"output_dir", "resume_from_checkpoint", "remove_unused_columns"} & set(arguments.recipe)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(arguments.recipe))
    again = parse_arguments(path)
    assert again[:3] == arguments[:3]
    assert again.training.to_dict() == arguments.training.to_dict()
    assert again.recipe == arguments.recipe == parse_arguments(arguments.recipe).recipe


def test_nothing_is_overwritten(tmp_path):
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    for expected in ("run-2", "run-3"):
        taken = free_folder(tmp_path / "run")
        taken.mkdir(exist_ok=True)
        assert free_folder(tmp_path / "run") == taken  # an empty folder is free
        (taken / "report.md").touch()
        assert free_folder(tmp_path / "run") == tmp_path / expected
    with pytest.raises(ValueError, match=r"`output_dir` must be a new or an empty folder.*choose another"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]))
    write_checkpoint(tmp_path / "run" / "checkpoint-9", '{"global_step": 9}')
    with pytest.raises(ValueError, match=r"To resume the run in it: --resume_from_checkpoint .*run$"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]))


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", Path("/proc/run")):  # not even root writes there
        with pytest.raises(ValueError, match="`output_dir` must be a writable folder"):
            make_folder(parse_arguments("demo", ["--output_dir", str(folder)]))
    with pytest.raises(ValueError, match="`output_dir` must be a folder; got"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "file")]))


def test_disk_without_room_for_the_checkpoints(tmp_path):
    huge = ["--config_overrides", "{hidden_size: 1200000, intermediate_size: 10000000}", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=r"room for the checkpoints, [\d.]+ TB; .* has [\d.]+ [GT]B"):
        make_folder(parse_arguments("demo", huge))


def test_a_run_that_fitted_can_be_resumed(tmp_path, monkeypatch):
    """Its checkpoints count as room that it has; the disk has as much as the run needs in all, and not a byte more."""
    overrides = ["--output_dir", str(tmp_path / "run"), "--save_strategy", "steps", "--save_total_limit", "2"]
    weights = 4 * parse_arguments("demo", overrides).build_config().num_parameters()
    free = weights * (1 + 3 * 3)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    make_folder(parse_arguments("demo", overrides))
    for step in (1, 2):
        write_checkpoint(tmp_path / "run" / f"checkpoint-{step}", f'{{"global_step": {step}}}')
        free -= 3 * weights
        make_folder(parse_arguments("demo", [*overrides, "--resume_from_checkpoint", str(tmp_path / "run")]))
    free -= 1
    message = r"room for the checkpoints, 26.8 MB; .* has 26.8 MB"
    with pytest.raises(ValueError, match=message):
        make_folder(parse_arguments("demo", [*overrides, "--resume_from_checkpoint", str(tmp_path / "run")]))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_steps": 300}, 4),  # after 300, 600, 900 and 1,000 steps
        ({"save_steps": 0.25}, 4),
        ({"save_steps": 300, "stop_at_step": 600}, 2),
        ({"save_steps": 300, "save_total_limit": 1}, 2),
    ],
)
def test_all_checkpoints_that_a_run_keeps_must_fit(options, kept, tmp_path, monkeypatch):
    options = {"output_dir": tmp_path, "save_strategy": "steps", "max_steps": 1000, **options}
    arguments = parse_arguments("demo", [x for name, value in options.items() for x in (f"--{name}", str(value))])
    weights = 4 * arguments.build_config().num_parameters()
    disk = SimpleNamespace(free=weights * (1 + 3 * kept))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: disk)
    make_folder(arguments)
    disk.free -= 1
    with pytest.raises(ValueError, match="room for the checkpoints"):
        make_folder(arguments)


def test_checkpoints_of_adapters_need_little_room(tmp_path, monkeypatch):
    """They have the whole model's weights, but an optimizer of few parameters."""
    options = ["--model_name_or_path", str(tmp_path / "source"), "--save_strategy", "steps", "--save_total_limit", "1"]
    config = parse_arguments("demo").build_config()
    config.save_pretrained(tmp_path / "source")
    free = 4 * config.num_parameters() * (1 + 2)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    for trainable in ("lora", "light"):
        folder = ["--output_dir", str(tmp_path / trainable)]
        make_folder(parse_arguments("finetune", [*options, *folder, "--trainable", trainable]))
    with pytest.raises(ValueError, match="room for the checkpoints"):
        make_folder(parse_arguments("finetune", [*options, "--output_dir", str(tmp_path / "all")]))


def test_a_missing_package_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("lsgpt.training.arguments.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="AdaGC needs the package pytorch_optimizer: pip install pytorch_optimizer"):
        parse_arguments("demo", ["--optim", "adagc", "--max_grad_norm", "0"])


def write_checkpoint(folder, state):
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)


def test_resuming_takes_the_last_complete_checkpoint_and_the_run_s_own_recipe(tmp_path):
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoint-9", '{"global_step": 9}')
    write_checkpoint(run / "checkpoint-9-copy", '{"global_step": 9}')
    write_checkpoint(run / "checkpoint-10", '{"global_step": 10}')
    write_checkpoint(run / "checkpoint-11", '{"global_st')  # the run was killed while it wrote this
    (run / "checkpoint-12").mkdir()
    (run / "recipe.yaml").write_text("max_steps: 17\n")
    arguments = parse_arguments(None, ["--resume_from_checkpoint", str(run)])
    assert arguments.training.resume_from_checkpoint == str(run / "checkpoint-10")
    assert arguments.training.output_dir == str(run)
    assert arguments.training.max_steps == 17
    make_folder(arguments)  # content is no error now
    arguments = parse_arguments("demo", ["--resume_from_checkpoint", str(run / "checkpoint-9"), "--output_dir", "x"])
    assert arguments.training.resume_from_checkpoint == str(run / "checkpoint-9")
    assert arguments.training.output_dir == "x"
    recipe = write_recipe(tmp_path, f"resume_from_checkpoint: {run}")  # in a recipe, as on the command line
    assert parse_arguments(recipe).training.resume_from_checkpoint == str(run / "checkpoint-10")
    with pytest.raises(ValueError, match="`resume_from_checkpoint` must be or contain a complete checkpoint; got"):
        parse_arguments(None, ["--resume_from_checkpoint", str(tmp_path)])


def test_a_run_that_ended_before_its_first_checkpoint(tmp_path):
    """Neither message sends to the other."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("max_steps: 17\n")
    with pytest.raises(ValueError, match="It has no checkpoint to resume from: choose another folder, or delete"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]))
    recipe = tmp_path / "run" / "recipe.yaml"
    with pytest.raises(ValueError, match=f"ended before its first checkpoint; start it again: lsgpt train {recipe}"):
        parse_arguments(None, ["--resume_from_checkpoint", str(tmp_path / "run")])


def test_resuming_without_a_recipe_is_refused(tmp_path):
    """The demo's, which would be taken without a word, is another model on other data."""
    write_checkpoint(tmp_path / "run" / "checkpoint-9", '{"global_step": 9}')
    with pytest.raises(ValueError, match=r"but there is no .*recipe\.yaml\. Name the recipe: lsgpt train RECIPE"):
        parse_arguments(None, ["--resume_from_checkpoint", str(tmp_path / "run")])
    arguments = parse_arguments("demo", ["--resume_from_checkpoint", str(tmp_path / "run")])
    assert arguments.training.output_dir == str(tmp_path / "run")


def test_processes_that_would_not_train_together(monkeypatch):
    """What a launcher of several processes sets, on a machine without GPUs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, and each would train a model of its own"):
        parse_arguments()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="AdaGC must not be combined with FSDP"):
        parse_arguments("demo", ["--optim", "adagc", "--max_grad_norm", "0"])


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes(name, tiny_model, tmp_path):
    overrides = ["--use_cpu", "true"]
    if name in ("finetune", "heal"):
        with pytest.raises(ValueError, match="`model_name_or_path` must be set if there is no `preset`"):
            parse_arguments(name, overrides)
        tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "checkpoint")
        overrides += ["--model_name_or_path", str(tmp_path / "checkpoint")]
    arguments = parse_arguments(name, overrides)
    assert arguments.data.block_size <= arguments.build_config().max_position_embeddings


@pytest.mark.parametrize("name", ["paper-v1", "paper-12l"])
def test_recipes_of_the_paper(name):
    """The values of arXiv:2505.15548's experiments, as its author's scripts have them."""
    _, data, run, args, _ = arguments = parse_arguments(name, ["--use_cpu", "true"])
    config = arguments.build_config()
    assert data.dataset_name == "emozilla/pg19" and config.vocab_size == 10_000 and not data.respect_boundaries
    assert data.block_size * args.per_device_train_batch_size * args.gradient_accumulation_steps == 524_288
    assert (args.learning_rate, args.warmup_steps, args.max_steps, run.stop_at_step) == (6e-4, 2000, 600_000, 50_000)
    assert args.lr_scheduler_kwargs == {"min_lr": 6e-5} and args.lr_scheduler_type == "cosine_with_min_lr"
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.1, 1.0)
    assert args.bf16 and args.torch_compile
    shape = config.num_hidden_layers, config.num_attention_heads, config.head_dim, config.hidden_size
    window = config.num_global_heads, config.sliding_window, data.block_size
    assert (*shape, *window) == {
        "paper-v1": (6, 6, 32, 192, 1, 50, 2048),
        "paper-12l": (12, 12, 64, 768, 1, 100, 8192),
    }[name]
    assert not config.tie_word_embeddings and not config.use_bias and config.position_embedding_type == "learned"
    assert config.attention_dropout == config.resid_dropout == config.embd_dropout == 0.0


def test_recipe_of_smollm2():
    """The values of SmolLM2-135M's published configuration, for a shorter run."""
    _, data, _, args, _ = arguments = parse_arguments("smollm2-135m", ["--use_cpu", "true"])
    tokens_per_step = data.block_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert tokens_per_step == 512 * 2048
    assert 0.9 < tokens_per_step * args.max_steps / 10e9 < 1  # the dataset has 10 billion
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.01, 1.0)
    config = arguments.build_config()
    assert (config.norm_type, config.gated_mlp, config.hidden_act) == ("rms_norm", True, "silu")
    assert config.attention_sinks and config.num_key_value_heads < config.num_attention_heads

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, int(args.warmup_steps), args.max_steps, args.lr_scheduler_kwargs
    )
    (rate,) = schedule.lr_lambdas
    rates = [rate(step) for step in (0, 250, 500, 7600, 8550, 9500)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 0.5, 0])
