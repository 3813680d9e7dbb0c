"""How many requests the engine says it can hold, beside a model whose heads are all global, in the same memory."""

import json

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lsgpt import LSGPTConfig
from lsgpt.benchmarks import serving


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


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """`lsgpt bench serving` at its smallest, without the environment, which names packages that serving needs not."""
    monkeypatch.setattr(serving, "begin_result", lambda *command: {"environment": {}})
    monkeypatch.delitem(serving.SHAPES, "mhsa")  # another start of vLLM

    def run(*arguments):
        output = tmp_path / "serving.json"
        serving.main([*arguments, "--batched_tokens", "512", "--block_sizes", "128", "--output", str(output)])
        return json.loads(output.read_text(encoding="utf-8"))

    return run


def test_holds_more_requests_than_gpt2(bench):
    """One global head of 12 and a window of 100: more than 5.5 times as many."""
    result = bench()
    requests = {row["model"]: row["requests"] for row in result["rows"]}
    assert requests["lsgpt"] >= 5.5 * requests["gpt2"]
    assert [version.startswith("0.3") for version in result["environment"].values()] == [True]  # vLLM's


def test_continues_passages_as_transformers_does(bench, tiny_model, tmp_path):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["Whoever reads this"], vocab_size=270)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=LENGTH).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Whoever reads all of this has some time. " * 400, encoding="utf-8")
    options = ["--text", str(tmp_path / "text.txt"), "--new_tokens", "5", "--dtype", "float32"]
    (row,) = bench(str(tmp_path / "model"), *options)["rows"]
    assert row["equal_tokens"] == [5] * len(serving.PASSAGES)


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
