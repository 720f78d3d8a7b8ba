"""conf/train.yaml composes and builds; what it says wrongly is named."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import OmegaConfBaseException

from scripts import train
from scripts.entry import CONF
from scripts.train import Job, build_job


def job(*overrides: str) -> Job:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_job(compose("train", overrides=list(overrides)))


def test_the_shipped_recipe_builds():
    made = job()
    assert made.model.vocab_size == 2048 and made.training.short.steps > made.training.long.steps > 0
    assert made.training.rates.betas == (0.9, 0.98)
    assert job("drafter.steps=3").training.drafter.steps == 3


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("threads=0", "threads"),
        ("numerics=fp64", "numerics"),
        ("short.rows=0", "short.rows must be >= 1"),
        ("decay=2.0", "decay"),
        ("anchors=0", "anchors"),
        ("save_every=0", "save_every"),
        ("+rates.speed=1", "rates.speed"),
        ("+speed=1", "speed"),
        ("long.steps=many", "long.steps"),
        ("long=null", "long must be a mapping of steps, length, rows"),
        ("balance=[1]", "balance must be a list of 2"),
        ("~anchors", "key anchors is missing"),
        ("~model", "model must be one of flash, tiny"),
        ("resume=''", "resume is empty"),
        ("checkpoint=''", "checkpoint is empty"),
    ],
)
def test_bad_values_are_named(override, named):
    with pytest.raises((ValueError, OmegaConfBaseException), match=named):
        job(override)


def test_a_model_too_large_to_train_is_refused(monkeypatch):
    monkeypatch.setattr(train, "run_folder", lambda: pytest.fail("the run began"))
    monkeypatch.setattr(train.memory, "available", lambda device: 10**12)
    with pytest.raises(ValueError, match=r"weights, gradients and moments in fp32 .* take a smaller model"):
        train.main(job("model=flash", "threads=1"))
