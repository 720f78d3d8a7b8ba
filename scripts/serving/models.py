"""Which models a server has: that of the root config, or those of `api.models`, each the root config with changes."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from scripts.build import Settings, build_settings


@dataclass(frozen=True)
class ServedModel:
    """``config``: the file that its engines are built from."""

    name: str
    settings: Settings
    config: Path


def models_of(s: Settings, config: Path) -> list[ServedModel]:
    """``config`` is the resolved one that ``s`` was built from; that of another model is written into a folder of the
    model's name beside it. Raises ValueError naming the key of a bad change."""
    if s.api.models is None:
        return [ServedModel(s.api.model or Path(s.checkpoint).name, s, config)]
    models = []
    for name, changes in s.api.models.items():
        values = OmegaConf.merge(OmegaConf.load(config), OmegaConf.create(dict(changes)))
        OmegaConf.update(values, "api.models", None)
        try:
            settings = build_settings(values)
        except ValueError as error:
            raise ValueError(f"api.models.{name}: {error}") from None
        written = config.parent / name / config.name
        written.parent.mkdir(exist_ok=True)
        OmegaConf.save(values, written)
        models.append(ServedModel(name, settings, written))
    return models
