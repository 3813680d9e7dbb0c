"""How many requests the engine says it can hold, beside GPT-2 of the same shape in the same memory."""

from transformers import GPT2Config

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
