"""Writes the cards of the shipped presets and their pictures: `python -m lsgpt.model_cards`."""

from pathlib import Path

from lsgpt.configuration import list_presets, load_preset

from .card import draw_heads, make_preset_card


if __name__ == "__main__":
    folder = Path(__file__).parent
    for name in list_presets():
        make_preset_card(name).save(folder / f"{name}.md")
        draw_heads(load_preset(name), folder / f"{name}.png")
        print(folder / f"{name}.md")
