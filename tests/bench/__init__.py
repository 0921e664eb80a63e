"""Benchmarks: how fast and how small, always against a plain way of doing the same (spec 09)."""
