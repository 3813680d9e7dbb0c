import json
import logging

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import MetricsFileCallback, StopOnBadLossCallback


def test_metrics_file_holds_the_log_history(tmp_path):
    config = LSGPTConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, sliding_window=4)
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(6)]
    args = TrainingArguments(
        tmp_path, max_steps=3, logging_steps=1, eval_strategy="steps", save_strategy="no", dataloader_pin_memory=False
    )
    trainer = Trainer(
        LSGPTForCausalLM(config), args, train_dataset=rows, eval_dataset=rows, callbacks=[MetricsFileCallback()]
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == trainer.state.log_history
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_bad_loss_ends_the_run_with_the_last_good_weights(tiny_model, tmp_path, caplog, accumulation):
    """A fault in one micro-batch of the third step: an infinity out of one projection."""
    logging.getLogger("transformers").propagate = True
    model = tiny_model().train()
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(64)]
    args = TrainingArguments(
        tmp_path,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    after_step = {}

    class Remember(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            after_step[state.global_step] = {name: p.clone() for name, p in model.state_dict().items()}

    trainer = Trainer(model, args, train_dataset=rows, callbacks=[StopOnBadLossCallback(), Remember()])

    def fault(module, inputs, output):
        return output * float("inf") if trainer.state.global_step == 2 else output

    model.model.layers[1].mlp.down_proj.register_forward_hook(fault)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "the loss of step 3 is not finite" in caplog.text
    assert "`model.layers.1.mlp.down_proj`" in caplog.text
    saved = LSGPTForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in after_step[2].items())
    assert not model.model.layers[0].self_attn._forward_hooks  # it cleans up behind itself


def test_a_loss_from_outside_the_model_is_left_alone(tiny_model, tmp_path):
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(8)]
    args = TrainingArguments(tmp_path, max_steps=2, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    trainer = Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=[StopOnBadLossCallback()])
    trainer.train()
    assert trainer.state.global_step == 2
