"""Benchmarks that ship with raykv: ``raykv bench``."""
