"""Weights of nanoGPT, of the paper's code and of GPT-2: converted, they compute what a dense forward pass does."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, GPT2Config, GPT2LMHeadModel

import lsgpt_cli
from lsgpt.conversion import convert, convert_nanogpt, convert_pretrained, load_pretrained, with_global_heads
from lsgpt.training import train_tokenizer


# Both sides compute in float64, whose rounding is far below this; a wrong key more or less is far above.
EXACT = {"rtol": 0, "atol": 1e-10}

SIZES = {"n_layer": 2, "n_head": 5, "n_embd": 24, "block_size": 40, "vocab_size": 61, "dropout": 0.1}
HEAD_DIM = 6  # not 24 / 5
IDS = torch.arange(80).view(2, 40) * 7 % 61


def make_state_dict(projections, bias=False, width=24, size=30, inner=84, dtype=torch.float64):
    """Random weights under nanoGPT's names; `projections` has the number of heads that each `attn.c_*` serves."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=0.4):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    weights = {"transformer.wte.weight": random(61, width), "transformer.wpe.weight": random(40, width)}
    shapes = {"attn.c_proj": (width, size), "mlp.c_fc": (inner, width), "mlp.c_proj": (width, inner)}
    shapes |= {f"attn.{name}": (3 * count * (size // 5), width) for name, count in projections.items()}
    for layer in range(2):
        prefix = f"transformer.h.{layer}."
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = random(*shape)
            if bias:
                weights[f"{prefix}{name}.bias"] = random(shape[0])
    for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        weights[f"transformer.{name}.weight"] = 1 + random(width)
        if bias:
            weights[f"transformer.{name}.bias"] = random(width)
    weights["lm_head.weight"] = random(61, width)
    return weights


def dense_logits(weights, reach, ids=IDS, activation=F.gelu, eps=1e-5):
    """
    The forward pass of nanoGPT and of the paper's code, in their layout and head by head. Head h of layer i sees the
    last `reach[i][h]` keys.
    """

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)

    length = ids.shape[1]
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:length]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for layer, spans in enumerate(reach):
        block = f"transformer.h.{layer}"
        head_dim = weights[f"{block}.attn.c_proj.weight"].shape[1] // len(spans)
        y = norm(f"{block}.ln_1", x)
        heads = []
        for name in ("c_attn", "c_local_attn", "c_global_attn"):
            if f"{block}.attn.{name}.weight" in weights:
                q, k, v = (part.split(head_dim, -1) for part in linear(f"{block}.attn.{name}", y).chunk(3, -1))
                heads += zip(q, k, v)
        outputs = []
        for (q, k, v), span in zip(heads, spans, strict=True):
            scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)
            scores = scores.masked_fill((distance < 0) | (distance >= span), -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        x = x + linear(f"{block}.attn.c_proj", torch.cat(outputs, -1))
        x = x + linear(f"{block}.mlp.c_proj", activation(linear(f"{block}.mlp.c_fc", norm(f"{block}.ln_2", x))))
    return linear("lm_head", norm("transformer.ln_f", x))


@torch.no_grad()
def logits_of(model, ids=IDS):
    return model(input_ids=ids).logits


def author_checkpoint(generation, local_heads, bias=False, span=7, **options):
    """Parameters as the paper's code names them, the arguments of its configuration, and its logits."""
    args = {**SIZES, "head_dim": HEAD_DIM, "n_local_head": local_heads, "local_attn_span": span, "bias": bias}
    kinds = {"c_attn": 5} if generation == 1 else {"c_local_attn": local_heads, "c_global_attn": 5 - local_heads}
    weights = make_state_dict({name: count for name, count in kinds.items() if count}, bias, **options)
    reach = [span if generation == 1 else span + 1] * local_heads + [40] * (5 - local_heads)
    expected = dense_logits(weights, [reach, reach])
    if generation == 1:  # which registered the mask as a buffer
        past, near = torch.ones(40, 40).tril().bool(), torch.ones(40, 40).triu(1 - span).bool()
        mask = torch.stack([past & near] * local_heads + [past] * (5 - local_heads))[None]
        weights |= {f"transformer.h.{layer}.attn.mask": mask for layer in range(2)}
    return weights, args, expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("local_heads", [3, 0, 5])
@pytest.mark.parametrize("generation", [1, 2])
def test_author_checkpoint(generation, local_heads, bias):
    weights, args, expected = author_checkpoint(generation, local_heads, bias)
    model = convert_nanogpt(weights, args)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)
    assert model.config.num_global_heads == 5 - local_heads
    if local_heads:
        assert model.config.sliding_window == (7 if generation == 1 else 8)
        # The oracle tells one key more or less apart.
        for wrong in (-1, 1):
            reach = [model.config.sliding_window + wrong] * local_heads + [40] * (5 - local_heads)
            assert (dense_logits(weights, [reach, reach]) - expected).abs().max() > 1e-3


def test_names_of_compiled_runs():
    weights, args, expected = author_checkpoint(2, 3)
    model = convert_nanogpt({f"_orig_mod.{name}": tensor for name, tensor in weights.items()}, args)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)


def test_first_days_of_the_paper_code():
    """Half of the heads, rounded down, were local, and no argument said so; heads had their usual width."""
    args = {**SIZES, "n_embd": 25, "local_attn_span": 7}
    weights = make_state_dict({"c_attn": 5}, width=25, size=25, inner=100)
    model = convert_nanogpt(weights, args)
    reach = [7, 7, 40, 40, 40]
    torch.testing.assert_close(logits_of(model), dense_logits(weights, [reach, reach]), **EXACT)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_nanogpt(bias, tied):
    weights = make_state_dict({"c_attn": 5}, bias, width=25, size=25, inner=100)
    if tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    expected = dense_logits(weights, [[40] * 5] * 2)
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril()  # the mask of its slow attention
    model = convert_nanogpt(weights, {**SIZES, "n_embd": 25, "bias": bias})
    torch.testing.assert_close(logits_of(model), expected, **EXACT)
    assert model.config.layer_types == ["full_attention"] * 2
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.attention_dropout == model.config.resid_dropout == model.config.embd_dropout == 0.1


@pytest.mark.parametrize("generation", [1, 2])
def test_file_to_checkpoint(generation, tmp_path, capsys):
    weights, args, expected = author_checkpoint(generation, 3, dtype=torch.float32)
    checkpoint = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]).state_dict(),
        "model_args": args,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "pg19", "learning_rate": 6e-4, "compile": True},
    }
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert lsgpt_cli.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "2 global + 3 local, 6 dimensions each" in output
    assert "no tokenizer" in output
    assert (tmp_path / "out" / "modeling_lsgpt.py").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    # float32 against float32: sums in another order, over logits up to about 10.
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-4)
    assert model.num_parameters() == model.config.num_parameters()


def break_state_dict(weights, args, how):
    if how == "missing":
        del weights["transformer.h.1.mlp.c_fc.weight"], weights["transformer.wpe.weight"]
    elif how == "unknown":
        weights["transformer.h.0.attn.rpe_bias.weight"] = torch.zeros(3)
    elif how == "misshapen":
        weights["lm_head.weight"] = torch.zeros(60, 24)
    elif how == "mask":
        args["local_attn_span"] = 9
    elif how == "local":
        args["n_local_head"] = 6
    elif how == "span":
        del args["local_attn_span"]
    elif how == "sizes":
        del args["n_layer"]
    elif how == "two names":
        weights["transformer.h.1.attn.c_local_attn.weight"] = weights["transformer.h.1.attn.c_attn.weight"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "missing: transformer.wpe.weight, transformer.h.1.mlp.c_fc.weight"),
        ("unknown", "unknown: transformer.h.0.attn.rpe_bias.weight"),
        ("misshapen", r"of another shape: lm_head.weight \(60, 24\) instead of \(61, 24\)"),
        ("mask", r"h.0.attn.mask must let the heads see \[9, 9, 9, 40, 40\] keys.*\[7, 7, 7, 40, 40\]"),
        ("local", "`n_local_head` must be between 0 and `n_head` .5.; got 6"),
        ("span", "`local_attn_span` must be"),
        ("sizes", "`model_args` must have a positive integer 'n_layer'; got None"),
        ("two names", "missing: transformer.h.0.attn.c_local_attn.weight"),
    ],
)
def test_refused_state_dicts(how, message):
    weights, args, _ = author_checkpoint(1, 3)
    break_state_dict(weights, args, how)
    with pytest.raises(ValueError, match=message):
        convert_nanogpt(weights, args)


class RunsCode:
    """What unpickling would call."""

    def __reduce__(self):
        return print, ("code of the file runs",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {}, "model_args": {}, "extra": RunsCode()}, "this one needs builtins.print"),
        ({"weights": {}}, "must be a checkpoint of nanoGPT, with `model` and `model_args`; it has weights"),
        ([1], "it has list. For a model of Transformers, name its folder"),
        (dict(zip("abcdefg", range(7))), "it has a, b, c, d, e. For"),
        ({"model": [], "model_args": {}}, "must be dictionaries"),
        ("text", "must be a complete file written by `torch.save`"),
        ("cut", "must be a complete file written by `torch.save`"),
    ],
)
def test_refused_files(content, message, tmp_path, capsys):
    path = tmp_path / "ckpt.pt"
    torch.save({} if content == "cut" else content, path)
    if content == "text":
        path.write_text("hello")
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    assert lsgpt_cli.main(["convert", str(path), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert "code of the file runs" not in captured.out
    assert not (tmp_path / "out").exists()


def make_gpt2(**options):
    """A GPT-2 all of whose weights matter, in float64."""
    sizes = {"vocab_size": 61, "n_positions": 40, "n_embd": 30, "n_layer": 2, "n_head": 5}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **ends, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_function": "relu", "n_inner": 70, "layer_norm_epsilon": 1e-3},
        {"attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.4, "pad_token_id": 0, "initializer_range": 0.05},
        {"tie_word_embeddings": False, "activation_function": "gelu"},
        {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
    ],
)
def test_gpt2(options):
    gpt2, tolerance = make_gpt2(**options), EXACT
    if "reorder_and_upcast_attn" in options:  # in float32 only
        gpt2, tolerance = gpt2.float(), {"rtol": 1e-5, "atol": 1e-4}
    model = convert_pretrained(gpt2)
    torch.testing.assert_close(logits_of(model), logits_of(gpt2), **tolerance)
    assert model.num_parameters() == model.config.num_parameters() == gpt2.num_parameters()
    ours, theirs = model.config, gpt2.config
    dropouts = ours.attention_dropout, ours.resid_dropout, ours.embd_dropout
    assert dropouts == (theirs.attn_pdrop, theirs.resid_pdrop, theirs.embd_pdrop)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, theirs.pad_token_id)
    assert ours.initializer_range == theirs.initializer_range

    scattered = [[3, 1], [0, 2, 4]]
    windowed = with_global_heads(model, scattered, window=40)
    assert windowed.config.num_global_heads == [2, 3]
    torch.testing.assert_close(logits_of(windowed), logits_of(gpt2), **tolerance)
    assert (logits_of(with_global_heads(model, scattered, window=39)) - logits_of(gpt2)).abs().max() > 1e-4


def test_gpt2_with_an_output_projection_of_its_own():
    """Transformers leaves such weights untied, whatever the configuration says."""
    gpt2 = make_gpt2(tie_word_embeddings=False)
    gpt2.config.tie_word_embeddings = True
    model = convert_pretrained(gpt2)
    torch.testing.assert_close(logits_of(model), logits_of(gpt2), **EXACT)
    assert not model.config.tie_word_embeddings and gpt2.config.tie_word_embeddings


def test_chosen_heads_stay_global_wherever_they_stand():
    weights = make_state_dict({"c_attn": 5}, bias=True, width=25, size=25, inner=100)
    model = convert_nanogpt(weights, {**SIZES, "n_embd": 25})
    windowed = with_global_heads(model, [[4, 1], []], window=9)
    expected = dense_logits(weights, [[9, 40, 9, 9, 40], [9] * 5])
    torch.testing.assert_close(logits_of(windowed), expected, **EXACT)
    torch.testing.assert_close(logits_of(model), dense_logits(weights, [[40] * 5] * 2), **EXACT)


@pytest.mark.parametrize(
    ("global_heads", "window", "message"),
    [
        ([[0, 0], [1]], 9, r"different key/value heads from 0 to 4; got \[0, 0\] for layer 0"),
        ([[0], [5]], 9, r"got \[5\] for layer 1"),
        ([], 9, "`global_kv_heads` must have one list for each of the 2 layers; got 0"),
        ([[0], [1], [2]], 9, "one list for each of the 2 layers; got 3"),
        ([[0], [1]], 1, "`sliding_window` must be at least 2"),
    ],
)
def test_refused_heads(global_heads, window, message):
    model = convert_pretrained(make_gpt2())
    with pytest.raises(ValueError, match=message):
        with_global_heads(model, global_heads, window)
    windowed = with_global_heads(model, [[0], [1]], 9)
    with pytest.raises(ValueError, match="`model` must have 5 global heads"):
        with_global_heads(windowed, [[0], [1]], 9)


def test_gpt2_folder(tmp_path):
    """A file keeps its precision; the tokenizer comes along; the result loads through the Auto classes."""
    gpt2 = make_gpt2(vocab_size=300).to(torch.bfloat16)
    gpt2.generation_config.update(do_sample=True, temperature=0.6)
    gpt2.save_pretrained(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "bare")
    assert not list((tmp_path / "bare").glob("*token*"))  # although AutoTokenizer makes an empty one

    tokenizer = train_tokenizer(["to be or not to be"], 258)
    tokenizer.save_pretrained(tmp_path / "gpt2")
    model, calibration = convert(tmp_path / "gpt2", tmp_path / "out")
    assert calibration is None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.generation_config.temperature == 0.6
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(loaded.float()), logits_of(gpt2.float()), rtol=1e-5, atol=1e-4)
    text = "be or not"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_attn_weights": False}, "`scale_attn_weights` of a GPT-2 to convert must be True"),
        ({"is_causal": False}, "LSGPT is causal; got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "LSGPT scales the logits of all layers in the same way; got True"),
        ({"add_cross_attention": True}, "`add_cross_attention`"),
    ],
)
def test_refused_gpt2(options, message, tmp_path):
    gpt2 = make_gpt2(**options)
    with pytest.raises(ValueError, match=message):
        convert_pretrained(gpt2)
    gpt2.config.save_pretrained(tmp_path)  # without weights: it is refused before they are looked for
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def test_a_constant_in_old_files_of_gpt2_is_ignored(tmp_path):
    make_gpt2().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load_pretrained(tmp_path)


def test_refused_gpt2_weights(tmp_path):
    make_gpt2().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.ln_f.bias"]
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][1:].contiguous()
    weights["transformer.h.0.attn.scale"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    message = (
        r"missing: transformer.ln_f.bias; unknown: transformer.h.0.attn.scale; "
        r"of another shape: transformer.wpe.weight \(39, 30\) instead of \(40, 30\)"
    )
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["GPT2", "/proc/new"], "the output must be a writable folder; got"),
        (["GPT2", "FULL"], "the folder to write must be new or empty"),
        (["GPT2", "FULL/text.txt"], "the folder to write must be new or empty"),
        (
            ["BERT", "new"],
            "of the type gpt2, llama, mistral, ministral, qwen2, qwen3, phi3, olmo2, olmo3, gemma2, gemma3_text, "
            "given by its folder or its name on the Hub; ",
        ),
        (["EMPTY", "new"], "has no config.json"),
        (["none/none/none", "new"], "there is no model"),
        (["none.pt", "new"], "there is no file 'none.pt'"),
        (["none.safetensors", "new"], "there is no file 'none.safetensors'"),
        (["GPT2x", "new"], "no such file or folder"),
        (["NAN", "new"], "must be finite; model.norm.weight has NaN or infinite values"),
        (
            ["GPT2", "new", "--global-kv-heads", "1"],
            "must be given together, or `cache_share` instead of them; got `global_kv_heads`",
        ),
        (["GPT2", "new", "--window", "9", "--calibrate", "stdlib"], "instead of them; got `window`"),
        (["FULL/text.txt", "new", "--global-kv-heads", "1", "--window", "9", "--calibrate", "x"], "has no tokenizer"),
        (["GPT2", "new", "--global-kv-heads", "1", "--window", "9", "--calibrate", "x"], "must have a tokenizer"),
    ],
)
def test_mistakes_get_one_line_and_status_2(command, message, tmp_path, capsys):
    gpt2 = make_gpt2()
    gpt2.save_pretrained(tmp_path / "gpt2")
    gpt2.transformer.ln_f.weight.data[3] = torch.nan
    gpt2.save_pretrained(tmp_path / "nan")
    BertConfig().save_pretrained(tmp_path / "bert")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "text.txt").write_text("text")
    places = {"GPT2": "gpt2", "NAN": "nan", "BERT": "bert", "EMPTY": "empty", "FULL": "full", "new": "new"}
    for name, place in places.items():
        command = [argument.replace(name, str(tmp_path / place)) for argument in command]
    assert lsgpt_cli.main(["convert", *command]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("lsgpt: error: ")
    assert message in last_line
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["text.txt"]
