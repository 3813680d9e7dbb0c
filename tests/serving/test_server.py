"""The OpenAI-compatible server over HTTP: its own processes, the compiled model, text in and text out."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


START_SECONDS = 900


@pytest.fixture
def checkpoint(tiny_model, tmp_path, request):
    """A model and its tokenizer, and the folder that has both. A parameter is the number of layers."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["def f(x):\n    return x"], vocab_size=270)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    # The server pads the heads to 32.
    blocks = {"norm_type": "rms_norm", "gated_mlp": True, "position_embedding_type": "rope", "attention_sinks": True}
    layers = getattr(request, "param", 2)
    model = tiny_model(vocab_size=len(tokenizer), head_dim=20, num_hidden_layers=layers, **blocks)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture
def server(checkpoint, tmp_path):
    """The address of a server of that folder."""
    port = fresh.find_port()
    # What `vllm serve` runs. That command itself does not start in the CPU build, which has no package named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint[2])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "lsgpt"]
    command += ["--dtype", "float32", "--kv-cache-memory-bytes", str(2**26)]
    environment = environment_of_users()
    environment["VLLM_CACHE_ROOT"] = str(tmp_path / "cache")  # compile here and now
    log = tmp_path / "log"
    address = f"http://127.0.0.1:{port}"
    with open(log, "w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_up(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log.read_text()[-5000:]}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # a server that is just starting may miss the signal
                process.kill()


def environment_of_users():
    """Without what `conftest.py` sets for engines in the process of the tests: these models are compiled."""
    own = "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE"
    return {name: value for name, value in os.environ.items() if name not in own}


def is_up(address):
    """Whether the server says that it is ready."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def test_completions(server, checkpoint):
    """Concurrent requests get what the model continues them with in Transformers."""
    model, tokenizer, _ = checkpoint
    prompts = ["def", "def f(x):\n    return x", "x" * 100]

    def complete(prompt):
        body = {"model": "lsgpt", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        request = urllib.request.Request(
            f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]

    with ThreadPoolExecutor() as pool:
        choices = list(pool.map(complete, prompts))
    for prompt, choice in zip(prompts, choices):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
        assert choice["token_ids"] == tokens.tolist()
        assert choice["text"] and tokenizer.decode(tokens).startswith(choice["text"])


@pytest.mark.parametrize("checkpoint", [1], indirect=True)  # a layer less to compile
def test_snippet_of_the_model_cards(checkpoint, tmp_path):
    """The one for vLLM runs as printed, with the folder put in."""
    card = (Path(__file__).parents[2] / "model_cards" / "demo.md").read_text(encoding="utf-8")
    snippet = next(block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "import LLM" in block)
    (tmp_path / "snippet.py").write_text(snippet.replace("runs/demo", str(checkpoint[2])), encoding="utf-8")
    environment = environment_of_users()
    environment |= {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(tmp_path / "snippet.py")]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    assert result.stdout.strip()
