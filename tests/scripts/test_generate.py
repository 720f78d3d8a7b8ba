"""The command that writes text: what it prints, what it refuses."""

import io
import json

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from scripts import build, entry, generate
from scripts.build import build_settings
from scripts.bytetext import ByteText
from scripts.entry import CONF, verbatim
from scripts.generate import Printer, acceptance_length, read_prompts
from scripts.report import note_capped
from serve.offline import Completion

QUICK = (
    *("checkpoint=random", "numerics=fp32", "max_tokens=3", "serve.pages=8", "serve.max_batch=2", "threads=1"),
    *("model.n_routed_experts=4", "model.dspark_n_routed_experts=4", "model.hc_sinkhorn_iters=2"),
)


def settings(*overrides: str) -> build.Settings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_settings(compose("config", overrides=verbatim([*QUICK, *overrides])))


@pytest.fixture(scope="module")
def made():
    """Runner and tokenizer of the random tiny model, built once."""
    return build.build_runner(settings())


@pytest.fixture(autouse=True)
def built_once(made, monkeypatch):
    monkeypatch.setattr(generate, "build_runner", lambda s: made)


# --- prompts ---


def test_one_prompt_verbatim():
    assert read_prompts(settings("prompt= f(${x}, 'a')\n")) == [" f(${x}, 'a')\n"]


@pytest.mark.parametrize("raw", [b"a = 1\nb = 2\n", b"a = 1\nb = 2", b"a = 1\r\nb = 2\r\n"])
def test_a_file_gives_a_prompt_a_line(raw, tmp_path, monkeypatch):
    file = tmp_path / "some, prompts.txt"
    file.write_bytes(raw)
    assert read_prompts(settings(f"prompt_file={file}")) == ["a = 1", "b = 2"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert read_prompts(settings("prompt_file=-")) == ["a = 1", "b = 2"]


REFUSED = [
    ([], "no prompt: give prompt="),
    (["prompt="], "prompt is empty"),
    (["prompt=a", "prompt_file=b"], "both given"),
    (["prompt=a\udcff"], "prompt is not UTF-8 at character 1"),
    (["prompt_file=no/such/file"], "prompt_file=no/such/file: no such file"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_no_or_bad_prompt(overrides, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(settings(*overrides))


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"", "is empty"), (b"a\n\nb\n", "line 2: the prompt is empty"), (b"ab\xff\n", "not UTF-8: .* at byte 2")],
)
def test_bad_prompt_files(raw, message, tmp_path):
    (tmp_path / "p").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_prompts(settings(f"prompt_file={tmp_path / 'p'}"))


def test_prompt_longer_than_the_context():
    with pytest.raises(ValueError, match=r"the prompt has \d{3,4} tokens; the context is 512"):
        generate.run(settings("prompt=" + "\u00e9x" * 600))


@pytest.mark.parametrize("bad", [-1, 2048])
def test_token_id_out_of_range(made, bad):
    with pytest.raises(ValueError, match=f"token id {bad}; ids are 0 to 2047"):
        made[0].check(np.array([0, bad, 5]))


@pytest.mark.parametrize(("value", "message"), [("max_tokens=0", "max_tokens"), ("temperature=-1", "temperature")])
def test_bad_sampling(value, message):
    with pytest.raises(ValueError, match=message):
        generate.run(settings("prompt=a", value))


# --- what comes out ---


def test_text_and_figures(capsys):
    result = generate.run(settings("prompt=def f(n):"))
    out, err = capsys.readouterr()
    assert out.startswith("def f(n):") and out.endswith("\n")
    assert result["tokens"] == 3 and result["checkpoint"] == "random" and result["tok_per_s"] > 0
    assert result["acceptance_length"] == 1.0 and "3 tokens in" in err
    generate.run(settings("prompt=def f(n):", "echo=false"))
    assert capsys.readouterr().out == out.removeprefix("def f(n):")


def test_a_completion_cut_by_the_context_is_told(made, tmp_path, capsys):
    context = made[0].context
    result = generate.run(settings("prompt=" + "x" * 8, "max_tokens=3"))
    assert "note:" not in capsys.readouterr().err
    left = context - result["prompt_tokens"]
    for most in (10**6, left + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generate.offline, "generate", lambda *a: [Completion([1], 0, "length")])
            patch.setattr(generate, "summary", lambda *a: {})
            generate.run(settings(f"prompt={'x' * 8}", f"max_tokens={most}"))
        note = f"note: max_tokens={most} is capped to {left} by the context of {context}\n"
        assert capsys.readouterr().err == note


def test_several_capped_prompts_are_one_note(capsys):
    note_capped([10, 90, 95], 20, 100)
    note = "note: max_tokens=20 is capped to 5 to 10 for 2 of 3 prompts by the context of 100\n"
    assert capsys.readouterr().err == note


def test_several_prompts_have_headers_and_say_what_they_say_alone(tmp_path, capsys):
    lines = ["a = 1", "import os", "x"]  # a batch of two, then one
    (tmp_path / "p").write_text("\n".join(lines))
    result = generate.run(settings(f"prompt_file={tmp_path / 'p'}", "temperature=0.7", "speculate=true"))
    together = capsys.readouterr().out
    assert result["prompts"] == 3 and result["tokens"] == 9
    alone = []
    for i, line in enumerate(lines, start=1):
        generate.run(settings(f"prompt={line}", "temperature=0.7"))
        alone.append(f"=== {i} of 3 ===\n" + capsys.readouterr().out)
    assert together == "".join(alone)


def test_the_whole_command(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(entry.FULL_ERROR, "")
    monkeypatch.setattr("sys.argv", ["generate.py", *QUICK, "prompt=Hello, \"world\" ${x} 'and' [all]"])
    entry.entry(generate.run)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Hello, \"world\" ${x} 'and' [all]")
    result = json.loads(out[-1])
    assert {"tokens", "tok_per_s", "checkpoint", "acceptance_length"} <= set(result)
    [folder] = tmp_path.glob("outputs/generate/*/*")
    assert json.loads((folder / "result.json").read_text()) == result and (folder / "config.yaml").is_file()


def test_the_first_unfinished_prompt_streams(capsys):
    text = ByteText(264, 0, 1)
    printer = Printer(["p", "q"], text, echo=False)
    printer.begin(0)
    printer.push(1, text.encode("é")[:1])
    printer.push(0, text.encode("ab"))
    assert capsys.readouterr().out == "=== 1 of 2 ===\nab"
    printer.push(1, text.encode("é!")[1:])
    printer.end(0)
    printer.end(1)
    assert capsys.readouterr().out == "\n=== 2 of 2 ===\né!\n"


def test_acceptance_length_counts_decode_steps():
    assert acceptance_length([Completion([1], 0, "length")]) is None
    two = [Completion([1, 2, 3, 4], 2, "length"), Completion([1, 2], 1, "stop")]
    assert acceptance_length(two) == pytest.approx(5 / 3)


def test_byte_text():
    text = ByteText(300, 0, 1)
    assert text.decode(text.encode("é→x")) == "é→x" and text.decode([299, 3]) == "<299><3>"
    with pytest.raises(ValueError, match="vocab_size >= 264, got 100"):
        ByteText(100, 0, 1)
