"""Measured logits equal a brute-force maximum over the full masked score matrix."""

import pytest
import torch
from reference import visible_pairs

from lsgpt.modeling_lsgpt import telemetry_lsgpt
from lsgpt.modeling_lsgpt.telemetry_lsgpt import max_logits


def brute_force(query, key, visible):
    groups = query.shape[1] // key.shape[1]
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * query.shape[-1] ** -0.5
    return (logits.abs() * visible).amax(dim=(0, 2, 3))


@pytest.mark.parametrize("at_once", [1, 1 << 12, 1 << 22])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 2, 7, 500])
@pytest.mark.parametrize("limits", ["none", "padding", "documents", "both"])
def test_equals_brute_force(monkeypatch, limits, window, kv_heads, at_once):
    monkeypatch.setattr(telemetry_lsgpt, "LOGITS_AT_ONCE", at_once)
    for q_length, kv_length in ((1, 1), (33, 33), (300, 300), (5, 40), (1, 40)):
        if at_once == 1 and q_length > 40:
            continue  # one row at a time is slow, and 33 of them have shown it
        query = torch.randn(2, 4, q_length, 12).transpose(1, 2).contiguous().transpose(1, 2)
        key = torch.randn(2, kv_heads, kv_length, 12)
        masks = {}
        if limits in ("padding", "both"):
            masks["padding_mask"] = torch.rand(2, kv_length) < 0.7
        if limits in ("documents", "both"):
            masks["documents"] = (torch.rand(2, kv_length) < 0.1).cumsum(-1)
        num_global_heads, reach = (4, 1) if window is None else (0, window)
        visible = visible_pairs(4, num_global_heads, reach, q_length, kv_length, **masks)
        actual = max_logits(query, key, 12**-0.5, window, **masks)
        torch.testing.assert_close(actual, brute_force(query, key, visible), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("additive", [False, True])
def test_a_custom_mask_says_by_itself_who_may_attend(additive):
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8)
    visible = torch.rand(2, 1, 20, 30) < 0.3
    mask = visible
    if additive:
        mask = torch.randn(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    actual = max_logits(query, key, 8**-0.5, window=3, mask=mask)
    torch.testing.assert_close(actual, brute_force(query, key, visible))
