"""Many processes through Accelerate: two on the CPU train as one does, and what they save loads in one."""

import json
import math
import os
import runpy
import time
from pathlib import Path

import fresh
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

import lsgpt.configuration


LAUNCH_FILES = {file.stem: file for file in (Path(lsgpt.configuration.__file__).parent / "launch").glob("*.yaml")}
SCRIPT = Path(__file__).with_name("train_script.py")


def launch(name, *command, options=(), **variables) -> fresh.Program:
    """Starts `accelerate launch` with a shipped file, changed by `options` only. The machine's GPUs stay out of it."""
    launcher = "-m", "accelerate.commands.launch", "--config_file", LAUNCH_FILES[name], *options, *command
    return fresh.Program(*launcher, CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", **variables)


def variables_of(name, options) -> dict[str, str]:
    """What `accelerate launch` tells its processes, which it starts one by one; forks import nothing anew."""
    parser = launch_command_parser()
    parsed = parser.parse_args(["--config_file", str(LAUNCH_FILES[name]), *options, "script.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def output_of(launcher: fresh.Program) -> str:
    """Waits, not for ever: processes that disagree about what to exchange may wait for each other."""
    status = launcher.wait(timeout=120)
    assert status == 0, launcher.output + launcher.errors
    return launcher.output + launcher.errors


@pytest.mark.parametrize("name", ["cp", "cpu", "ddp", "fsdp2", "one-gpu", "zero3"])
def test_accelerate_knows_every_key(name):
    config = load_config_from_file(str(LAUNCH_FILES[name]))  # refuses unknown keys, but does not look into sections
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*config.deepspeed_config, *config.fsdp_config, *config.parallelism_config} <= options
    assert config.mixed_precision == "no"


@pytest.mark.parametrize("in_file", ["no", "bf16"])
@pytest.mark.parametrize("in_recipe", [False, True])
def test_a_launch_file_must_not_name_a_precision_so_that_the_recipe_decides(tmp_path, monkeypatch, in_file, in_recipe):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", in_file)  # all that `accelerate launch` makes of the file's
    used = TrainingArguments(tmp_path, bf16=in_recipe, use_cpu=True).mixed_precision
    assert used == ("bf16" if in_recipe else in_file)


WHO = """
from accelerate.state import PartialState

state = PartialState(cpu=True)
print(f"process {state.process_index} of {state.num_processes}")
"""


def test_one_process(tmp_path):
    (tmp_path / "who.py").write_text(WHO, encoding="utf-8")
    assert "process 0 of 1\n" in output_of(launch("one-gpu", tmp_path / "who.py"))


def test_two_machines(tmp_path):
    """Two launchers that find each other, as on two machines: the command differs in its rank only."""
    (tmp_path / "who.py").write_text(WHO, encoding="utf-8")
    options = ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(fresh.find_port()), "--machine_rank"]
    launchers = [launch("ddp", tmp_path / "who.py", options=[*options, str(rank)]) for rank in (0, 1)]
    for rank, launcher in enumerate(launchers):
        assert f"process {rank} of 2\n" in output_of(launcher)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of the runs in one process, which all tests compare with; each is made by the first that needs it."""
    return tmp_path_factory.mktemp("one")


DDP = "DistributedDataParallel", "LSGPTDecoderLayer", "Parameter"
FSDP2 = "LSGPTForCausalLM", "FSDPLSGPTDecoderLayer", "DTensor"


@pytest.mark.parametrize(
    ("name", "processes", "per_row", "classes"),
    [
        ("cpu", 2, 1, DDP),
        ("fsdp2", 2, 1, FSDP2),
        ("zero3", 2, 1, ("DeepSpeedEngine", "LSGPTDecoderLayer", "Parameter")),
        # Processes that share rows (context parallelism): one group, and two groups that share the batch.
        ("cpu", 2, 2, DDP),
        ("cp", 2, 2, FSDP2),
        ("cp", 4, 2, FSDP2),
    ],
)
def test_several_processes_train_as_one(one, tmp_path, name, processes, per_row, classes):
    """
    Losses, gradient norms, logits, weights and their averages; also of runs that resume, diverge, clip heads, have a
    teacher, or end because one process gets SIGTERM.
    """
    runs = {
        "plain": ["checkpoint-3", "checkpoint-6", "."],
        "resumed": ["."],
        "bad": ["checkpoint-3", "."],
        "signal": ["checkpoint-2", "."],
        "clip": ["."],
    }
    model, block, parameter = classes
    if per_row > 1:
        runs = {"plain": runs["plain"], "resumed": ["."], "clip": ["."], "taught": ["."]}
    elif name == "cpu":
        runs["llama"] = ["."]  # the launch files of the others name LSGPT's layers
        runs["taught"] = ["."]
    if name == "zero3":
        pytest.importorskip("deepspeed")
        del runs["clip"]  # DeepSpeed keeps weights of its own, and overwrites what others change
    else:  # averages are refused with ZeRO-3
        runs["plain"].append("averaged")
        runs["resumed"].append("averaged")
    options = ["--num_processes", str(processes), "--main_process_port", "0"]
    if name == "cp":
        options += ["--parallelism_config_cp_size", str(per_row)]
        options += ["--parallelism_config_dp_shard_size", str(processes // per_row)]
    command = tmp_path / "two", *runs
    launcher = launch(name, SCRIPT, *command, options=options) if per_row == 1 else None
    for kind in runs:
        if not (one / kind).exists():
            runpy.run_path(str(SCRIPT))["train"](one / kind, kind)
    if launcher is None:
        variables = {**variables_of(name, options), "PARALLELISM_CONFIG_CP_SIZE": per_row, "CUDA_VISIBLE_DEVICES": ""}
        output = "".join(fresh.run_together(processes, "-c", SCRIPT.read_text("utf-8"), *command, **variables))
    else:
        output = output_of(launcher)

    for kind, checkpoints in runs.items():
        two = tmp_path / "two" / kind
        alone, together = (json.loads((folder / "history.json").read_text("utf-8")) for folder in (one / kind, two))
        of_model = "LlamaDecoderLayer" if kind == "llama" else block
        assert together["how"] == {"processes": processes, "model": model, "block": of_model, "parameter": parameter}
        last_step = {"bad": 3, "signal": 2}.get(kind, 6)
        assert [log["step"] for log in together["history"]] == list(range(1, last_step + 1))
        for expected, found in zip(alone["history"], together["history"]):
            if kind == "bad" and found["step"] == 3:
                # A NaN spoils all of one process's batch, and half of that of two. Logits of both count.
                assert math.isnan(expected["max_logit"]) and found["max_logit"] == math.inf
                continue
            assert found == pytest.approx(expected, rel=1e-5), kind
            # Or else clipping gradients would not have been tried.
            assert kind in ("clip", "taught") or found["grad_norm"] > 1
        for expected, found in zip(alone["evaluations"], together["evaluations"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5), kind
            assert kind == "taught" or abs(found["eval_loss"] - found["eval_averaged_loss"]) > 1e-3
        assert len(together["evaluations"]) == (3 if kind == "taught" else 2 * ("averaged" in checkpoints))
        assert together["predicted"] == alone["predicted"]
        if kind == "clip":
            assert [log["heads_over_threshold"] for log in together["history"]][:2] == [12, 4]
        if kind == "taught":
            assert together["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
        if kind == "llama":
            assert {"max_logit", "max_logit/layer_0", "max_logit/layer_1"} <= set(together["history"][0])
        for checkpoint in checkpoints:
            assert_same_checkpoint(two / checkpoint, one / kind / checkpoint)
    if name != "zero3":
        for checkpoint in (".", "averaged"):
            whole, resumed = (
                load_file(tmp_path / "two" / kind / checkpoint / "model.safetensors") for kind in list(runs)[:2]
            )
            assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        files = [file.name for file in (tmp_path / "two" / "plain" / "checkpoint-3").glob("averaged*")]
        shards = [f"averaged-{number:05d}-of-{processes:05d}.safetensors" for number in range(1, processes + 1)]
        assert sorted(files) == (["averaged.safetensors"] if name == "cpu" else shards)
    if "bad" not in runs:
        return
    assert "the loss of step 3 is not finite (first non-finite values: a batch of another process)" in output
    assert "the loss of step 3 is not finite (first non-finite values: `model.layers.0.mlp.down_proj`)" in output


def assert_same_checkpoint(found: Path, expected: Path):
    """The same weights, configuration and code."""
    model, info = AutoModelForCausalLM.from_pretrained(found, output_loading_info=True)
    assert not any(info.values()), info
    wanted = AutoModelForCausalLM.from_pretrained(expected)
    # A step of Adam moves a weight by up to the learning rate, 0.01.
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=1e-5)
    assert (found / "config.json").read_text("utf-8") == (expected / "config.json").read_text("utf-8")
    code = {file.name for file in expected.glob("*.py")}
    assert "modeling_lsgpt.py" in code or model.config.model_type == "llama"
    assert code <= {file.name for file in found.glob("*.py")}


SHARDED = """
import sys
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
import lsgpt
from lsgpt.training import AveragedWeightsCallback

folder = sys.argv[1]
args = TrainingArguments(
    folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=3, learning_rate=0.01, save_strategy="no",
    adam_epsilon=1e-4,  # above rounding
    per_device_train_batch_size=8 // int(sys.argv[2]),
)
sharding = {"distributed_config": DistributedConfig(fsdp_size=2)} if args.world_size > 1 else {}
model = AutoModelForCausalLM.from_pretrained(folder + "/start", **sharding)
rows = [{"input_ids": [(7 * i + j * j) % 97 for j in range(12)]} for i in range(24)]
data = [{**row, "labels": row["input_ids"]} for row in rows]
trainer = Trainer(model, args, train_dataset=data, callbacks=[AveragedWeightsCallback("ema", decay=0.5)])
trainer.train()
trainer.save_model(folder + "/raw")
"""


def test_a_model_that_transformers_has_sharded(tiny_model, tmp_path):
    """By `from_pretrained`, and not by Accelerate: all processes save it together."""
    for processes in (1, 2):
        tiny_model(vocab_size=97).save_pretrained(tmp_path / str(processes) / "start")
        fresh.run_together(processes, "-c", SHARDED, tmp_path / str(processes), processes, CUDA_VISIBLE_DEVICES="")
    norms = []
    for name in ("averaged", "raw"):
        one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / count / name).state_dict() for count in ("1", "2"))
        torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
        norms.append(two["model.norm.weight"])
    assert not torch.equal(*norms)


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import ContextParallelismConfig

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == 1:
            Path(args.output_dir, "killed_at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

rows = torch.randint(16, (99, 16), generator=torch.Generator().manual_seed(0)).tolist()
config = LSGPTConfig(
    vocab_size=16, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, resid_dropout=0.1
)
for kind in sys.argv[2:]:
    folder = Path(sys.argv[1], "killed" if kind == "resumed" else kind)
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", max_steps=5, save_steps=2, learning_rate=0.01,
        parallelism_config=ContextParallelismConfig(cp_size=2),
    )
    torch.manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    callbacks = [Kill()] if kind == "killed" else []
    trainer = Trainer(LSGPTForCausalLM(config), args, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=kind == "resumed")
    trainer.save_model()
"""


def test_a_killed_process_ends_the_others_that_share_its_rows_and_the_run_goes_on(tmp_path):
    """Within a minute, and with the weights of a run that was left alone, to the bit."""
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    launcher = launch("cpu", tmp_path / "killed.py", tmp_path, "whole", "killed", options=["--main_process_port", "0"])
    assert launcher.wait(timeout=180) not in (0, None)
    assert time.time() - float((tmp_path / "killed" / "killed_at").read_text()) < 60
    assert "Signal 9 (SIGKILL)" in launcher.errors
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    fresh.run_together(2, "-c", KILLED, tmp_path, "resumed", ACCELERATE_USE_CPU="true")
    whole, resumed, before = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "killed", "killed/checkpoint-2")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not all(torch.equal(whole[name], before[name]) for name in whole)
