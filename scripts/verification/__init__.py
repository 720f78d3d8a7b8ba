"""Checking the model against golden cases of the official code."""
