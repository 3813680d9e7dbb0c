import dataclasses
import logging
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainingArguments, get_scheduler

from lsgpt.configuration import list_recipes, load_arms
from lsgpt.training import parse_arguments
from lsgpt.training.arguments import OURS, make_parser
from lsgpt.training.folders import free_folder, make_folder


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


@pytest.mark.parametrize("given", [True, "full_shard auto_wrap"])
def test_fsdp_of_a_recipe_is_that_of_the_command_line(given):
    arguments = parse_arguments({"preset": "demo", "fsdp": given})
    options = ["--fsdp"] if given is True else ["--fsdp", given]
    assert arguments.training.fsdp and arguments.training.fsdp == parse_arguments("demo", options).training.fsdp
    assert parse_arguments(arguments.recipe).training.fsdp == arguments.training.fsdp


def test_numbers_without_a_point_are_numbers(tmp_path):
    """YAML 1.1, which PyYAML reads, takes 1e-5 for text."""
    text = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\n"
    text += "config_overrides: {initializer_range: 2E-2, layer_norm_eps: .5e-5}\n"
    arguments = parse_arguments(write_recipe(tmp_path, text + "learning_rate: 3e-4\nrun_name: 12e\n"))
    assert arguments.training.lr_scheduler_kwargs == {"min_lr": 1e-5}
    assert arguments.model.config_overrides == {"initializer_range": 0.02, "layer_norm_eps": 5e-6}
    assert (arguments.training.learning_rate, arguments.training.run_name) == (3e-4, "12e")
    overrides = ["--config_overrides", "{initializer_range: 1e-3}", "--averaging", "{kind: ema, decay: 9e-1}"]
    arguments = parse_arguments("demo", overrides)
    assert arguments.build_config().initializer_range == 0.001 and arguments.run.averaging["decay"] == 0.9
    arms = tmp_path / "arms.yaml"
    arms.write_text("fast: {lr_scheduler_kwargs: {min_lr: 1e-5}}\n")
    assert load_arms(arms)["fast"] == {"lr_scheduler_kwargs": {"min_lr": 1e-5}}


def test_one_process_with_several_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"each process must have one GPU; this one sees 2.* CUDA_VISIBLE_DEVICES=0"):
        parse_arguments("demo")


def test_tokens_of_shared_sequences_are_not_counted_by_the_trainer(monkeypatch):
    monkeypatch.setattr("lsgpt.training.arguments.processes_per_row", lambda args: 2)
    with pytest.raises(ValueError, match="`include_num_input_tokens_seen` must be false with `cp_size`"):
        parse_arguments("demo", ["--include_num_input_tokens_seen", "true"])


def test_sequences_are_shared_as_the_launcher_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match="`include_num_input_tokens_seen` must be false with `cp_size`"):
        parse_arguments("demo", ["--include_num_input_tokens_seen", "true"])


@pytest.mark.parametrize("name", ["eval_strategy", "logging_strategy"])
def test_streams_have_no_epochs(name):
    with pytest.raises(ValueError, match=f"`{name}` must be steps or no with `streaming`"):
        parse_arguments({"preset": "demo", "streaming": True, "max_steps": 9, name: "epoch"})


def test_no_is_a_strategy(tmp_path):
    """YAML 1.1 takes it for false."""
    names = ("eval_strategy", "logging_strategy", "save_strategy")
    arguments = parse_arguments(write_recipe(tmp_path, "".join(f"{name}: no\n" for name in names) + "bf16: no\n"))
    assert [str(getattr(arguments.training, name).value) for name in names] == ["no"] * 3
    assert arguments.training.bf16 is False
    assert parse_arguments(arguments.recipe).training.save_strategy == "no"


def test_config_overrides_change_the_model(tmp_path):
    recipe = write_recipe(tmp_path, "config_overrides: {num_hidden_layers: 5}\n")
    assert parse_arguments(recipe).build_config().num_hidden_layers == 5
    given = ["--config_overrides", '{"qk_norm": true}']
    config = parse_arguments(recipe, given).build_config()
    assert config.qk_norm and config.num_hidden_layers == 5
    assert parse_arguments("demo", given).build_config().num_hidden_layers != 5
    assert (
        parse_arguments(recipe, ["--config_overrides", "{num_hidden_layers: 6}"]).build_config().num_hidden_layers == 6
    )
    assert parse_arguments(recipe, ["--config_overrides", "null"]).build_config().num_hidden_layers != 5
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
        ("block_size: 1", [], r"`block_size` must be between 2 and `max_position_embeddings` \(512\); got 1"),
        ("preset: dem", [], "did you mean 'demo'"),
        ("config_overrides: {hiden_size: 3}", [], "no field 'hiden_size'; did you mean 'hidden_size'"),
        ("config_overrides: hidden_size=3", [], "`config_overrides` must be a mapping"),
        ("streaming: true\nmax_steps: -1", [], "`max_steps` must be set with `streaming`"),
        (
            "streaming: true\nmax_steps: 9\nsave_strategy: epoch",
            [],
            "`save_strategy` must be steps or no with `streaming`",
        ),
        ("averaging: ema\noptim: schedule_free_adamw", [], "`averaging` must be unset with `optim: schedule_free_ada"),
        ("max_eval_blocks: 0", [], "`max_eval_blocks` must be at least 1 and finite; got 0"),
        ("max_logit_every_n_steps: -1", [], "`max_logit_every_n_steps` must be at least 0 and finite; got -1"),
        ("learning_rate: -1", [], "`learning_rate` must be at least 0 and finite; got -1.0"),
        ("learning_rate: .nan", [], "`learning_rate` must be at least 0 and finite; got nan"),
        ("learning_rate: .inf", [], "`learning_rate` must be at least 0 and finite; got inf"),
        ("gradient_accumulation_steps: 0", [], "`gradient_accumulation_steps` must be at least 1 and finite; got 0"),
        ("per_device_train_batch_size: 0", [], "`per_device_train_batch_size` must be at least 1 and finite; got 0"),
        ("per_device_eval_batch_size: 0", [], "`per_device_eval_batch_size` must be at least 1 and finite; got 0"),
        ("weight_decay: -0.1", [], "`weight_decay` must be at least 0 and finite; got -0.1"),
        ("max_grad_norm: -1", [], "`max_grad_norm` must be at least 0 and finite; got -1.0"),
        ("max_steps: 0", [], "`max_steps` must be at least 1, or -1 with .*; got 0 and"),
        ("num_train_epochs: 0\nmax_steps: -1", [], "a positive and finite `num_train_epochs`; got -1 and 0.0"),
        ("num_train_epochs: .inf\nmax_steps: -1", [], "a positive and finite `num_train_epochs`; got -1 and inf"),
        (
            "attn_implementation: flex_attention\nuse_cpu: true",
            [],
            "must not be flex_attention for training on the CPU",
        ),
        ("attn_implementation: triton\nuse_cpu: true", [], "must not be triton for training on the CPU"),
        ("attn_implementation: triton_in_float32\nuse_cpu: true", [], "must not be triton for training on the CPU"),
        ("z_loss: -1", [], "`z_loss` must be at least 0 and finite; got -1.0"),
        ("on_explosion: stop\nmax_logit_every_n_steps: 0", [], "`max_logit_every_n_steps` must be at least 1 with"),
        ("on_explosion: clip\nmax_logit_every_n_steps: 0", [], "`max_logit_every_n_steps` must be at least 1 with"),
        ("on_explosion: stopp", [], "`on_explosion` must be one of .*; got 'stopp'; did you mean 'stop'"),
        (
            "on_explosion: stopp\nmax_logit_every_n_steps: 0",
            [],
            "`on_explosion` must be one of warn, stop, clip; got 'stopp'",
        ),
        ("averaging: emma", [], "`kind` of average must be one of .*; got 'emma'; did you mean 'ema'"),
        ("averaging: {kind: ema, decay: 1e0}", [], "`decay` must be at least 0 and below 1; got 1.0"),
        ("averaging: {kind: ema, decay: high}", [], "`decay` must be at least 0 and below 1; got 'high'"),
        ("averaging: {kind: bema, decay: 0.9}", [], "the average bema has the settings .*; got 'decay'"),
        ("averaging: {decay: 0.9}", [], "`averaging` must be a kind, or a mapping of a kind and .*; got"),
        ("averaging: bema\nmax_steps: 399", [], "`every_n_steps` of the average must be at most the 399 .* got 400"),
        ("{}", ["--averaging", "{kind: ema, name: x}"], "the average ema has the settings .*; got 'name'"),
        (
            "model_name_or_path: nowhere/at-all",
            ["--tokenizer=unigram"],
            "`tokenizer` must not be given with `model_name_or_path`, .* got 'unigram' and 'nowhere/at-all'",
        ),
        (
            "optim_args: lambda_rel=1.05",
            [],
            "`optim_args` must be unset with `optim: adamw_torch.*got 'lambda_rel=1.0",
        ),
        ("{}", ["--sink_learning_rate=0.1"], "`sink_learning_rate` must be unset for a model without .*; got 0.1"),
        ("model_name_or_path: nowhere/at-all", [], "there is no checkpoint 'nowhere/at-all'"),
        ("max_steps: null", [], "`max_steps` of recipe mine must have a value; got null"),
        ("dataset_name: [a.txt, b.txt]", [], r"`dataset_name` of recipe mine must be one value; got \['a.txt', 'b"),
        ("block_size: {a: 1}", [], "`block_size` of recipe mine must be one value; got {'a': 1}"),
        ("license: no", [], "`license` of recipe mine must be text; got False, as YAML reads .* put it in quotes"),
        ("config_overrides: {1: 2}", [], "`config_overrides` must be a mapping, as in .*; got {1: 2}"),
        (
            "max_steps: 9",
            ["--num_train_epochs", "2"],
            "no effect with the recipe's `max_steps: 9`; give --max_steps -1",
        ),
        (
            "save_strategy: no",
            ["--save-steps=2"],
            "`save_steps` has no effect with .*; give --save_strategy steps with",
        ),
        (
            "eval_strategy: epoch",
            ["--eval_steps=2"],
            "`eval_steps` has no effect with the recipe's `eval_strategy: ep",
        ),
        ("logging_strategy: no", ["--logging_steps=2"], "`logging_steps` has no effect with the recipe's"),
        (
            "lr_scheduler_kwargs: {min_lr_rate: 0.1}",
            [],
            r"`lr_scheduler_kwargs` must fit `lr_scheduler_type` \(linear\); got {'min_lr_rate': 0.1}: .*unexpected",
        ),
        ("lr_scheduler_type: cosine_with_min_lr", [], r"fit `lr_scheduler_type` \(cosine_with_min_lr\); got {}: One"),
    ],
)
def test_mistakes_are_explained(tmp_path, recipe, overrides, message, offline):
    with pytest.raises(ValueError, match=message):
        parse_arguments(write_recipe(tmp_path, recipe), overrides)


def test_fields_that_have_an_effect_because_of_others_on_the_command_line(tmp_path):
    recipe = write_recipe(tmp_path, "max_steps: 9\nsave_strategy: no\nrun_name: 2026-01-02\n")
    options = ["--max_steps=-1", "--num_train_epochs=2", "--save_strategy=steps", "--save_steps=3"]
    arguments = parse_arguments(recipe, options).training
    assert (arguments.max_steps, arguments.num_train_epochs, arguments.save_steps) == (-1, 2, 3)
    assert arguments.output_dir == "runs/2026-01-02"  # which YAML reads as a date


def test_the_configuration_of_a_dataset_goes_with_it(tmp_path):
    recipe = write_recipe(tmp_path, "dataset_name: a/b\ndataset_config_name: small\n")
    for options, expected in (
        ([], "small"),
        (["--dataset_name", "a/b"], "small"),
        (["--dataset_name", "my_texts"], None),
        (["--dataset_name", "c/d", "--dataset_config_name", "large"], "large"),
    ):
        assert parse_arguments(recipe, options).data.dataset_config_name == expected


def test_local_paths_cannot_be_taken_for_names_on_the_hub(tmp_path):
    (tmp_path / "data" / "books").mkdir(parents=True)
    for name, recorded in (("data/books", "./data/books"), ("./data/books", "./data/books"), ("a/b", "a/b")):
        arguments = parse_arguments("demo", ["--dataset_name", name])
        assert arguments.recipe["dataset_name"] == recorded and arguments.recipe["tokenizer"] == "bpe"


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("lsgpt.training.arguments.get_available_reporting_integrations", lambda: ["tensorboard"])
    message = r"`report_to` must be trackers whose packages are installed \(tensorboard\); got 'wandb'\. Install its"
    with pytest.raises(ValueError, match=message):
        parse_arguments("demo", ["--report_to", "wandb"])
    assert parse_arguments("demo", ["--report_to", "tensorboard"]).training.report_to == ["tensorboard"]
    assert parse_arguments("demo", ["--report_to", "none"]).training.report_to == []
    assert parse_arguments("demo", ["--report_to", "flyte"]).training.report_to == ["flyte"]  # which is never listed


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
    steps = [str(arguments.recipe[f"{name}_steps"]) for name in ("warmup", "logging", "eval")]
    assert steps == ["60", "50", "200"]  # as the recipe has them, although the fields are floats
    assert not {"output_dir", "resume_from_checkpoint", "remove_unused_columns"} & set(arguments.recipe)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(arguments.recipe))
    again = parse_arguments(path)
    assert again[:3] == arguments[:3]
    assert again.training.to_dict() == arguments.training.to_dict()
    assert again.recipe == arguments.recipe == parse_arguments(arguments.recipe).recipe
    assert "secret" not in str(parse_arguments("demo", ["--hub_token", "secret"]).recipe)


def test_nothing_is_overwritten(tmp_path):
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    for expected in ("run-2", "run-3"):
        taken = free_folder(tmp_path / "run")
        taken.mkdir(exist_ok=True)
        assert free_folder(tmp_path / "run") == taken  # an empty folder is free
        (taken / "report.md").touch()
        assert free_folder(tmp_path / "run") == tmp_path / expected
    with pytest.raises(ValueError, match=r"`output_dir` must be a new or an empty folder.*choose another"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]).training)
    write_checkpoint(tmp_path / "run" / "checkpoint-9", '{"global_step": 9}')
    with pytest.raises(ValueError, match=r"To resume the run in it: --resume_from_checkpoint .*run$"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]).training)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", Path("/proc/run")):  # not even root writes there
        with pytest.raises(ValueError, match="`output_dir` must be a writable folder"):
            make_folder(parse_arguments("demo", ["--output_dir", str(folder)]).training)
    with pytest.raises(ValueError, match="`output_dir` must be a folder; got"):
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "file")]).training)


@pytest.mark.parametrize("name", ["eval_perplexity", "perplexity", "eval_averaged_perplexity", "bits_per_byte"])
def test_the_best_perplexity_is_the_smallest(name):
    """By default, Transformers takes the largest of all metrics that are no losses."""
    options = ["--metric_for_best_model", name]
    arguments = parse_arguments("demo", options)
    assert arguments.training.greater_is_better is False
    assert parse_arguments(arguments.recipe).training.greater_is_better is False
    assert parse_arguments("demo", [*options, "--greater_is_better", "true"]).training.greater_is_better is True
    assert parse_arguments("demo", ["--metric_for_best_model", "accuracy"]).training.greater_is_better is True
    assert parse_arguments("demo", ["--metric_for_best_model", "eval_loss"]).training.greater_is_better is False
    assert parse_arguments().training.greater_is_better is None


def test_a_run_that_resumes_overwrites_no_other(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name / "checkpoint-4", '{"global_step": 4}')
    (tmp_path / "a" / "recipe.yaml").write_text("max_steps: 17\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    resume = ["--resume_from_checkpoint", "a/checkpoint-4", "--output_dir"]
    for folder in ("a", "link", str(tmp_path / "a"), "empty", "new"):
        make_folder(parse_arguments(None, [*resume, folder]).training)
    with pytest.raises(ValueError, match=r"must be a new or an empty folder, or that of the run to resume; got 'b'"):
        make_folder(parse_arguments(None, [*resume, "b"]).training)
    write_checkpoint(tmp_path / "a" / "checkpoint-4-copy", '{"global_step": 4}')
    write_checkpoint(tmp_path / "a" / "best", '{"global_step": 4}')
    for name in ("checkpoint-4", "checkpoint-4-copy", "best"):
        make_folder(parse_arguments(None, ["--resume_from_checkpoint", f"a/{name}", "--output_dir", "a"]).training)
    write_checkpoint(tmp_path / "a" / "checkpoint-10", '{"global_step": 10}')
    make_folder(parse_arguments(None, [*resume, "other"]).training)
    for folder in ("a", "link"):  # the abandoned steps would win the next time
        with pytest.raises(
            ValueError, match=r"must be the last checkpoint .* got 'a/checkpoint-4', but '.*-10' is la"
        ):
            make_folder(parse_arguments(None, [*resume, folder]).training)


def test_our_options_are_few_and_come_first_in_the_help():
    parser = make_parser()
    text = parser.format_help()
    ours = [field.name for kind in OURS for field in dataclasses.fields(kind)]
    assert len(ours) <= 20
    assert text.index("the model:") < text.index("the run:") < text.index("transformers.TrainingArguments:")
    assert max(text.index(f"--{name}") for name in ours) < text.index("transformers.TrainingArguments:")


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
    make_folder(arguments.training)  # content is no error now
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
        make_folder(parse_arguments("demo", ["--output_dir", str(tmp_path / "run")]).training)
    recipe = tmp_path / "run" / "recipe.yaml"
    with pytest.raises(ValueError, match=f"ended before its first checkpoint; start it again: lsgpt train {recipe}"):
        parse_arguments(None, ["--resume_from_checkpoint", str(tmp_path / "run")])
    (tmp_path / "run" / "results.json").touch()
    with pytest.raises(ValueError, match=rf"The run kept none; .* --model_name_or_path {tmp_path / 'run'}$"):
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


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes(name, tiny_model, tmp_path):
    overrides = ["--use_cpu", "true"]
    if name in ("finetune", "heal"):
        with pytest.raises(ValueError, match="`model_name_or_path` must be set if there is no `preset`"):
            parse_arguments(name, overrides)
        tiny_model(max_position_embeddings=4096).save_pretrained(tmp_path / "checkpoint")
        overrides += ["--model_name_or_path", str(tmp_path / "checkpoint")]
    arguments = parse_arguments(name, overrides)
    assert arguments.data.block_size <= arguments.build_config().max_position_embeddings


def test_a_preset_that_a_model_replaces_is_not_recorded(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tiny_model().save_pretrained(tmp_path / "checkpoint")
    fields = f"model_name_or_path: {tmp_path / 'checkpoint'}\nblock_size: 16\nuse_cpu: true\n"
    arguments = parse_arguments(write_recipe(tmp_path, f"preset: gpt2-small\n{fields}"))
    assert "`preset: gpt2-small` of the recipe is not used" in caplog.text
    assert arguments.recipe["preset"] is arguments.model.preset is None
    caplog.clear()
    assert parse_arguments(arguments.recipe).recipe == arguments.recipe
    parse_arguments(write_recipe(tmp_path, fields))
    assert "preset" not in caplog.text


@pytest.mark.parametrize("name", ["paper-v1", "paper-12l"])
def test_recipes_of_the_paper(name):
    """The values of arXiv:2505.15548's experiments, as its author's scripts have them."""
    _, data, _, args, _ = arguments = parse_arguments(name, ["--use_cpu", "true"])
    config = arguments.build_config()
    assert data.dataset_name == "emozilla/pg19" and config.vocab_size == 10_000 and not data.respect_boundaries
    assert data.block_size * args.per_device_train_batch_size * args.gradient_accumulation_steps == 524_288
    assert (args.learning_rate, args.warmup_steps, args.max_steps) == (6e-4, 2000, 50_000)
    assert args.lr_scheduler_kwargs == {"min_lr": 6e-5, "num_training_steps": 600_000}
    assert args.lr_scheduler_type == "cosine_with_min_lr"
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
