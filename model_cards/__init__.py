"""Makes model cards from the files of a run, and publishes models on the Hub."""

from .card import draw_heads, make_card, make_preset_card, save_card
from .publish import publish


__all__ = ["draw_heads", "make_card", "make_preset_card", "publish", "save_card"]
