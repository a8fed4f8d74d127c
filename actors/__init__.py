"""Ranks as Ray actors: the only part of raykv that imports Ray."""

from raykv.actors.launch import launch

__all__ = ["launch"]
