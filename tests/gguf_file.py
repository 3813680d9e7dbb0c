"""GGUF files to read."""

import json

import gguf
import numpy as np


def write_gguf(path, source, tokenizer=None, tensors=(), **metadata):
    """The file that llama.cpp's converter makes of a decoder with Llama's blocks, in float32."""
    config, kind = source.config, source.config.model_type.removesuffix("_text")
    is_gemma = kind.startswith("gemma")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if f"{kind}__rope__dimension_count" not in metadata:
        writer.add_rope_dimension_count(head_dim)
    if is_gemma:
        writer.add_key_length(head_dim)
        writer.add_sliding_window(config.sliding_window)
    for name, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    if tokenizer is not None:
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        control = set(tokenizer.all_special_tokens)
        writer.add_token_types([gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens])
        writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)
        if tokenizer.chat_template is not None:
            writer.add_chat_template(tokenizer.chat_template)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in source.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # The rotation of this kind takes neighbours together there.
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        module, _, suffix = name.rpartition(".")
        if is_gemma and "norm" in module:
            tensor = tensor + 1
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", tensor.numpy().copy())
    for name in tensors:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
