"""The configuration: what it refuses and how, what it derives, what survives a file, and what things cost."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from lsgpt import LSGPTConfig, LSGPTForCausalLM, LSGPTForSequenceClassification


ROPE = {"position_embedding_type": "rope"}

BAD_VALUES = {
    "window of one": ({"sliding_window": 1}, "`sliding_window` must be at least 2"),
    "negative window": ({"sliding_window": -5}, "got -5"),
    "unknown sinks": (
        {"attention_sinks": "full-window"},
        "`attention_sinks` must be one of False, True, full_window; got 'full-window'",
    ),
    "heads not divisible": ({"num_attention_heads": 8, "num_key_value_heads": 3}, "divisor of `num_attention_heads`"),
    "heads of a fraction": ({"hidden_size": 100}, "`hidden_size` must be a multiple of `num_attention_heads` (12)"),
    "no heads": ({"num_attention_heads": 0}, "`num_attention_heads` must be a positive integer; got 0"),
    "too many global heads": ({"num_global_heads": 13}, "`num_global_heads` must be between 0"),
    "negative global heads": ({"num_global_heads": -1}, "got -1"),
    "group split between kinds": (
        {"num_key_value_heads": 4, "num_global_heads": 1},
        "`num_global_heads` must be a multiple of the 3 query heads that share a key/value head",
    ),
    "list too short": ({"num_global_heads": [1, 2]}, "one number for each of the 12 layers"),
    "unknown position type": ({"position_embedding_type": "alibi"}, "learned, sinusoidal, rope, none; got 'alibi'"),
    "odd head with rope": ({"head_dim": 7, "position_embedding_type": "rope"}, "`head_dim` must be even"),
    "odd width with sinusoids": ({"hidden_size": 65, "position_embedding_type": "sinusoidal"}, "`hidden_size`"),
    "rope parameters without rope": ({"rope_parameters": {"rope_theta": 5e5}}, "`rope_parameters` must be unset"),
    "unknown rope type": (
        {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "spiral"}},
        "`rope_parameters` must be a dictionary whose `rope_type` is one of default",
    ),
    "partial rotation": (
        {"position_embedding_type": "rope", "rope_parameters": {"partial_rotary_factor": 0.5}},
        "rotates whole heads",
    ),
    "rope theta of zero": ({**ROPE, "rope_theta": 0}, "`rope_theta` is a positive number; got {'rope_theta': 0"),
    "negative rope theta": ({**ROPE, "rope_parameters": {"rope_theta": -1}}, "got {'rope_theta': -1"),
    "rope theta as text": (
        {**ROPE, "rope_theta": "1e4"},
        "`rope_theta` is a positive number; got {'rope_theta': '1e4'",
    ),
    "rope factor of zero": (
        {**ROPE, "rope_parameters": {"rope_type": "linear", "factor": 0}},
        "`rope_parameters` must be a dictionary whose `factor` is a positive number",
    ),
    "rope type without what it needs": (
        {**ROPE, "rope_parameters": {"rope_type": "yarn"}},
        "Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}; got {'rope_type': 'yarn'",
    ),
    "rope parameter as text": (
        {**ROPE, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
        "`rope_parameters` are invalid: '<' not supported between instances of 'str' and 'int'; got {'rope_type'",
    ),
    "no rope parameters for one kind": (
        {
            **ROPE,
            "num_global_heads": [0, *[1] * 11],
            "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}},
        },
        "`rope_parameters` must be a dictionary of parameters, or of two such dictionaries; got {'full_attention': No",
    ),
    "rope parameters for each kind": (
        {**ROPE, "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}},
        "`rope_parameters` must be one set of parameters, or one each for 'full_attention' (layers with global heads) "
        "and 'sliding_attention' (layers without), if there are both; `num_global_heads` is 1",
    ),
    "rope parameters for layers without global heads alone": (
        {**ROPE, "num_global_heads": [0, *[1] * 11], "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "`rope_parameters` must be one set of parameters, or one each",
    ),
    "negative rope theta of layers without global heads": (
        {
            **ROPE,
            "num_global_heads": [0, *[1] * 11],
            "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": -1}},
        },
        "`rope_theta` is a positive number",
    ),
    "unknown activation": ({"hidden_act": "gloo"}, "`hidden_act` must be one of"),
    "infinite rope theta": ({**ROPE, "rope_theta": math.inf}, "`rope_theta` is a positive number"),
    "no positions": ({"max_position_embeddings": 0}, "`max_position_embeddings` must be a positive integer; got 0"),
    "negative dropout": ({"embd_dropout": -0.1}, "`embd_dropout` must be a probability in [0, 1); got -0.1"),
    "dropout of one": ({"attention_dropout": 1.0}, "`attention_dropout` must be a probability"),
    "softcap of zero": ({"attn_logit_softcapping": 0.0}, "`attn_logit_softcapping` must be positive"),
    "infinite softcap": ({"attn_logit_softcapping": math.inf}, "`attn_logit_softcapping` must be positive and finite"),
    "softcap that is no number": (
        {"attn_logit_softcapping": math.nan},
        "finite, or None for no soft-capping; got nan",
    ),
    "final softcap of zero": ({"final_logit_softcapping": 0.0}, "`final_logit_softcapping` must be positive"),
    "unknown norm": (
        {"norm_type": "batch_norm"},
        "`norm_type` must be one of layer_norm, rms_norm, rms_norm_after, rms_norm_around; got 'batch_norm'",
    ),
    "unknown norm of queries": ({"qk_norm": "each"}, "`qk_norm` must be one of False, True, all_heads; got 'each'"),
    "bias of an RMSNorm after": ({"norm_type": "rms_norm_after", "use_bias": ["norm"]}, "`use_bias` must be without"),
    "bias of an unknown part": ({"use_bias": ["q_proj"]}, "biases, of qkv_proj, o_proj, mlp, norm; got ['q_proj']"),
    "bias of an RMSNorm": ({"norm_type": "rms_norm", "use_bias": ["norm"]}, '`use_bias` must be without "norm"'),
    "no layers": ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive integer"),
    "no vocabulary": ({"vocab_size": 0}, "`vocab_size` must be a positive integer"),
    "unknown dtype": ({"dtype": "bf16"}, '`dtype` must be the name of a PyTorch dtype, such as "bfloat16"; got'),
    "unknown dtype by its old name": ({"torch_dtype": "half16"}, "`dtype` must be the name of a PyTorch dtype"),
    "dtype that is none": ({"dtype": "nn"}, "`dtype` must be the name of a PyTorch dtype"),
    "epsilon of zero": ({"layer_norm_eps": 0.0}, "`layer_norm_eps` must be positive"),
    "weights of zero": ({"initializer_range": 0.0}, "`initializer_range` must be positive"),
    "infinite weights": ({"initializer_range": math.inf}, "`initializer_range` must be positive and finite"),
    "no dropout of outputs": ({"resid_dropout": 1.0}, "`resid_dropout` must be a probability"),
    "no dropout of embeddings": ({"embd_dropout": 1.0}, "`embd_dropout` must be a probability"),
    "negative width": ({"hidden_size": -12}, "`hidden_size` must be a positive integer; got -12"),
    "negative head": ({"head_dim": -1}, "`head_dim` must be a positive integer; got -1"),
    "negative inner width": ({"intermediate_size": -1}, "`intermediate_size` must be a positive integer; got -1"),
}


@pytest.mark.parametrize(("values", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_name_field_rule_and_value(values, message):
    with pytest.raises(ValueError) as error:
        LSGPTConfig(**values)
    assert message in str(error.value)


def test_whole_numbers_are_numbers():
    config = LSGPTConfig(layer_norm_eps=1, initializer_range=1, attn_logit_softcapping=30)
    assert (config.layer_norm_eps, config.initializer_range, config.attn_logit_softcapping) == (1, 1, 30)


def test_wrong_types_are_refused():
    with pytest.raises(Exception, match="'sliding_window' expected int, got str"):
        LSGPTConfig(sliding_window="100")


def test_values_are_checked_again_on_save(tmp_path):
    config = LSGPTConfig()
    config.num_global_heads = 99
    with pytest.raises(Exception, match="`num_global_heads` must be between 0"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 0, "`sliding_window` must be at least 2"),
        ("num_global_heads", 9, "`num_global_heads` must be between 0"),
        ("position_embedding_type", "alibi", "`position_embedding_type` must be one of"),
        (
            "position_embedding_type",
            "rope",
            '`rope_parameters` must be a dictionary with `position_embedding_type="rope"`',
        ),
        ("num_key_value_heads", None, "`num_key_value_heads` must be a positive integer; got None"),
    ],
)
def test_values_are_checked_again_when_a_model_is_built(tiny_config, field, value, message):
    config = tiny_config()
    setattr(config, field, value)
    for model in (LSGPTForCausalLM, LSGPTForSequenceClassification):
        with pytest.raises(ValueError, match=message):
            model(config)


def test_unknown_arguments_warn_and_suggest(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        LSGPTConfig(slidng_window=64, num_labels=3, classifier_dropout=0.5, hidden_dropout=0.5)
    assert "no field `slidng_window`" in caplog.text and "did you mean `sliding_window`?" in caplog.text
    assert "no field `hidden_dropout`" in caplog.text  # which Transformers' own classifiers use
    assert not any(name in caplog.text for name in ("num_labels", "classifier_dropout"))
    caplog.clear()
    with caplog.at_level("WARNING"):
        LSGPTConfig(num_hidden_layers=1, layer_types=["full_attention", "sliding_attention"])
        assert not caplog.text
        LSGPTConfig(num_hidden_layers=1, layer_types=["full_attention"])
    assert "derives `layer_types` from `num_global_heads`" in caplog.text
    with pytest.raises(ValueError, match="`per_layer_config` must be unset, because `num_global_heads`"):
        LSGPTConfig(per_layer_config=[LSGPTConfig()])


@pytest.mark.parametrize("values", [{"rope_theta": 5e5}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}])
def test_arguments_of_rotary_positions_need_them(values):
    with pytest.raises(ValueError, match=f"`{next(iter(values))}` must be unset without `position_embedding_type="):
        LSGPTConfig(**values)
    assert (
        LSGPTConfig(position_embedding_type="rope", **values).rope_parameters.items()
        >= values.get("rope_scaling", values).items()
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_global_heads": [0, 12, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]},
        {"position_embedding_type": "rope", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"norm_type": "rms_norm", "gated_mlp": True, "use_bias": ["qkv_proj"], "attention_sinks": True},
        {"attn_logit_softcapping": 30.0, "qk_norm": True, "use_bias": True, "head_dim": 40, "num_key_value_heads": 12},
        {"norm_type": "rms_norm_after", "qk_norm": "all_heads", "final_logit_softcapping": 30.0},
        {
            "position_embedding_type": "rope",
            "num_global_heads": [0, *[1] * 11],
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        },
    ],
)
def test_round_trip_through_json(tmp_path, caplog, values):
    config = LSGPTConfig(**values)
    config.save_pretrained(tmp_path)
    caplog.clear()
    for loaded in (LSGPTConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert loaded.to_diff_dict() == config.to_diff_dict()
    assert not caplog.records
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "layer_types" not in written and written["auto_map"]["AutoModelForCausalLM"]


def test_at_most_30_fields():
    own = set(LSGPTConfig.__dataclass_fields__) - set(LSGPTConfig.__mro__[1].__dataclass_fields__)
    assert len(own) <= 30, sorted(own)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"use_bias": True, "qk_norm": True, "num_key_value_heads": 3},
        {"position_embedding_type": "rope", "tie_word_embeddings": True, "intermediate_size": 50},
        {"head_dim": 5, "num_global_heads": [0, 6]},
        {"norm_type": "rms_norm", "gated_mlp": True, "use_bias": True, "attention_sinks": True},
        {"gated_mlp": True, "use_bias": ["qkv_proj", "norm"], "attention_sinks": True, "num_global_heads": [6, 2]},
        {"use_bias": ["o_proj", "mlp"], "num_key_value_heads": 3},
        {"use_bias": ["norm", "mlp", "o_proj", "qkv_proj"]},
        {"norm_type": "rms_norm_after", "qk_norm": "all_heads", "num_key_value_heads": 3},
        {"norm_type": "rms_norm_around", "use_bias": True},
    ],
)
def test_parameter_count_is_the_models(tiny_config, values):
    config = tiny_config(**values)
    assert config.num_parameters() == LSGPTForCausalLM(config).num_parameters()


@pytest.mark.parametrize("values", [{}, {"num_key_value_heads": 3}, {"num_global_heads": [0, 6], "gated_mlp": True}])
def test_flops_are_those_of_the_visible_pairs(tiny_config, values):
    """Counts the pairs one by one, and the matrices from the model's weights."""
    config = tiny_config(**values)
    weights = sum(
        p.numel() for name, p in LSGPTForCausalLM(config).named_parameters() if p.ndim == 2 and "embed" not in name
    )
    for length in (1, 5, 8, 9, 200):
        pairs = 0
        for count in config.num_global_heads_per_layer:
            for head in range(config.num_attention_heads):
                reach = length if head < count else config.sliding_window
                pairs += sum(min(position + 1, reach) for position in range(length))
        assert config.flops_per_token(length) == pytest.approx(2 * weights + 4 * config.head_dim * pairs / length)
    assert config.equal_mhsa().flops_per_token(8) == pytest.approx(config.flops_per_token(8))
    assert config.equal_mhsa().flops_per_token(200) > config.flops_per_token(200)


@pytest.mark.parametrize("values", [{}, {"num_key_value_heads": 3}, {"num_global_heads": [0, 6]}])
def test_cache_bytes_are_the_caches(tiny_model, values):
    model = tiny_model(**values)
    cache = DynamicCache(config=model.config)
    for length in range(1, 20):
        with torch.no_grad():
            model(torch.randint(97, (1, 1)), past_key_values=cache, use_cache=True)
        held = sum(x.numel() * 4 for layer in cache.layers for x in (layer.keys, layer.values))
        window = model.config.sliding_window
        one_more = sum(
            view.num_key_value_heads
            for kind, view in zip(model.config.layer_types, model.config.per_layer_config)
            if kind == "sliding_attention" and length >= window
        )
        # The stock dynamic cache keeps W - 1 tokens of a window of W; the formula counts W.
        assert held + 2 * model.config.head_dim * one_more * 4 == model.config.kv_cache_bytes(length, 4)


def test_documented_defaults():
    assert LSGPTConfig().layer_norm_eps == 1e-5
    assert LSGPTConfig().kv_cache_bytes(9) == LSGPTConfig().kv_cache_bytes(9, bytes_per_value=2)


def test_rotary_embeddings_of_equal_mhsa_are_those_of_the_global_heads(tiny_config):
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    rope_parameters = {kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in kinds.items()}
    config = tiny_config(position_embedding_type="rope", num_global_heads=[0, 2], rope_parameters=rope_parameters)
    assert config.equal_mhsa().rope_parameters["rope_theta"] == 1e6
    LSGPTForCausalLM(config.equal_mhsa())
