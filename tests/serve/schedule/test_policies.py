"""Policies: the order each gives, and what it takes to add one."""

import random
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from scripts.build import build_settings
from scripts.serving.engine import build_policy
from serve.schedule import policies
from serve.settings import Policy
from tests.serve.drive import Loop, ask, scheduler

CONF = Path(__file__).parents[3] / "conf"

YOUNGEST = '''"""Last come, first served, but for prompts up to ``patience`` tokens."""


def key(sequence, cached, patience: int):
    return (len(sequence.ask.tokens) > patience, -sequence.order)
'''
YAML = """name: youngest
rekey: false
options:
  patience: 8
"""


def order(loop: Loop) -> list[int]:
    """Handles in the order in which they finish, one running at a time."""
    loop.run()
    return list(loop.finished)


def loop_with(policy: Policy, **sizes) -> Loop:
    s = scheduler(max_batch=1, key=build_policy(policy), rekey=policy.rekey, **sizes)
    return Loop(s, random.Random(0))


def test_fcfs_keeps_the_order_of_arrival():
    loop = loop_with(Policy("fcfs"))
    loop.add(*(ask(h, range(h, h + 9), priority=-h) for h in (3, 1, 2)))
    assert order(loop) == [3, 1, 2]


def test_priority_goes_first_and_equals_by_arrival():
    loop = loop_with(Policy("priority"))
    loop.add(*(ask(h, range(h, h + 9), priority=p) for h, p in ((1, 2), (2, 0), (3, 1), (4, 0))))
    assert order(loop) == [2, 4, 3, 1]


def test_cache_aware_takes_the_prompt_with_least_left():
    loop = loop_with(Policy("cache_aware", rekey=True), window="replay")
    loop.add(ask(1, range(20)))
    loop.run()
    loop.add(ask(2, range(30, 44)), ask(3, [*range(20), 1, 2]), ask(4, range(50, 53)))
    assert order(loop) == [1, 3, 4, 2]


def test_keys_that_change_are_asked_anew():
    """2 shares with 1, but nothing is cached when both arrive: only with rekey it passes 3, which is shorter."""
    for rekey, want in ((True, [1, 2, 3]), (False, [1, 3, 2])):
        loop = loop_with(Policy("cache_aware", rekey), window="replay")
        loop.add(ask(1, range(20)), ask(2, [*range(20), 1, 2]), ask(3, range(20, 41)))
        assert order(loop) == want


def test_a_new_policy_is_one_file_and_one_yaml(tmp_path, monkeypatch):
    """In 30 lines or less, chosen by override, options by keyword."""
    assert len((YOUNGEST + YAML).splitlines()) <= 30
    (tmp_path / "youngest.py").write_text(YOUNGEST)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    (tmp_path / "serve/policy").mkdir(parents=True)
    (tmp_path / "serve/policy/youngest.yaml").write_text(YAML)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = [f"hydra.searchpath=[file://{tmp_path}]", "serve/policy=youngest"]
        policy = build_settings(compose("config", overrides=chosen)).serve.policy
    loop = loop_with(policy)
    loop.add(ask(1, range(9)), ask(2, range(5)), ask(3, range(12)), ask(4, range(6)))
    assert order(loop) == [4, 2, 3, 1]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy("lifo"), "serve.policy.name=lifo"),
        (Policy("fcfs", options={"patience": 1}), "serve.policy.options.patience"),
    ],
)
def test_a_policy_that_is_not_there(policy, message):
    with pytest.raises(ValueError, match=message):
        build_policy(policy)


@pytest.mark.parametrize("name", [f.stem for f in sorted((CONF / "serve/policy").glob("*.yaml"))])
def test_every_yaml_names_a_file(name):
    values = OmegaConf.to_container(OmegaConf.load(CONF / "serve/policy" / f"{name}.yaml"))
    assert values["name"] == name and callable(build_policy(Policy(**values)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shortest", {}, "missing 1 required positional argument: 'cap'"),
        ("shortest", {"cap": "foo"}, "TypeError"),
        ("shortest", {"cup": 1}, "unknown key serve.policy.options.cup"),
    ],
)
def test_a_policy_that_cannot_order_is_refused_before_any_request(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_policy(Policy(name, options=options))
