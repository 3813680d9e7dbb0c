"""Draws `masks.png`, the picture in the README, from who sees whom in the model."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from lsgpt.modeling_lsgpt import GLOBAL, LOCAL, LSGPTConfig, describe_visibility


LENGTH, WINDOW = 24, 6

config = LSGPTConfig(sliding_window=WINDOW)
visibility = describe_visibility(config, torch.empty(1, LENGTH, 0))

figure = Figure(figsize=(8, 4.2), layout="constrained")
axes = figure.subplots(1, 2, sharey=True)
titles = {GLOBAL: "1 global head: the whole past", LOCAL: f"11 local heads: the last W = {WINDOW} tokens"}
for axis, (kind, title) in zip(axes, titles.items()):
    axis.imshow(visibility[kind].dense()[0, 0], cmap="Blues", vmin=0, vmax=1.4)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("key position")
    axis.set_xticks([])
    axis.set_yticks([])
axes[0].set_ylabel("query position")
figure.savefig(Path(__file__).parent / "masks.png", dpi=110, bbox_inches="tight")
