"""Benchmarks, checks over the zoo, sweeps and the theorem: nothing that using a ticket needs."""
