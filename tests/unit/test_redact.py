"""What is removed from a config before it leaves the run's folder, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.redact import REMOVED, without_any_secret


@pytest.mark.shows("SEC9")
@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "API_KEY", "OPENAI_API_KEY", "hf_token", "token", "password"),
        *("db_password", "client_secret", "private_key", "credentials", "Authorization", "cookie"),
        *("aws_secret_access_key", "x-api-key", "accessToken", "key", "secret_key_base64"),
    ],
)
def test_the_value_of_a_key_that_names_a_secret_is_removed(key: str) -> None:
    assert without_any_secret({"a": [{key: "abc"}]}, {}) == {"a": [{key: REMOVED}]}


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 512, "token_id": 100_000, "max_completion_tokens": 4},
        {"api_key_var": "OPENAI_API_KEY", "pass_env": ["MY_KEY"], "headers_from_env": {"X": "V"}},
        {"eos_token": "<|im_end|>", "key": "environment/task/agent", "keyboard": "qwerty"},
        {"base_url": "http://127.0.0.1:8000/v1?timeout=5", "name": "Qwen/Qwen3-0.6B"},
        {"tokenizer": "gpt2", "author": "me", "monkey": "x", "prompt": "What is a token?"},
        {"revision": "0a1b" * 10, "gradus_commit": "0a1b" * 10, "seed": 7, "word": "pypi-server"},
        {"lr": 1e-5, "flag": True, "nothing": None, "empty_password": ""},
    ],
)
def test_what_is_no_secret_stays(value: dict[str, Any]) -> None:
    assert without_any_secret(value, {}) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host:80/a", "https://host:80/a"),
        ("https://hf_abc@host/a", "https://host/a"),
        ("http://h/?api_key=1&x=2#token=3", f"http://h/?api_key={REMOVED}&x=2"),
        ("postgresql+psycopg://u:p@db/runs", "postgresql+psycopg://db/runs"),
        ("see http://a:b@c/d and http://e", "see http://c/d and http://e"),
        ("use hf_abcdefghijklmnopqrstu", f"use {REMOVED}"),
        ("sk-proj-abcdefghijklmnopqrst", REMOVED),
        ("AKIAIOSFODNN7EXAMPLE", REMOVED),
        ("Bearer abcdefghijklmnop", REMOVED),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", REMOVED),
        ("http://[broken", REMOVED),
        ("sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("sqlite:///runs.db?mode=ro", "sqlite:///runs.db?mode=ro"),
        *(
            (f"asked with {it}.", f"asked with {REMOVED}.")
            for it in (
                *(f"{it}{'a1B2' * 6}" for it in ("gsk_", "xai-", "nvapi-", "r8_", "pplx-")),
                *(f"pypi-{'AgEI' * 9}", f"ya29.{'a1-_' * 6}", f"dapi{'0a1b' * 8}"),
                f"SG.{'a1B2' * 5}.{'a1B2' * 10}",
            )
        ),
        ("0a1b" * 10, REMOVED),
    ],
)
def test_a_text_that_holds_a_secret_loses_it(text: str, expected: str) -> None:
    assert without_any_secret({"note": text}, {}) == {"note": expected}


@pytest.mark.parametrize("table", ["env_vars", "headers", "extra_headers", "cookies"])
def test_every_value_of_a_table_of_variables_or_headers_is_removed(table: str) -> None:
    assert without_any_secret({table: {"A": "b", "C": 5}}, {}) == {
        table: {"A": REMOVED, "C": REMOVED}
    }


def test_words_of_a_command_line_are_removed_behind_a_secret_flag() -> None:
    words = ["--api-key", "abc", "--steps", "5", "--token=abc", "-v"]
    expected = ["--api-key", REMOVED, "--steps", "5", f"--token={REMOVED}", "-v"]
    assert without_any_secret({"argv": words}, {}) == {"argv": expected}


@pytest.mark.shows("SEC9")
@pytest.mark.parametrize(
    "words",
    [
        ["--inference.env_vars.SITE", "hidden"],
        ["--inference.env_vars.SITE=hidden"],
        ["--inference.env-vars.SITE", "hidden"],
        ["--orchestrator.train.env.0.env-vars.SITE=hidden"],
        ["--inference.env_vars", '{"SITE": "hidden"}'],
        ["--inference", '{"env_vars": {"SITE": "hidden"}}'],
        ['--monitor=[{"options": {"password": "hidden"}}]'],
        ["--monitor.0.options.api_key", "hidden"],
        ["--monitor", '[{"api_key": "hidden"'],
    ],
)
def test_what_a_config_would_not_keep_is_removed_from_its_command_line(words: list[str]) -> None:
    command = ["gradus", "rl", *words, "--trainer.gpus", "[0, 1]"]
    cleaned = without_any_secret(command, {})
    assert "hidden" not in str(cleaned)
    assert (cleaned[:2], cleaned[-2:]) == (command[:2], command[-2:])


@pytest.mark.shows("SEC9")
def test_the_value_of_a_secret_variable_is_removed_wherever_it_stands() -> None:
    variables = {"MY_TOKEN": "correct horse", "HOME": "nothing secret", "DEBUG_KEY": "true"}
    value = {"a": "x correct horse y", "b": "nothing secret", "correct horse": "true"}
    expected = {"a": f"x {REMOVED} y", "b": "nothing secret", REMOVED: "true"}
    assert without_any_secret(value, variables) == expected


def test_a_secret_inside_a_secret_table_does_not_hide_deeper() -> None:
    value = {"credentials": {"user": {"names": ["a", "b"], "id": 5}}}
    assert without_any_secret(value, {}) == {"credentials": {"user": REMOVED}}


@pytest.mark.shows("SEC12")
@pytest.mark.parametrize(
    "text",
    [
        "agent --api-key hidden --steps 1",
        "agent --api-key=hidden",
        "OPENAI_API_KEY=hidden python agent.py",
        "curl -H 'Authorization: token hidden' x",
        "X-API-Key: hidden",
        "me:hidden@proxy:3128",
        "http://me:hid/hidden@host/x",
        "https://hooks.slack.com/services/T0/B0/hidden",
    ],
)
def test_a_secret_inside_a_text_is_removed(text: str) -> None:
    assert "hidden" not in str(without_any_secret({"command": text}, {}))


@pytest.mark.parametrize(
    "key", ["db_pass", "dsn", "password2", "hf_token_2", "webhook_url", "authorization_header"]
)
def test_less_common_names_of_secrets_are_known(key: str) -> None:
    assert without_any_secret({key: "hidden"}, {}) == {key: REMOVED}


def test_variables_that_are_written_as_a_list_are_removed() -> None:
    assert without_any_secret({"env_vars": ["A=hidden"]}, {}) == {"env_vars": [REMOVED]}


@pytest.mark.parametrize(
    "text",
    [
        "agent --max-tokens 512 --name x",
        "package.module:Class",
        "image:tag@sha256:0123abcd",
        "http://127.0.0.1:8000/v1/x@y",
        "git+https://host/team/code@main",
        "Say what `x: y` means: z",
    ],
)
def test_a_text_without_a_secret_stays(text: str) -> None:
    assert without_any_secret({"text": text}, {}) == {"text": text}


@pytest.mark.parametrize("part", ["-", "a", " ", "://x:", "a:", "a=", "--a ", "'", "x@"])
def test_a_long_text_is_read_in_time_that_grows_with_its_length(part: str) -> None:
    assert without_any_secret([part * 50_000], {})
