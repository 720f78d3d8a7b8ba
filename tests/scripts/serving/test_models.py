"""The models of a server: each the root config with changes."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from scripts.serving.models import models_of
from tests.scripts.live import composed, settings


def test_a_model_is_the_root_config_with_changes(tmp_path):
    config = tmp_path / "config.yaml"
    OmegaConf.save(composed(), config, resolve=True)
    (only,) = models_of(settings(), config)
    assert (only.name, only.config) == ("tiny", config) and only.settings is settings()
    s = replace(settings(), api=replace(settings().api, models={"a": {}, "b": {"serve": {"pages": 16}}}))
    a, b = models_of(s, config)
    assert (a.name, a.settings.serve, b.settings.serve.pages) == ("a", settings().serve, 16)
    assert b.config == tmp_path / "b" / "config.yaml" and OmegaConf.load(b.config).serve.pages == 16
    wrong = replace(s, api=replace(s.api, models={"a": {"serve": {"pagse": 16}}}))
    with pytest.raises(ValueError, match=r"api\.models\.a: unknown key serve\.pagse"):
        models_of(wrong, config)
