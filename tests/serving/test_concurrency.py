"""How many requests the engine says it can hold, beside a model whose heads are all global, in the same memory."""

from transformers import GPT2Config, LlamaConfig

from lsgpt import LSGPTConfig


LENGTH = 8192


def maximum_concurrency(config, architecture, folder, start_engine):
    """What the engine logs as "Maximum concurrency for 8,192 tokens per request", with the flags of the docs."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": LENGTH,
        "max_num_batched_tokens": 512,
        "block_size": None,  # vLLM's default
        "kv_cache_memory_bytes": 2**30,
    }
    with start_engine(folder, **options) as llm:
        return llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency


def test_holds_more_requests_than_gpt2(tmp_path, start_engine):
    """One global head of 12 and a window of 100: more than 5.5 times as many."""
    gpt2 = maximum_concurrency(GPT2Config(n_positions=LENGTH), "GPT2LMHeadModel", tmp_path / "gpt2", start_engine)
    lsgpt = maximum_concurrency(
        LSGPTConfig(max_position_embeddings=LENGTH), "LSGPTForCausalLM", tmp_path / "lsgpt", start_engine
    )
    print(f"maximum concurrency: GPT-2 {gpt2:.2f}, LSGPT {lsgpt:.2f}, {lsgpt / gpt2:.2f} times as many")
    assert lsgpt >= 5.5 * gpt2


def test_holds_more_requests_than_llama(tmp_path, start_engine):
    """SmolLM2-135M's shape, 15 of 90 key/value heads global and a window of 128: more than 3.2 times as many."""
    shape = {
        "vocab_size": 97,
        "hidden_size": 72,  # the cache does not depend on these two
        "intermediate_size": 64,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": LENGTH,
    }
    llama = maximum_concurrency(LlamaConfig(**shape), "LlamaForCausalLM", tmp_path / "llama", start_engine)
    # How many layers have 0, 1, 2 and 3 global key/value heads. vLLM pads blocks of 2 to those of 3.
    for share in [(15, 15, 0, 0), (20, 6, 3, 1)]:
        num_global_heads = [3 * kv_heads for kv_heads, layers in enumerate(share) for _ in range(layers)]
        converted = LSGPTConfig(
            num_global_heads=num_global_heads,
            sliding_window=128,
            attention_sinks=True,
            gated_mlp=True,
            position_embedding_type="rope",
            norm_type="rms_norm",
            use_bias=["o_proj"],
            **shape,
        )
        lsgpt = maximum_concurrency(converted, "LSGPTForCausalLM", tmp_path / "lsgpt", start_engine)
        print(f"maximum concurrency: Llama {llama:.2f}, LSGPT {lsgpt:.2f}, {lsgpt / llama:.2f} times as many {share}")
        assert lsgpt >= 3.2 * llama
