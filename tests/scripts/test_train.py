"""conf/train.yaml composes and builds; what it says wrongly is named."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import OmegaConfBaseException

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
        ("short.rows=0", "rows >= 1"),
        ("decay=2.0", "decay"),
        ("anchors=0", "anchors"),
        ("save_every=0", "save_every"),
        ("+rates.speed=1", "rates.speed"),
        ("+speed=1", "speed"),
        ("long.steps=many", "long.steps"),
    ],
)
def test_bad_values_are_named(override, named):
    with pytest.raises((ValueError, OmegaConfBaseException), match=named):
        job(override)
