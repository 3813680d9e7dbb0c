import math

import pytest
import torch

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import LSGPTConfig, list_presets, list_recipes, load_arms, load_preset, load_recipe


def test_names():
    assert list_presets() == ["demo", "gpt2-small", "paper-12l", "paper-36l", "paper-v1", "smollm2-135m"]
    assert "demo" in list_recipes()


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_is_a_model(name):
    config = load_preset(name)
    assert isinstance(config, LSGPTConfig)
    if name.startswith("paper"):
        assert (config.position_embedding_type, config.hidden_act) == ("learned", "gelu")
        assert not (config.tie_word_embeddings or config.use_bias)


def test_gpt2_small_is_the_default():
    assert load_preset("gpt2-small").to_dict() == LSGPTConfig().to_dict()


@pytest.mark.parametrize(
    ("name", "millions", "with_positions"),
    [("paper-v1", 6.5, False), ("paper-12l", 107, True), ("paper-36l", 847, True)],
)
def test_parameters_of_the_paper(name, millions, with_positions):
    config = load_preset(name)
    count = config.num_parameters()
    if not with_positions:
        count -= config.max_position_embeddings * config.hidden_size
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "length", "share"),
    [("paper-v1", 2048, 0.187), ("paper-12l", 2048, 0.128), ("paper-12l", 8192, 0.095), ("paper-36l", 8192, 0.062)],
)
def test_cache_shares_of_the_paper(name, length, share):
    config = load_preset(name)
    assert config.kv_cache_bytes(length) / config.equal_mhsa().kv_cache_bytes(length) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("name", ["demo", "smollm2-135m"])
def test_counted_parameters_are_the_models(name):
    config = load_preset(name)
    with torch.device("meta"):
        assert config.num_parameters() == LSGPTForCausalLM(config).num_parameters()


def test_smollm2():
    """SmolLM2-135M has 134,515,008 parameters; to them come the sinks of 6 local heads in each of 30 layers."""
    config = load_preset("smollm2-135m")
    assert config.num_parameters() == 134_515_008 + 30 * 6
    assert config.equal_mhsa().num_parameters() == 134_515_008
    share = config.kv_cache_bytes(8192) / config.equal_mhsa().kv_cache_bytes(8192)
    assert share == pytest.approx((8192 + 2 * 128) / (3 * 8192))
    config = load_preset("smollm2-135m", num_hidden_layers=2, vocab_size=4000)
    model = LSGPTForCausalLM(config)
    ids = torch.randint(config.vocab_size, (2, 200))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # Logits of variance 1, because the embeddings have 1 / sqrt(hidden_size): the uniform guess, and half a nat.
    assert loss == pytest.approx(math.log(config.vocab_size) + 0.5, abs=0.2)


def test_overrides():
    config = load_preset("demo", hidden_size=48, num_global_heads=2)
    assert (config.hidden_size, config.head_dim, config.num_global_heads) == (48, 8, 2)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"paper-v1, smollm2-135m; got 'paper-v2'; did you mean 'paper-v1'\?"):
        load_preset("paper-v2")
    with pytest.raises(ValueError, match="no field 'slidng_window'; did you mean 'sliding_window'"):
        load_preset("demo", slidng_window=3)
    with pytest.raises(ValueError, match="got 'dmeo'; did you mean 'demo'"):
        load_recipe("dmeo")


def test_impossible_values_are_value_errors():
    with pytest.raises(ValueError, match="`sliding_window` must be at least 2"):
        load_preset("demo", sliding_window=1)
    with pytest.raises(ValueError, match="`hidden_size` must be of type int; got 'wide'"):
        load_preset("demo", hidden_size="wide")


def test_broken_recipes(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("[unclosed")
    with pytest.raises(ValueError, match=r"recipe\.yaml is not valid YAML"):
        load_recipe(recipe)
    recipe.write_text("just text")
    with pytest.raises(ValueError, match="must be a mapping from names to values; got str"):
        load_recipe(recipe)


def test_arms_of_a_file_replace_the_shipped_ones(tmp_path):
    arms = tmp_path / "arms.yaml"
    arms.write_text("ls: {z_loss: 0.5}\nmine: {qk_norm: true}\n")
    assert load_arms(arms) == {**load_arms(), "ls": {"z_loss": 0.5}, "mine": {"qk_norm": True}}
    arms.write_text("mine: [1]\n")
    with pytest.raises(ValueError, match=r"arm 'mine' must be a mapping from field names to values; got \[1\]"):
        load_arms(arms)
