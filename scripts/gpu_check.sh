#!/bin/sh
# What only a GPU can tell, in a few minutes: `sh scripts/gpu_check.sh`, from the root, in an environment with a torch for
# CUDA. Ends with the first failure.
set -e
python -c "import torch; assert torch.cuda.is_available(), 'torch sees no GPU'; print(torch.cuda.get_device_name())"
python -m pytest -q -rs tests/serve/test_capture.py
# decoding without and with recorded steps: compare output tokens/s and ITL
set -- workload=poisson workload.rate=100 workload.limit=64 workload.prompt_median=64 workload.output_median=64 \
    device=cuda kernels=compile track=none
python -m scripts.run "$@"
python -m scripts.run "$@" serve.capture.buckets=[16,32,64]
