"""Measurements, each a ratio within one run: machines are noisy, so the sides take turns and medians are compared."""
