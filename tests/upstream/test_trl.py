"""What we rely on in TRL beyond what it promises, one test for each thing."""

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def test_trl_grpo_trainer_asks_the_methods_that_are_overridden(tmp_path):
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    asked, batches = [], []

    class Asked(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *others):
            asked.append("_generate_single_turn")
            assert prompt_ids == [[2]] * 4 and images is None and not others
            return [[2, 1]] * 3 + [[2, 2, 1]], None

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            asked.append("_generate_and_score_completions")
            assert output["completion_ids"].tolist() == [[2, 1, 0]] * 3 + [[2, 2, 1]]
            assert output["num_items_in_batch"] == output["completion_mask"].sum() == 9
            return {**output, "extra": torch.arange(24).view(4, 3, 2)}

        def _get_per_token_logps_and_entropies(
            self,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=None,
            compute_entropy=False,
            compute_aux_loss=False,
            **others,
        ):
            asked.append("_get_per_token_logps_and_entropies")
            assert not any(value is not None for value in others.values())
            assert input_ids.shape == attention_mask.shape and logits_to_keep == 3
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
            )

        def _compute_loss(self, model, inputs):
            asked.append("_compute_loss")
            batches.append(inputs["extra"])
            loss = super()._compute_loss(model, inputs)
            unmasked = super()._compute_loss(
                model, {**inputs, "tool_mask": torch.zeros_like(inputs["completion_ids"])}
            )
            assert unmasked == 0
            return loss

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    args = trl.GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        per_device_train_batch_size=2,
        steps_per_generation=2,
        num_generations=4,
    )
    data = datasets.Dataset.from_dict({"prompt": ["a"]})
    trainer = Asked(model, lambda completion_ids, **_: [1.0, 2.0, 3.0, 4.0], args, data, processing_class=tokenizer)
    assert (trainer.eos_token_ids[0], trainer._tokenizer.pad_token_id) == (1, 0)
    assert not (trainer.tools or trainer.rollout_func or trainer.environment_factories or trainer._is_vlm)
    assert not trainer.aux_loss_enabled and trainer.max_completion_length == args.max_completion_length
    trainer.train()
    scoring = ["_get_per_token_logps_and_entropies"]
    step = ["_compute_loss", *scoring, *scoring]
    assert asked == ["_generate_single_turn", *scoring, "_generate_and_score_completions", *step, *step]
    assert sorted(torch.cat(batches).flatten().tolist()) == list(range(24))  # every row once, in either batch


def test_trl_unwrap_model_for_generation_turns_gradient_checkpointing_off(trainer):
    models = pytest.importorskip("trl.models")
    sizes = {"vocab_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, intermediate_size=8)).train()
    model.gradient_checkpointing_enable()
    with models.unwrap_model_for_generation(model, trainer().accelerator) as unwrapped:
        assert unwrapped is model and not model.is_gradient_checkpointing
    assert model.is_gradient_checkpointing


def test_trl_pad():
    pad = pytest.importorskip("trl.trainer.utils").pad
    rows = [torch.tensor([1]), torch.tensor([2, 3])]
    assert pad(rows, 9, padding_side="left").tolist() == [[9, 1], [2, 3]]
