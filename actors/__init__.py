"""Ranks as Ray actors: the only part of raykv that imports Ray."""

from raykv.actors.attach import attach, end
from raykv.actors.launch import launch

__all__ = ["attach", "end", "launch"]
