"""The group `api` of the config, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve.api.listen import loopback


@dataclass(frozen=True)
class Api:
    """How the HTTP server listens, and what it takes. ``models``: name -> changes to the root config, of which there is
    one for each; None: there is one model, that of the root config, called ``model``."""

    host: str
    port: int
    model: str | None
    key_file: str | None
    without_key: bool
    max_body_mb: int
    body_timeout_s: float
    max_prompt_tokens: int
    chat_tokens: int
    drain_s: float
    models: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"api.port must be 0 (any free one) to 65535, got {self.port}")
        for name in ("max_body_mb", "max_prompt_tokens", "chat_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"api.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "drain_s"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"api.{name} must be >= 0 seconds, got {getattr(self, name)}")
        if self.models is not None and self.model is not None:
            raise ValueError(f"api.model={self.model} names the one model there is; api.models names all of its own")
        for name, changes in (self.models or {}).items():
            if not re.fullmatch(r"[\w.-]+", name) or not name.strip("."):
                raise ValueError(f"api.models.{name}: a model's name is letters, digits, dots, - and _")
            if not isinstance(changes, Mapping):
                raise ValueError(f"api.models.{name} must be a mapping of changes, got {changes!r}")
        if self.models is not None and not self.models:
            raise ValueError("api.models is empty: name a model, or set it to null")
        if not loopback(self.host) and self.key_file is None and not self.without_key:
            raise ValueError(
                f"api.host={self.host} lets other machines in: give api.key_file=FILE with a key they must know, or "
                "say api.without_key=true"
            )

    def key(self) -> str | None:
        """The key in ``key_file``. Raises ValueError for a file that is missing or holds none."""
        if self.key_file is None:
            return None
        if not Path(self.key_file).is_file():
            raise ValueError(f"api.key_file={self.key_file}: no such file")
        key = Path(self.key_file).read_text(encoding="utf-8").strip()
        if not key or len(key.split()) > 1:
            raise ValueError(f"api.key_file={self.key_file} must hold one key without blanks")
        return key
