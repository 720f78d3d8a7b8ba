"""What `scripts.evaluate` measures: one file for each eval."""
