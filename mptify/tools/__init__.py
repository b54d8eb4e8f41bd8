"""Benchmarks, zoo check, sweeps, compatibility with timm, the theorem: not needed for tickets."""
