"""
Engines of vLLM's in this very process, small and exact, beside the same model in Transformers.

vLLM is imported late, for the reason that `tests/conftest.py` has.
"""

# ruff: noqa: PLC0415

import contextlib
import gc
import os


os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # tiny tensors: a second thread would cost more than it brings
        "TORCH_COMPILE_DISABLE": "1",  # these engines are eager, but for two small functions of vLLM's
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

import pytest


@pytest.fixture
def start_engine():
    """For a `with` statement: starts an engine on a folder with `LLM`'s options, and ends it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    @contextlib.contextmanager
    def start(folder, **options):
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "block_size": 32,
            "kv_cache_memory_bytes": 2**26,
        }
        gc.freeze()  # an engine collects garbage many times, and would look through all imported modules each time
        llm = LLM(str(folder), **(defaults | options))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()

    return start


@pytest.fixture
def continue_prompts():
    """Continues prompts (lists of token ids) greedily, all together, with an engine: vLLM's request outputs."""
    from vllm import SamplingParams

    def generate(llm, prompts, max_tokens):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


@pytest.fixture
def assert_equal_greedy():
    """Asserts that an engine's outputs are those that the model gives in Transformers, one prompt at a time."""
    import torch

    @torch.no_grad()
    def check(model, prompts, outputs):
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=len(tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logprobs = torch.cat(expected.logits).log_softmax(-1)
            best, second = logprobs.topk(2).values.unbind(-1)
            # Both compute in float32, and differ by 1e-5: with such a margin equal tokens are no luck.
            assert (best - second).min() > 1e-4, "this model's choices are too close to compare"
            assert list(tokens) == expected.sequences[0, len(prompt) :].tolist(), f"a prompt of {len(prompt)} tokens"
            given = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens)]
            torch.testing.assert_close(torch.tensor(given), best, rtol=0, atol=1e-4)

    return check
