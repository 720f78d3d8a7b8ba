"""The switches of `parallel.eplb` in conf/parallel/dep.yaml."""

from dataclasses import dataclass

TRANSPORTS = ("nixl", "gloo")


@dataclass(frozen=True)
class Eplb:
    """``enabled`` false: experts stay where the first plan puts them, and there are no redundant slots.

    Every ``interval_steps`` steps the load of the last ``window_steps`` is planned for; a layer is moved if its
    heaviest rank gets lighter by more than ``min_gain``. ``redundant`` slots a layer, over all ranks, of the target and
    of the drafter each. A round that makes no progress for ``timeout_s`` is abandoned by all ranks together.
    """

    enabled: bool = False
    interval_steps: int = 1000
    window_steps: int = 1000
    redundant: int = 0
    min_gain: float = 0.02
    policy: str = "global"
    groups: int = 1
    nodes: int = 1
    timeout_s: float = 30.0
    transport: str = "nixl"

    def __post_init__(self):
        for name, least in (("interval_steps", 1), ("window_steps", 1), ("redundant", 0), ("groups", 1), ("nodes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"parallel.eplb.{name} must be >= {least}, got {getattr(self, name)}")
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"parallel.eplb.min_gain must lie in 0..1, got {self.min_gain}")
        if self.timeout_s <= 0:
            raise ValueError(f"parallel.eplb.timeout_s must be > 0, got {self.timeout_s}")
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"parallel.eplb.transport must be one of {TRANSPORTS}, got {self.transport!r}: background copies share "
                "no communicator with the step (NCCL on two streams hangs)"
            )

    @property
    def spare(self) -> int:
        """Redundant slots that there are."""
        return self.redundant if self.enabled else 0
