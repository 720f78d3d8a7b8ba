"""The command line: texts arrive as typed, errors are one line that says what would do."""

import json
import os
import shutil
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from scripts import entry, report
from scripts.build import build_settings
from scripts.entry import CONF, verbatim

ODD = "a$ {}\\'\"=,()[]:\n\t.~#?%*|&;<>!é→"
TEXTS = st.text(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"]), max_size=16)


def arrived(argument: str, key: str) -> str:
    """The value of ``key`` after one override, as Hydra's loader applies it."""
    [parsed] = OverridesParser.create().parse_overrides([argument])
    config = OmegaConf.create({key: None})
    OmegaConf.update(config, parsed.key_or_group, parsed.value())
    return OmegaConf.to_container(config, resolve=True)[key]


@settings(max_examples=100, deadline=None)
@given(TEXTS)
@example("")
@example(" def f(n): ")
@example("Hello, world")
@example("${checkpoint}")
@example("\\${a} \\\\${ ${ \\")
@example("???")
@example("null")
@example("it's \\'quoted\\' \"twice\"\\\\")
@example("x = {'a': [1, 2], **b}\nprint(x)\n")
def test_texts_arrive_as_typed(text):
    """Also through a sweep, which writes each job's overrides out again."""
    [typed] = verbatim([f"prompt={text}"])
    assert arrived(typed, "prompt") == text
    [parsed] = OverridesParser.create().parse_overrides([typed])
    assert arrived(f"{parsed.get_key_element()}={parsed.get_value_element_as_str()}", "prompt") == text


def test_a_text_arrives_through_the_whole_of_hydra():
    text = " it's ${max_tokens}, \\${x} [1, {2}] = \"'\\\n\\"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=verbatim([f"prompt={text}"]))
    assert build_settings(config).prompt == text


def test_paths_arrive_as_typed_and_sweep_with_multirun():
    assert arrived(*verbatim(["checkpoint=/a b/{c},d"]), "checkpoint") == "/a b/{c},d"
    assert arrived(*verbatim(["golden=it's"]), "golden") == "it's"
    assert verbatim(["-m", "checkpoint=a,b", "prompt=a,b"]) == ["-m", "checkpoint=a,b", "prompt='a,b'"]
    assert verbatim(["max_tokens=3", "my_prompt=x"]) == ["max_tokens=3", "my_prompt=x"]


UNKNOWN = [
    (["bogus=1"], "unknown key bogus; known: model, parallel, kernels, serve, workload, track, api, checkpoint,"),
    (["bogus.deep=1"], "unknown key bogus; known: model, parallel, kernels, serve, workload, track, api, checkpoint,"),
    (["serve.page=1"], "unknown key serve.page; known in serve: page_size, pages, max_batch, budget_tokens"),
    (["model.hidden=1"], "unknown key model.hidden; known in model: vocab_size,"),
    (["kernels=cuda"], "Could not find 'kernels/cuda' Available options in 'kernels': compile reference"),
    (["max_tokens=(1"], "max_tokens"),
]


@pytest.mark.parametrize(("argv", "message"), UNKNOWN, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_hydra_errors_become_one_line(argv, message):
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(HydraException) as error:
        compose("config", overrides=argv)
    line = entry.explain(error.value, "config")
    assert message in line and "\n" not in line


def start(monkeypatch, tmp_path, run, *argv: str, settings=build_settings) -> None:
    """The whole of `entry`, in this process, with outputs below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(entry.FULL_ERROR, raising=False)
    monkeypatch.setattr("sys.argv", ["generate.py", *argv])
    try:
        entry.entry(run, settings)
    finally:
        os.environ.pop(entry.FULL_ERROR, None)


def test_a_run_leaves_config_and_result(monkeypatch, tmp_path, capsys):
    start(monkeypatch, tmp_path, lambda s: {"said": s.prompt, "failed": 0}, "prompt=a, ${b}")
    [folder] = tmp_path.glob("outputs/*/*/*")
    assert json.loads((folder / "result.json").read_text()) == {"said": "a, ${b}", "failed": 0}
    assert "prompt: a, ${b}" in (folder / "config.yaml").read_text()
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["said"] == "a, ${b}"


@pytest.mark.parametrize("key", ["failed", "mismatches"])
def test_a_failed_result_is_printed_and_ends_with_1(key, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        start(monkeypatch, tmp_path, lambda s: {key: 2})
    assert end.value.code == 1 and json.loads(capsys.readouterr().out) == {key: 2}


BAD = [
    (["bogus=1"], "unknown key bogus"),
    (["kernels.default=cuda"], "kernels.default='cuda' is not available; backends: compile, reference"),
    (["serve=null"], "serve must be one of disagg, engine, got null"),
    (["model=3"], "model must be one of flash, tiny, got 3"),
    (["~parallel"], "parallel must be one of dep, single, got nothing"),
    (["evaluate=null"], "evaluate must be a mapping of context, stride,"),
    (["checkpoint="], "checkpoint is empty"),
    (["kernels.linear=cuda"], "kernels.linear='cuda' is not available; linear has: compile, reference"),
    (["numerics=fp64"], "numerics must be one of"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_bad_input_ends_with_one_line(argv, message, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        start(monkeypatch, tmp_path, lambda s: {"a": 1}, *argv)
    out, err = capsys.readouterr()
    assert end.value.code == 1 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("key", ["bogus", "bogus.deep", "serve.page", "model.hidden", "kernels.fused", "parallel.mesh"])
def test_an_added_unknown_key_reads_as_one_that_is_set(key, monkeypatch, tmp_path, capsys):
    for plus in ("", "+"):
        with pytest.raises(SystemExit):
            start(monkeypatch, tmp_path, lambda s: None, f"{plus}{key}=1")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1] and "; known" in lines[0]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")],
)
def test_no_memory_left_is_one_line(error, monkeypatch, tmp_path, capsys):
    def run(_):
        raise error

    with pytest.raises(SystemExit) as end:
        start(monkeypatch, tmp_path, run)
    err = capsys.readouterr().err
    assert end.value.code == 1 and err.startswith("error: out of memory") and err.count("\n") == 1


def test_a_slip_of_ours_keeps_its_stack(monkeypatch, tmp_path):
    def run(_):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        start(monkeypatch, tmp_path, run)


def test_run_folder_is_the_jobs(monkeypatch, tmp_path):
    seen = []
    start(monkeypatch, tmp_path, lambda s: seen.append(report.run_folder()))
    assert seen[0].is_dir() and seen[0].is_relative_to(tmp_path / "outputs")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_run_hands_the_prompt_on():
    """`make -n run` quotes a prompt of several lines for the shell."""
    root = CONF.parent
    done = subprocess.run(["make", "-n", "run", "ARGS=max_tokens=1"], cwd=root, capture_output=True, text=True)
    assert '-m scripts.generate "prompt=$PROMPT"' in done.stdout and "max_tokens=1" in done.stdout
