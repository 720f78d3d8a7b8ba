"""What every test runs under, set before torch, triton or wandb is imported: they read these variables at import."""

import os

for name, value in {
    "OMP_NUM_THREADS": "1",  # torch takes its thread count from here; small ops lose more than they gain by a second
    "TRITON_INTERPRET": "1",  # without a GPU kernels run in the interpreter; set 0 to test on one
    "WANDB_MODE": "disabled",  # a test of tracking sets it itself
    "WANDB_SILENT": "true",
    "NIXL_LOG_LEVEL": "ERROR",  # its INFO lines go to stdout
}.items():
    os.environ.setdefault(name, value)

from hypothesis import settings  # noqa: E402

# A fixed budget and fixed examples: a red test is red on every machine.
settings.register_profile("house", max_examples=25, derandomize=True, deadline=None, database=None)
settings.load_profile("house")
