"""Parts of scripts/run.py."""
