import json

from transformers import Trainer, TrainingArguments

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import MetricsFileCallback


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
