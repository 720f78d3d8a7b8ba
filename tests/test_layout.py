"""The house rules that a machine can check: import arrows, homes of third-party packages, no config object or
environment variable below scripts/, sizes, and that every config under conf/ composes and builds.

Each rule is a function (root) -> list of "file:line: what is wrong". It runs on the tree, and on a small bad example
that shows it can fail. To give a package a home, or a long function leave, change the tables here.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"

ARROWS = {  # package -> what it may import of ours, besides itself
    "kernels": (),
    "parallel": (),
    "model": ("kernels", "parallel"),
    "serve": ("model", "parallel"),  # an op reaches serve through model
    "scripts": ("kernels", "parallel", "model", "serve"),
    "tests": ("kernels", "parallel", "model", "serve", "scripts"),
}
PACKAGES = tuple(p for p in ARROWS if p != "tests")
BELOW_SCRIPTS = tuple(p for p in PACKAGES if p != "scripts")

ANYWHERE = {"torch", "numpy"}
HOMES = {  # third-party import name -> the folders ("x/") and files it may be imported in
    "einops": ("model/", "kernels/"),
    "fastapi": ("serve/api/",),
    "httpx": ("serve/load/client.py",),
    "hydra": ("scripts/",),
    "jinja2": ("serve/text.py",),
    "matplotlib": ("scripts/",),
    "msgspec": ("serve/wire/",),
    "nixl": ("parallel/link.py",),
    "nixl_cu12": ("parallel/link.py",),
    "omegaconf": ("scripts/",),
    "prometheus_client": ("serve/metrics.py",),
    "rich": ("scripts/",),
    "safetensors": ("model/shards.py",),
    "starlette": ("serve/api/",),  # what FastAPI is made of
    "tokenizers": ("serve/text.py",),
    "triton": ("kernels/triton/",),
    "uvicorn": ("serve/api/",),
    "wandb": ("scripts/",),
    "xxhash": ("serve/schedule/pages.py",),
    "zmq": ("serve/wire/",),
}
TESTS_ONLY = {"pytest", "hypothesis", "openai"}

NOT_HERE = {  # folder or file -> modules it must do without: time and chance come from the clock port, seeded streams
    "serve/": ("time", "uuid", "random"),
    "serve/schedule/": ("torch",),  # plain Python, so that a policy's test takes milliseconds
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONG_FILES: set[str] = set()  # "model/attention.py"
LONG_FUNCTIONS: set[str] = set()  # "model/attention.py:apply"
LONG_BODIES = ("kernels/triton/",)  # a Triton body may be long


@dataclass(frozen=True)
class Import:
    path: str  # of the importing file, from the root
    line: int
    module: str  # absolute, dotted

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self):
        return f"{self.path}:{self.line}: imports {self.module}"


def sources(root: Path, packages: tuple[str, ...]) -> Iterator[tuple[str, str, ast.Module]]:
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            yield file.relative_to(root).as_posix(), text, ast.parse(text, filename=str(file))


def modules(node: ast.AST, path: str) -> list[str]:
    """The modules this node imports: statements, and import_module / __import__ whose name starts with a literal."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = path.split("/")[: -node.level] if node.level else []
        return [".".join([*parents, *(node.module or "").split(".")]).strip(".")]
    if isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        name = node.args[0]
        if isinstance(name, ast.JoinedStr) and name.values:
            name = name.values[0]
        if called in ("import_module", "__import__") and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return [name.value]
    return []


def imports(root: Path, packages: tuple[str, ...] = tuple(ARROWS)) -> Iterator[Import]:
    for path, _, code in sources(root, packages):
        for node in ast.walk(code):
            for module in modules(node, path):
                yield Import(path, getattr(node, "lineno", 0), module)


def within(path: str, places: tuple[str, ...]) -> bool:
    return any(path.startswith(p) if p.endswith("/") else path == p for p in places)


def wrong_arrows(root: Path) -> list[str]:
    out = []
    for i in imports(root):
        package = i.path.split("/")[0]
        if i.top in ARROWS and i.top not in (package, *ARROWS[package]):
            out.append(f"{i}, but {package} may import only {', '.join(ARROWS[package]) or 'itself'}")
    return out


def wrong_homes(root: Path) -> list[str]:
    out = []
    for i in imports(root):
        in_tests = i.path.startswith("tests/")
        if i.top in sys.stdlib_module_names or i.top in ARROWS or i.top in ANYWHERE:
            continue
        if in_tests and (i.top in TESTS_ONLY or i.top in HOMES):
            continue
        if i.top not in HOMES:
            out.append(f"{i}: unknown package {i.top}; a new one needs a line in HOMES and a reason in CONTRIBUTING.md")
        elif not within(i.path, HOMES[i.top]):
            out.append(f"{i}, whose home is {', '.join(HOMES[i.top])}")
    return out


def wrong_modules(root: Path) -> list[str]:
    return [
        f"{i}, which {place} does without"
        for i in imports(root, PACKAGES)
        for place, banned in NOT_HERE.items()
        if within(i.path, (place,)) and i.top in banned
    ]


def environment_and_config(root: Path) -> list[str]:
    """Below scripts/ nobody sees an environment variable, a DictConfig or ``_target_``."""
    out = []
    hidden = {"environ", "environb", "getenv", "DictConfig", "ListConfig", "OmegaConf"}
    for path, _, code in sources(root, BELOW_SCRIPTS):
        for node in ast.walk(code):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            if isinstance(node, ast.ImportFrom):
                names |= {a.name for a in node.names}
            if isinstance(node, ast.Constant) and node.value == "_target_":
                names.add("_target_")
            for name in sorted(n for n in names if n == "_target_" or n in hidden):
                out.append(f"{path}:{node.lineno}: {name} is for scripts/ alone; pass a value instead")
    return out


def too_long(root: Path) -> list[str]:
    out = []
    for path, text, code in sources(root, PACKAGES):
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES and path not in LONG_FILES:
            out.append(f"{path}:{lines}: {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(code):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not within(path, LONG_BODIES):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES and f"{path}:{node.name}" not in LONG_FUNCTIONS:
                    out.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}")
    return out


RULES = [wrong_arrows, wrong_homes, wrong_modules, environment_and_config, too_long]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_tree_obeys(rule):
    found = rule(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_tables_name_what_exists():
    """A leave for a file that is gone is a rule nobody keeps; homes may name files that are still to be written."""
    gone = [f for f in LONG_FILES | {f.split(":")[0] for f in LONG_FUNCTIONS} if not (ROOT / f).is_file()]
    assert not gone
    assert list(imports(ROOT, PACKAGES)), "no imports found: the rules would pass on an empty tree"


BAD = [  # rule, file, its text, what the message must hold
    (wrong_arrows, "kernels/gate.py", "import torch\nfrom model import tree\n", "kernels/gate.py:2: imports model"),
    (wrong_arrows, "parallel/link.py", "import kernels.op", "parallel/link.py:1: imports kernels.op"),
    (
        wrong_arrows,
        "model/moe.py",
        "def f():\n    from serve.schedule.pages import x",
        "model/moe.py:2: imports serve.schedule.pages",
    ),
    (wrong_arrows, "serve/sim/clock.py", "import kernels", "serve/sim/clock.py:1: imports kernels"),
    (wrong_arrows, "serve/sim/clock.py", "from ...scripts import build", "serve/sim/clock.py:1: imports scripts"),
    (wrong_arrows, "scripts/run.py", "import tests.conftest", "scripts/run.py:1: imports tests.conftest"),
    (wrong_arrows, "kernels/a.py", 'importlib.import_module(f"model.{n}")', "kernels/a.py:1: imports model."),
    (wrong_homes, "model/moe.py", "import torch\nimport triton.language as tl", "model/moe.py:2: imports triton"),
    (wrong_homes, "kernels/triton_like.py", "import triton", "whose home is kernels/triton/"),
    (wrong_homes, "serve/engine.py", "from omegaconf import DictConfig", "whose home is scripts/"),
    (wrong_homes, "scripts/plot/curve.py", "import pandas as pd", "unknown package pandas"),
    (wrong_homes, "scripts/fit.py", "import pytest", "unknown package pytest"),
    (wrong_homes, "tests/test_x.py", "import scipy", "unknown package scipy"),
    (wrong_modules, "serve/engine.py", "from time import monotonic", "serve/engine.py:1: imports time"),
    (wrong_modules, "serve/schedule/pages.py", "import torch", "serve/schedule/ does without"),
    (environment_and_config, "model/moe.py", "import os\nx = os.environ['A']", "model/moe.py:2: environ"),
    (environment_and_config, "serve/api.py", "from os import getenv", "serve/api.py:1: getenv"),
    (environment_and_config, "model/moe.py", "def f(c: DictConfig): pass", "model/moe.py:1: DictConfig"),
    (environment_and_config, "parallel/plan.py", "cls = cfg['_target_']", "parallel/plan.py:1: _target_"),
    (too_long, "model/moe.py", "x = 1\n" * 401, "401 lines, more than 400"),
    (too_long, "serve/engine.py", "async def step():\n" + "    x = 1\n" * 60, "serve/engine.py:1: step has 61 lines"),
]


@pytest.mark.parametrize(("rule", "file", "text", "message"), BAD, ids=lambda v: getattr(v, "__name__", None))
def test_rule_fails_on_a_bad_tree(rule, file, text, message, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = rule(tmp_path)
    assert len(found) == 1 and message in found[0], found


GOOD = {
    "kernels/triton/gate.py": "import triton\nfrom kernels.op import op\ndef f():\n" + "    x = 1\n" * 99,
    "model/moe.py": "import os.path\nfrom einops import rearrange\nfrom . import tree\nimport kernels, parallel\n",
    "serve/load/client.py": "import asyncio\nimport httpx\nfrom ..text import Tokenizer\nfrom model import config\n",
    "scripts/track/log.py": "import os, time, rich, wandb, hydra\nx = os.environ\nimport serve, kernels\n",
    "tests/test_x.py": "import pytest, hypothesis, openai, triton, torch\nfrom scripts import build\n",
}


def test_rules_pass_on_a_good_tree(tmp_path):
    for file, text in GOOD.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    assert {rule.__name__: rule(tmp_path) for rule in RULES} == {rule.__name__: [] for rule in RULES}


# Every config composes and builds.


def choices(conf: Path) -> list[tuple[str, str]]:
    """(group, name) of every YAML below a group folder; the root's own files are no choices."""
    files = sorted(conf.glob("*/**/*.yaml"))
    return [(f.parent.relative_to(conf).as_posix(), f.stem) for f in files]


def override(conf: Path, group: str, name: str) -> str:
    """``group=name`` for a group of the root's defaults list, ``+group=name`` for one that is added on demand."""
    defaults = OmegaConf.load(conf / "config.yaml").get("defaults", [])
    keys = [key for entry in defaults if not isinstance(entry, str) for key in entry]
    listed = {key.split()[-1].split("@")[0].strip("/") for key in keys}  # "optional /serve/sim@x" -> "serve/sim"
    return f"{group}={name}" if group in listed else f"+{group}={name}"


def build(conf: Path, *overrides: str):
    from scripts.build import build_settings

    with initialize_config_dir(str(conf), version_base="1.3"):
        return build_settings(compose("config", overrides=list(overrides)))


def test_conf_has_choices_in_every_group():
    groups = {group for group, _ in choices(CONF)}
    assert {"model", "kernels", "parallel", "serve"} <= groups, f"groups found under conf/: {sorted(groups)}"


def test_config_builds():
    build(CONF)


@pytest.mark.parametrize(("group", "name"), choices(CONF), ids="=".join)
def test_every_choice_builds(group, name):
    build(CONF, override(CONF, group, name))


def test_choices_finds_nested_and_added_groups(tmp_path):
    for file in ("config.yaml", "model/tiny.yaml", "serve/sim/fast.yaml", "experiment/a.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x: 1\n")
    (tmp_path / "config.yaml").write_text("defaults:\n  - _self_\n  - model: tiny\n  - optional serve/sim: fast\n")
    assert choices(tmp_path) == [("experiment", "a"), ("model", "tiny"), ("serve/sim", "fast")]
    got = [override(tmp_path, *c) for c in choices(tmp_path)]
    assert got == ["+experiment=a", "model=tiny", "serve/sim=fast"]
