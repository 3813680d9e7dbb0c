"""Prompts for a model's `generate`."""

from transformers import BatchEncoding, PreTrainedTokenizerBase


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """
    The arguments with which `model.generate` continues `prompt` as if it were training text.

    In training text a space belongs to the token of the word after it. A prompt that ends in one would end in a token
    that hardly any word follows. So the space is left to the continuation, whose first token has to begin with one.

    Returns:
        `input_ids` and `attention_mask` `(1, T)` and, after a space, `begin_suppress_tokens`.
    """
    suppressed = []
    if prompt.endswith(" "):
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        # The space as byte-level BPE and as SentencePiece write it.
        suppressed = [i for i, token in enumerate(tokens) if not token.startswith(("Ġ", "▁"))]
        if len(suppressed) == len(tokens):
            suppressed = []
        else:
            prompt = prompt[:-1]
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if suppressed:
        encoded["begin_suppress_tokens"] = suppressed
    return encoded
