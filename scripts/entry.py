"""How every script starts and ends: arguments quoted, config composed and checked, one result, errors in one line."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NoReturn

import hydra
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scripts import build, report, seats, sweep, tracking
from scripts.build import CONF
from scripts.mapping import UnknownKey

TEXTS = ("prompt", "prompt_file")  # taken as they are, commas and all
PATHS = ("checkpoint", "golden")  # likewise, but with --multirun a comma sweeps
NAME_LENGTH = 120  # of a tracked run, in characters
FULL_ERROR = "HYDRA_FULL_ERROR"


def entry(
    run: Callable[[Any], dict | None], settings: Callable = build.build_settings, config_name: str = "config"
) -> None:
    """Be the script: compose the config from sys.argv, call ``run(settings(config, overrides))`` in Hydra's run folder,
    emit the flat result it returns. What ``settings`` returns has a field ``track``.

    A ValueError or OSError, ours or Hydra's, becomes one line on stderr and exit code 1. A result that counts failures
    ends with exit code 1 too. Under ``-m`` a job that fails leaves the others alone (scripts/sweep.py).
    """
    sys.argv[1:] = verbatim(sys.argv[1:])
    traced = FULL_ERROR in os.environ
    os.environ[FULL_ERROR] = "1"  # Hydra raises its errors instead of printing them

    @wraps(run)
    def job(config: DictConfig) -> None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            return sweep.attempt(lambda: perform(run, settings, config))
        try:
            result = perform(run, settings, config)
        except UnknownKey as error:
            fail(explain_key(error.key, config_name), traced)
        except (ValueError, OSError) as error:
            fail(" ".join(str(error).split()), traced)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            fail(f"out of memory: {' '.join(str(error).split())}; take a smaller model, cache or batch", traced)
        if report.failures(result):
            raise SystemExit(1)

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # Hydra's own, before the job starts
        fail(explain(error, config_name, sys.argv[1:]), traced)


def perform(run: Callable[[Any], dict | None], settings: Callable, config: DictConfig) -> dict | None:
    """One run from config to emitted result, tracked. Raises what the settings or the run raise."""
    about, folder = HydraConfig.get(), report.run_folder()
    made = settings(config, about.overrides.task)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    group = sweep.name(about) if about.mode is RunMode.MULTIRUN else None
    name = " ".join([about.job.name, *about.overrides.task])
    resolved = OmegaConf.to_container(config, resolve=True)
    told = made.track if not seats.seat().rank else replace(made.track, mode="disabled")  # of torchrun's, the first
    with tracking.track(told, tracking.Run(about.job.name, name[:NAME_LENGTH], group, resolved), folder):
        result = run(made)
        if result is not None:
            report.emit(result)
    return result


def fail(message: str, traced: bool) -> NoReturn:
    """End with one line on stderr; the whole stack for those who set HYDRA_FULL_ERROR."""
    if traced:
        traceback.print_exc()
    print(f"error: {message}" + ("" if traced else f" ({FULL_ERROR}=1 shows the stack)"), file=sys.stderr)
    raise SystemExit(1)


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def explain(error: Exception, config_name: str, argv: Sequence[str] = ()) -> str:
    """One line for an error of Hydra's: an unknown key comes with the known ones, an unknown choice with the others."""
    message = str(error)
    if message.startswith("Config group override must be"):  # serve=null, serve=3; Hydra does not say which
        for name, value in (a.lstrip("+").split("=", 1) for a in argv if "=" in a):
            if build.choices(name) and value not in build.choices(name):
                return build.no_choice(name, value)
    unknown = re.search(r"Could not override '([^']+)'", message)
    if unknown and "not in struct" in f"{message} {error.__cause__}":
        return explain_key(unknown[1], config_name)
    return " ".join(message.partition("Config search path")[0].split())


def explain_key(key: str, config_name: str) -> str:
    """One line for an unknown key, with those beside it in the default config: of its group, or else of the root."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(config_name)
    while group := key.rpartition(".")[0]:
        node = OmegaConf.select(config, group)
        if isinstance(node, DictConfig):
            return str(UnknownKey(key, list(node)))
        key = group  # itself unknown, or no group
    return str(UnknownKey(key, list(config)))


# --- the command line ---


def verbatim(argv: Sequence[str]) -> list[str]:
    """The arguments with texts and paths quoted for Hydra, so that they arrive as they were typed."""
    sweep = any(a in ("-m", "--multirun") for a in argv)
    names = "|".join(TEXTS if sweep else TEXTS + PATHS)
    split = re.compile(rf"(\+{{0,2}}(?:{names})=)(.*)", re.DOTALL)
    found = ((split.fullmatch(a), a) for a in argv)
    return [m[1] + quoted(m[2]) if m else a for m, a in found]


def quoted(text: str) -> str:
    r"""``text`` as a quoted value of Hydra's grammar, which OmegaConf then reads as ``text`` again.

    Backslashes are themselves except in front of ``${`` (OmegaConf), of a quote and at the end (Hydra): there they are
    doubled, and one more takes the meaning from what follows.
    """
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"\\+\Z", r"\g<0>\g<0>", text)
    return f"'{text}'"
