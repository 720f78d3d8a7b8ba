"""A small random model with a byte tokenizer and made-up text, and a run folder, for the evaluations."""

import numpy as np
import pytest
import torch

from scripts import build, report
from scripts.bytetext import ByteText
from scripts.evaluation import agreement
from scripts.evaluation.given import Given
from tests.scripts.test_generate import settings as configure

TEXT = ByteText(2048, 0, 1)
HELD = [bytes(np.random.default_rng(i).choice(list(b"abc \n"), 900).astype(np.uint8)) for i in range(2)]
SIZES = (  # of the evaluations on it
    "serve.pages=16",
    "serve.max_batch=4",
    "needle.letters=4",
    "needle.depths=[0.0,1.0]",
    "routing.ranks=[2,8]",
)


@pytest.fixture(scope="module")
def g():
    s = configure(*SIZES, "model.dspark_n_routed_experts=4")
    return Given(s, build.build_runner(s)[0], TEXT, HELD)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)


def whole(runner, sequence: np.ndarray) -> torch.Tensor:
    """Logits of every row of one long step."""
    span = agreement.alone(runner, sequence).span(0, sequence[:-1], 0)
    return runner.step([span], torch.arange(len(sequence) - 1))[0]
