"""The one door to the environment: labels, secrets that never leave it, and what a run may keep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.runtime import env


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if env.SECRET_NAME.search(name) or name in env.SAVED_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_hidden", set())


@pytest.mark.parametrize(
    ("variables", "label"),
    [
        ({}, ""),
        ({"GPU_RANK": "3"}, "3"),
        ({"GPU_RANK": "3", "CUDA_VISIBLE_DEVICES": "5"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "5,6"}, "5"),
        ({"CUDA_VISIBLE_DEVICES": " 07 "}, "7"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2a", "HIP_VISIBLE_DEVICES": "2"}, "2"),
        ({"GPU_RANK": "../x"}, ""),
    ],
)
def test_the_gpu_label(variables: dict[str, str], label: str) -> None:
    assert env.gpu_label(variables) == label
    assert env.detect(variables) == env.Env(tag=f"GPU{label}" if label else "")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "OPENAI_API_KEY", "WANDB_KEY", "X_SECRET", "DB_PASSWORD", "DB_PASSWD", "CREDENTIAL",
     "GOOGLE_CREDENTIALS", "AWS_SESSION", "AWS_ACCESS_KEY_ID"],
)  # fmt: skip
def test_secrets_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "s3cr3t-value")
    assert env.secrets() == ("s3cr3t-value",)
    assert env.redact("before s3cr3t-value after") == "before *** after"


@pytest.mark.parametrize("name", ["HOME_OF_MINE", "TOKENIZERS_MODE", "KEYBOARD", "SECRETARY"])
def test_other_names_are_no_secrets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "plain-value")
    assert env.secrets() == ()


def test_a_proxy_is_secret_only_in_its_password_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:pa55word@proxy.example:8080")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:8080")
    assert env.secrets() == ("user:pa55word",)
    assert env.redact("via http://user:pa55word@proxy.example:8080") == "via http://***@proxy.example:8080"


def test_short_values_are_left_and_the_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "x")
    monkeypatch.setenv("B_TOKEN", "abcdef")
    monkeypatch.setenv("C_TOKEN", "abcdefghij")
    assert env.secrets() == ("abcdefghij", "abcdef")
    assert env.redact("x abcdefghij abcdef") == "x *** ***", "no tail of the long one stays"


def test_a_secret_that_came_by_flag_is_hidden_too() -> None:
    for value in (None, "", "short"):
        env.hide(value)
    assert env.secrets() == ()
    env.hide("from-a-flag")
    assert env.redact("from-a-flag, and this", ("and this",)) == "***, ***"


def test_only_the_allowed_part_is_kept_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("HF_HOME", "/data/hf_abcdef/cache")
    monkeypatch.setenv("GPU_RANK", "3")
    monkeypatch.setenv("MY_OWN_VARIABLE", "private")
    assert env.saved() == {"HF_HOME": "/data/***/cache", "GPU_RANK": "3"}


def test_a_default_never_overrides_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("TERM", "to be taken away again")
    monkeypatch.delenv("TERM")
    env.setdefault("LANG", "de")
    env.setdefault("TERM", "dumb")
    assert (env.get("LANG"), env.get("TERM"), env.get("NO_SUCH_NAME", "d")) == ("C", "dumb", "d")


@pytest.mark.parametrize(
    ("value", "steps"),
    [("7:/runs/.prove-x/again", 7), ("7:/runs/.prove-y/again", None), ("7", None), ("x:/runs/.prove-x/again", None)],
)
def test_a_proof_ends_the_run_that_it_names_and_no_other(
    value: str, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.UNTIL, value)
    assert env.last_step(Path("/runs/.prove-x/again")) == steps
