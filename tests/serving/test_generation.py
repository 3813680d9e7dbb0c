"""What vLLM's engine generates, beside Transformers."""

import random

import pytest
import torch

from lsgpt import LSGPTConfig, LSGPTForCausalLM


WITH_SINKS, WITHOUT_SINKS = range(20), range(20, 24)
POSITIONS = ["learned", "sinusoidal", "rope", "none"]
BIASES = [False, True, ["qkv_proj"], ["o_proj"], ["qkv_proj", "o_proj"], ["mlp"]]
ROPE = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def random_config(seed):
    """
    A small configuration. Among the 20 with sinks are all kinds of positions and of biases, and all ways to share out
    heads, but for layers without local heads only: these are among the others.
    """
    rng = random.Random(seed)
    group = rng.choice([1, 1, 2, 3])
    kv_heads = rng.randint(2, 6)

    def count():
        return group * rng.randint(1, kv_heads - 1)

    heads = group * kv_heads
    all_global = [heads, heads if seed in WITHOUT_SINKS else count()]
    position = POSITIONS[seed % 4]
    return LSGPTConfig(
        vocab_size=rng.randint(50, 300),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([20, 32, 36, 64]),  # the CPU build pads 20 to 32 and 36 to 64
        num_global_heads=[count(), [count(), count()], all_global, 0, [0, count()]][seed % 5],
        sliding_window=rng.choice([2, 5, 17, 32, 50, 100]),
        attention_sinks=seed in WITH_SINKS,
        intermediate_size=rng.choice([96, 128]),
        hidden_act=rng.choice(["gelu", "gelu_new", "relu", "silu", "mish"]),
        gated_mlp=rng.random() < 0.5,
        max_position_embeddings=256,
        position_embedding_type=position,
        rope_parameters={"rope_theta": 10_000.0, **ROPE[seed // 4 % 4]} if position == "rope" else None,
        norm_type=rng.choice(["layer_norm", "rms_norm"]),
        use_bias=BIASES[seed % 6],
        qk_norm=rng.random() < 0.5,
        attn_logit_softcapping=rng.choice([None, None, 3.0]),
        attention_dropout=0.1,
        resid_dropout=0.1,
        embd_dropout=0.1,
        initializer_range=0.3,  # logits far apart
        tie_word_embeddings=rng.random() < 0.5,
    )


def save_model(config, folder):
    """A model with random weights, sinks, biases and norms included, saved as a user saves it."""
    config._attn_implementation = "sdpa" if config.attn_logit_softcapping is None else "eager"
    model = LSGPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=2.0)
            elif "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def random_prompts(config, lengths):
    """Lists of token ids."""
    return [torch.randint(config.vocab_size, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("seed", [*WITH_SINKS, *WITHOUT_SINKS])
def test_equals_transformers(seed, tmp_path, start_engine, continue_prompts, assert_equal_greedy):
    """Requests of many lengths around the window and the cache's blocks, more of them than run at once."""
    config = random_config(seed)
    model = save_model(config, tmp_path)
    window = config.sliding_window
    prompts = random_prompts(config, [1, window - 1, window, window + 1, 31, 130, 240])
    chunk = [48, 512][seed % 2]  # long prompts in several steps, among the tokens that other requests generate
    with start_engine(tmp_path, max_num_seqs=4, max_num_batched_tokens=chunk) as llm:
        outputs = continue_prompts(llm, prompts, max_tokens=12)
    assert_equal_greedy(model, prompts, outputs)


def test_random_configurations_cover_the_model():
    """They have everything that `docs/serving.md` says is supported; what can have sinks, with sinks."""
    configs = [random_config(seed) for seed in WITH_SINKS]
    counts = [config.num_global_heads_per_layer for config in configs]
    assert {config.position_embedding_type for config in configs} == set(POSITIONS)
    ropes = [config.rope_parameters for config in configs if config.rope_parameters]
    assert {rope["rope_type"] for rope in ropes} == {rope["rope_type"] for rope in ROPE}
    for field in ("gated_mlp", "qk_norm", "tie_word_embeddings"):
        assert {getattr(config, field) for config in configs} == {False, True}
    assert {config.norm_type for config in configs} == {"layer_norm", "rms_norm"}
    assert all(any(config.use_bias == biases for config in configs) for biases in BIASES)
    assert any(config.attn_logit_softcapping for config in configs)
    assert any(config.num_key_value_heads < config.num_attention_heads for config in configs)
    assert any(config.head_dim * config.num_attention_heads != config.hidden_size for config in configs)
    assert any(max(c) == 0 for c in counts)
    assert any(0 < c[0] != c[1] > 0 for c in counts)
    assert any(min(c) == 0 < max(c) for c in counts)
    assert all(min(c) < config.num_attention_heads for c, config in zip(counts, configs))
    others = [random_config(seed) for seed in WITHOUT_SINKS]
    assert any(min(c.num_global_heads_per_layer) == c.num_attention_heads for c in others)


@pytest.mark.parametrize("position", POSITIONS)
def test_half_precision(position, tiny_config, tmp_path, start_engine, continue_prompts):
    """Every kind of positions, also those that are computed in float32."""
    model = save_model(tiny_config(head_dim=32, attention_sinks=True, position_embedding_type=position), tmp_path)
    (prompt,) = random_prompts(model.config, [60])
    with start_engine(tmp_path, dtype="bfloat16") as llm:
        (output,) = continue_prompts(llm, [prompt], max_tokens=1)
    (logprob,) = output.outputs[0].logprobs[0].values()
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert logprob.logprob == pytest.approx(expected[output.outputs[0].token_ids[0]].item(), abs=0.1)


def test_prefix_caching(tiny_config, tmp_path, start_engine, continue_prompts, assert_equal_greedy):
    """Requests that begin alike share blocks of both kinds of heads."""
    model = save_model(tiny_config(head_dim=32, attention_sinks=True), tmp_path)
    prefix, *ends = random_prompts(model.config, [150, 1, 40, 80])
    prompts = [prefix + end for end in ends]
    with start_engine(tmp_path) as llm:
        first = continue_prompts(llm, prompts[:1], max_tokens=4)
        others = continue_prompts(llm, prompts[1:], max_tokens=12)
    assert first[0].num_cached_tokens == 0
    # Blocks of 32 tokens for 4 local heads are as large as blocks of 64 for 2 global ones: 2 of these are shared.
    assert [output.num_cached_tokens for output in others] == [128, 128]
    assert_equal_greedy(model, prompts, first + others)


def test_layers_with_different_numbers_of_heads(tmp_path, start_engine, continue_prompts, assert_equal_greedy):
    """Six kinds of blocks, some of them padded, in one pool; long prompts in chunks, and a prefix that is shared."""
    config = LSGPTConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_global_heads=[0, 3, 6, 9, 3],
        head_dim=32,
        sliding_window=8,
        attention_sinks=True,
        intermediate_size=96,
        hidden_act="silu",
        gated_mlp=True,
        max_position_embeddings=512,
        position_embedding_type="rope",
        norm_type="rms_norm",
        use_bias=["o_proj"],
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = save_model(config, tmp_path)
    prefix, *ends = random_prompts(config, [200, 1, 40, 80])
    prompts = [prefix + end for end in ends]
    with start_engine(tmp_path, max_model_len=512, max_num_batched_tokens=64) as llm:
        first = continue_prompts(llm, prompts[:1], max_tokens=4)
        others = continue_prompts(llm, prompts[1:], max_tokens=12)
    # Where there are 3 heads, a block holds 32 tokens; with 1 head it holds 96 in as many bytes.
    assert [output.num_cached_tokens for output in others] == [192, 192]
    assert_equal_greedy(model, prompts, first + others)


def test_tensor_parallelism(tmp_path, start_engine, continue_prompts, assert_equal_greedy):
    """Two ranks, each with its share of each kind; the kinds and the layers have different numbers of heads."""
    config = LSGPTConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        num_global_heads=[4, 8],
        head_dim=32,
        sliding_window=8,
        attention_sinks=True,
        gated_mlp=True,
        max_position_embeddings=256,
        position_embedding_type="rope",
        use_bias=True,
        qk_norm=True,
        initializer_range=0.3,
    )
    model = save_model(config, tmp_path)
    prompts = random_prompts(config, [5, 100])
    with start_engine(tmp_path, tensor_parallel_size=2) as llm:
        outputs = continue_prompts(llm, prompts, max_tokens=12)
    assert_equal_greedy(model, prompts, outputs)
