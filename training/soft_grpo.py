"""
SofT-GRPO (arXiv:2511.06411): reinforcement learning of soft thinking, on TRL's `GRPOTrainer`.

Rollouts and the log-probabilities of their steps are those of `lsgpt.training.soft_thinking`. Advantages, the clipped
loss and the divergence from the reference model are TRL's. This module needs TRL, so `lsgpt.training` does not import
it. What it relies on in TRL beyond what that promises is checked by `tests/upstream/test_trl.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.hf_argparser import HfArg

from .soft_thinking import (
    SAMPLING_FIELDS,
    STEP_FIELDS,
    check_decoder,
    check_sampling,
    completion_log_probs,
    embed_steps,
    find_end_of_thinking,
    generate_soft_thinking,
    in_float32,
    run_decoder,
)


try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.models import unwrap_model_for_generation
    from trl.trainer.utils import pad
except ImportError as error:
    raise ImportError("SofT-GRPO needs the package trl: in a clone of lsgpt, pip install '.[rl]'") from error


@dataclass
class SoftGRPOConfig(GRPOConfig):
    """
    TRL's `GRPOConfig` with four more fields for soft thinking, and with the published values as defaults, except for
    lengths and batch sizes: those of the paper's script, or of verl where the script sets none.

    Raises:
        ValueError: If a value is out of range, or soft thinking does not support an option of TRL.
    """

    gumbel_temperature: float = HfArg(default=0.1, help="Temperature tau of the weights of a soft step, positive.")
    noise_factor: float = HfArg(default=1.0, help="Scale of the Gumbel noise of a soft step, positive; published: 1.")
    end_of_thinking: str = HfArg(default="</think>", help="The token of the tokenizer that ends the soft thinking.")
    max_thinking_tokens: int | None = HfArg(
        default=None,
        help="Number of soft steps after which the end-of-thinking token is inserted, which is not trained on; by "
        "default, only `max_completion_length` limits the thinking.",
    )

    temperature: float = HfArg(default=1.0, help="Divides the logits, while thinking and after it.")
    top_k: int = HfArg(default=5, help="Number of candidates, while thinking and after it; at least 1.")
    top_p: float = HfArg(default=0.95, help="Share of their probability to keep, while thinking and after it.")
    beta: float = HfArg(default=0.001, help="Weight of the KL divergence from the reference model.")
    epsilon: float = HfArg(default=0.2, help="The ratio is clipped to [1 - epsilon, 1 + epsilon].")
    delta: float | None = HfArg(default=3.0, help="Bound of the ratio where the advantage is negative (dual clip).")
    loss_type: str = HfArg(default="bnpo", help="`bnpo` is the mean over the tokens of a batch.")
    use_bias_correction_kl: bool = HfArg(default=False, help="Whether the ratio multiplies the KL divergence.")
    lr_scheduler_type: str = HfArg(default="constant", help="Schedule of the learning rate.")
    weight_decay: float = HfArg(default=0.01, help="Weight decay of AdamW.")

    def __post_init__(self):
        check_sampling(**self.sampling)
        if self.noise_factor == 0:
            raise ValueError("`noise_factor` must be positive: without noise, soft steps have no density; got 0")
        if self.max_completion_length is None:
            raise ValueError("`max_completion_length` must be set, because it limits a rollout; got None")
        if (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "`use_reentrant` of `gradient_checkpointing_kwargs` must be false: inputs of soft thinking have no "
                "gradients, so that no block would be trained; got True"
            )
        required = {"use_vllm": False, "use_transformers_continuous_batching": False, "use_transformers_paged": False}
        required |= {"cache_implementation": None, "generation_kwargs": None, "min_p": None, "repetition_penalty": 1.0}
        for name, default in required.items():
            if (value := getattr(self, name)) != default:
                raise ValueError(f"`{name}` must be {default}: soft thinking does not support it; got {value!r}")
        super().__post_init__()

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of `generate_soft_thinking` among the fields."""
        return {name: getattr(self, name) for name in SAMPLING_FIELDS}


class SoftGRPOTrainer(GRPOTrainer):
    """
    TRL's `GRPOTrainer` with soft-thinking rollouts, for any decoder that takes `inputs_embeds`.

    All inputs are detached, as published. If input and output embeddings are not tied, the input embeddings are
    therefore not trained. The logits of all completion tokens of a batch of `per_device_train_batch_size` sequences
    are in memory at once. Arguments are those of `GRPOTrainer`; reward functions see the visible tokens.

    Raises:
        ValueError: If a model, a tokenizer or an option cannot be used with soft thinking.
    """

    _tag_names = ["trl", "soft-grpo"]
    _name = "SofT-GRPO"
    _paper = {
        "title": "SofT-GRPO: Surpassing Discrete-Token LLM Reinforcement Learning via Gumbel-Reparameterized "
        "Soft-Thinking Policy Optimization",
        "id": "2511.06411",
    }

    args: SoftGRPOConfig

    def __init__(self, model, reward_funcs=None, args: SoftGRPOConfig = None, *others, **more):
        if not isinstance(args, SoftGRPOConfig):
            raise ValueError(f"`args` must be a SoftGRPOConfig; got {type(args).__name__}")
        if isinstance(model, nn.Module):
            check_decoder(model)
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # untied input embeddings have no gradient
        self._rollout = None
        super().__init__(model, reward_funcs, args, *others, **more)
        check_decoder(self.model)
        self.end_of_thinking_id = find_end_of_thinking(self._tokenizer, args.end_of_thinking)
        plugin = args.deepspeed_plugin
        if self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
            raise ValueError(
                "SofT-GRPO mixes embeddings outside the model's `forward`, so their weights cannot be sharded: train "
                "with DDP, or with DeepSpeed ZeRO up to stage 2"
            )
        refused = {
            "tools": self.tools,
            "rollout_func": self.rollout_func,
            "environment_factory": self.environment_factories,
            "processing_class with images": self._is_vlm,
            "router_aux_loss_coef": self.aux_loss_enabled,
        }
        for name, value in refused.items():
            if value:
                raise ValueError(f"`{name}` is not supported by SofT-GRPO, which trains only on prompts and texts")

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """Overrides TRL's method: generates with soft thinking, and keeps the rollout for scoring."""
        if images is not None:
            raise ValueError("the dataset must contain only text: SofT-GRPO does not support images")
        rows = [torch.tensor(ids) for ids in prompt_ids]
        device = self.accelerator.device
        input_ids = pad(rows, self._tokenizer.pad_token_id, padding_side="left").to(device)
        attention_mask = pad([torch.ones_like(row) for row in rows], 0, padding_side="left").to(device)
        with unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        ) as decoder:
            rollout = generate_soft_thinking(
                decoder,
                input_ids,
                attention_mask,
                end_of_thinking_id=self.end_of_thinking_id,
                max_new_tokens=self.max_completion_length,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self._tokenizer.pad_token_id,
                **self.args.sampling,
            )
        self._rollout = rollout._asdict()
        completion_ids = [ids[mask].tolist() for ids, mask in zip(rollout.token_ids, rollout.mask)]
        return completion_ids, None

    def _generate_and_score_completions(self, inputs):
        """Overrides TRL's method: adds to the batch what scoring needs from the rollout."""
        output = super()._generate_and_score_completions(inputs)
        rollout, self._rollout = self._rollout, None
        length = output["completion_ids"].shape[1]
        for name in STEP_FIELDS:
            output[name] = _pad_steps(rollout[name], length)
        if self.args.max_thinking_tokens is not None:  # tokens that the model did not choose are not trained on
            output["tool_mask"] = 1 - _pad_steps(rollout["is_forced"], length).int()
            count = (output["completion_mask"] * output["tool_mask"]).sum()
            output["num_items_in_batch"] = self.accelerator.gather(count).sum()
        thinking = self.accelerator.gather(rollout["is_soft"].sum(-1)).float().mean().item()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["completions/mean_thinking_length"].append(thinking)
        return output

    def _compute_loss(self, model, inputs):
        """Overrides TRL's method: computes the same loss, with the log-probabilities of soft steps."""
        self._rollout = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._rollout = None

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **ignored
    ):
        """Overrides TRL's method: inputs are embeddings, and soft steps are scored by the density of their noise."""
        embeddings = self.accelerator.unwrap_model(model).get_input_embeddings()
        all_steps = [_pad_steps(self._rollout[name], logits_to_keep) for name in STEP_FIELDS]
        train_entropy = torch.is_grad_enabled() and (self.args.entropy_coef != 0 or self.args.use_adaptive_entropy)
        log_probs, entropies = [], []
        batch_size = batch_size or len(input_ids)
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            prompt_ids, token_ids = input_ids[rows, :-logits_to_keep], input_ids[rows, -logits_to_keep:]
            steps = [tensor[rows] for tensor in all_steps]
            with torch.no_grad():
                soft = embed_steps(embeddings, token_ids, *steps, self.args.gumbel_temperature)
                inputs_embeds = torch.cat([embeddings(prompt_ids), soft], dim=1)
            with self.accelerator.autocast():
                outputs = run_decoder(model, inputs_embeds, attention_mask[rows], logits_to_keep + 1, use_cache=False)
            logits = outputs.logits[:, -logits_to_keep - 1 : -1]
            is_padding = attention_mask[rows, -logits_to_keep:] == 0
            scores = completion_log_probs(logits, token_ids, *steps, self.temperature, self.args.noise_factor)
            log_probs.append(scores.masked_fill(is_padding, 0))
            if compute_entropy:
                with torch.set_grad_enabled(train_entropy):  # usually only logged, and its graph is large
                    distribution = (in_float32(logits) / self.temperature).log_softmax(-1)
                    entropies.append(-(distribution.exp() * distribution).sum(-1).masked_fill(is_padding, 0))
        return torch.cat(log_probs), torch.cat(entropies) if compute_entropy else None, None


def _pad_steps(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Pads `(B, C, ...)` with zeros at the end, up to `(B, length, ...)`."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, length - tensor.shape[1]))
