"""What README, CONTRIBUTING and docs name is there: files, tests, config groups, benches, homes of packages."""

import re
from pathlib import Path

import pytest

from scripts.bench import BENCHES
from tests.test_layout import CONF, HOMES, choices

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TREE = ("conf", "model", "parallel", "kernels", "serve", "scripts", "tests", "docs")
PLACEHOLDERS = ("NAME", "GROUP", "scale", "kernels/triton/")  # of recipes
STATED = {"nixl-cu12": "nixl", "pyzmq": "zmq", "hydra-core": "hydra", "prometheus-client": "prometheus_client"}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows(markdown: str, heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading``, its head left out."""
    below = markdown.split(heading, 1)[1]
    table = re.search(r"(?:^\|.*\|$\n?)+", below, re.M)[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_files_that_are_named_are_there(doc):
    named = set(re.findall(rf"`((?:{'|'.join(TREE)})/[\w./-]*[\w/])(?:[`:]|\s)", text(doc)))
    named -= {group for group, _ in choices(CONF)}
    gone = [n for n in named if not (ROOT / n).exists() and not any(p in n for p in PLACEHOLDERS)]
    assert not gone, f"{doc.name} names {sorted(gone)}"


def test_tests_that_are_named_are_there():
    failures, missing, file = text(ROOT / "docs" / "FAILURES.md"), [], ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::)?(\.\.\._\w+|test_\w+)`", failures):
        file = path or file
        tail = name.removeprefix("...")
        where = [ROOT / file] if path else sorted((ROOT / "tests").rglob("test_*.py"))
        if not any(
            re.search(rf"def test_(failure)?\w*{re.escape(tail.removeprefix('test_'))}\(", text(w)) for w in where
        ):
            missing.append((file, name))
    assert not missing


def test_the_table_of_config_groups_is_that_of_conf():
    told = {names(group)[0]: set(names(last)) for group, _, last in rows(text(ROOT / "README.md"), "## Config groups")}
    there: dict[str, set[str]] = {}
    for group, name in choices(CONF):
        there.setdefault(group, set()).add(name)
    assert told == there


def test_every_bench_is_in_the_readme():
    assert {name for name in BENCHES if f"bench={name}" not in text(ROOT / "README.md")} == set()


def test_the_table_of_packages_is_that_of_the_homes():
    told = {}
    for packages, homes, *_ in rows(text(ROOT / "CONTRIBUTING.md"), "## Dependencies"):
        for package in packages.split(", "):
            told[STATED.get(package, package).replace("-", "_")] = set(names(homes))
    wrong = {name for name, homes in HOMES.items() if name in told and told[name] != set(homes)}
    assert not wrong and "torch" in told and told["zmq"] == {"serve/wire/"}
