"""The ratios that the engines must reach."""

from lsgpt.configuration import LSGPTConfig, load_preset


TARGETS = {
    ("cpu", "attention", "lsgpt", "mhsa"): {2048: 0.33, 8192: 0.17, 32768: 0.12},
    ("cpu", "prefill", "lsgpt", "gpt2"): {2048: 0.88, 8192: 0.66, 32768: 0.36},
    ("cpu", "prefill", "lsgpt", "limit"): {2048: 1.06, 8192: 1.06, 32768: 1.06},
    ("cpu", "train", "lsgpt-no-logits", "gpt2"): {2048: 0.78, 8192: 0.56},
    ("cpu", "train", "lsgpt", "limit"): {2048: 1.06, 8192: 1.06},
    ("cpu", "decode", "lsgpt", "gpt2"): {2048: 0.85, 8192: 0.42, 32768: 0.25},
    ("cpu", "cache", "lsgpt", "gpt2"): {2048: 0.128, 8192: 0.095, 32768: 0.087},
    ("cuda", "prefill", "lsgpt", "mhsa"): {2048: 0.95, 8192: 0.57, 32768: 0.28},
    ("cuda", "train", "lsgpt", "mhsa"): {2048: 0.95, 8192: 0.57, 32768: 0.30},
    ("cuda", "train", "telemetry", "lsgpt"): {2048: 1.02, 8192: 1.02, 32768: 1.02},
    ("cuda", "decode", "lsgpt", "mhsa"): {2048: 1.0, 8192: 0.5, 32768: 0.25},  # 1, 2 and 4 times the tokens per second
}
"""
Largest allowed ratios, `{(device, benchmark, family, other family): {tokens: ratio}}`: medians of time ratios, or for
`cache` ratios of bytes.

They are for the preset `gpt2-small`, each family on its fastest engine: on 2 CPU cores in float32 with batch 1, and on
an H200 in bfloat16 with batches of 8, 2 and 1, or 16 for decoding. Training over 32,768 tokens has no target on the
CPU, because its logits fill the memory of such a machine. On the CPU, the target for a training step compares LSGPT as
`lsgpt train` runs it, without logits, with a GPT-2 that computes them. The ratio with logits on both sides is printed,
too, and so is the ratio to `mhsa`, which shows the effect of the kinds of heads alone.
"""

SMOLLM2_TARGETS = {
    ("cpu", "prefill", "lsgpt", "llama"): {8192: 0.65},
    ("cpu", "decode", "lsgpt", "llama"): {8192: 0.45},
    ("cpu", "cache", "lsgpt", "llama"): {8192: 0.20},
}
"""The same for SmolLM2-135M with at most a sixth of its key/value heads global and windows of at most 128 tokens."""

LENGTHS = (2048, 8192, 32768)
"""Numbers of tokens with targets for `gpt2-small`."""


def find_targets(preset: str, config: LSGPTConfig) -> dict:
    """Returns the targets for a model whose shape comes from `preset`: `TARGETS`, `SMOLLM2_TARGETS`, or none."""
    if preset == "gpt2-small":
        return TARGETS
    smollm2 = load_preset("smollm2-135m")
    fields = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    is_smollm2 = all(getattr(config, name) == getattr(smollm2, name) for name in (*fields, "intermediate_size"))
    num_heads = config.num_hidden_layers * config.num_attention_heads
    is_small = 6 * sum(config.num_global_heads_per_layer) <= num_heads and config.sliding_window <= 128
    return SMOLLM2_TARGETS if is_smollm2 and is_small else {}
