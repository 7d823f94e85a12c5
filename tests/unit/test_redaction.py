"""`redacted`: passwords and tokens in any place of a text, and nothing else."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest

from posttrain.core.errors import ResourceError
from posttrain.core.redaction import (
    MARK,
    address,
    redact_error,
    redact_logs,
    redacted,
    redacted_tree,
    redacting,
)

SECRET = "s3cr3t-Hunter2"

WITH_SECRETS = [
    f"http://user:{SECRET}@host:5000/api",
    f"https://{SECRET}@github.com/owner/name.git",
    f"postgresql+psycopg2://posttrain:{SECRET}@db/mlflow?sslmode=require",
    f"postgresql://a:{SECRET}@h1,postgresql://b:{SECRET}@h2",
    f"postgresql://user:with/slash{SECRET}@db/mlflow",
    f"http://user:with@at{SECRET}@proxy:3128",
    f"http://user:%20{SECRET}@host/x#y",
    f"(url: 'http://user:{SECRET}@host/api?x=1')",
    f"redirect=http%3A%2F%2Fuser%3A{SECRET}%40host%2F",
    f"redirect=http:%2f%2fuser:{SECRET}@host%2f",
    f'{{"uri": "http:\\/\\/user:{SECRET}@host\\/api"}}',
    f"https://host/a?x=1&access_token={SECRET}&y=2",
    f"https://host/a?api_key={SECRET}",
    f"https://bucket/o?X-Amz-Signature={SECRET}",
    f"host=db user=x password={SECRET} dbname=y",
    f"{{'Authorization': 'Basic {SECRET}'}}",
    f"authorization: {SECRET}",
    f"Bearer {SECRET}{SECRET}",
    f"rewards:\n- name: x\n  api_key: {SECRET}\n",
    f"  password: '{SECRET}'",
    f"https://host/x#access_token={SECRET}",
    f"AccountName=a;AccountKey={SECRET}==;EndpointSuffix=core.windows.net",
    f"[type=extra_forbidden, input_value={{'api_key': '{SECRET}'}}, input_type=dict]",
    json.dumps({"said": json.dumps({"x-api-key": SECRET})}),
    f"Client(api_key='{SECRET}', timeout=5)",
    f"openai_api_key = '{SECRET}'",
    f"agent --model m --api-key {SECRET} --port 1",
    f"agent --openai-api-key={SECRET}",
    f"['agent', '--hf-token', '{SECRET}', '--port', '1']",
    f'["agent", "--token={SECRET}"]',
    f"Cookie: session={SECRET}; theme=dark",
    f"{{'Set-Cookie': 'id={SECRET}; Path=/'}}",
    f"sent eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.{SECRET} to the server",
    f"exec: AWS_SECRET_ACCESS_KEY={SECRET} not found",
    f"ghp_{'a1' * 15} and hf_{'b2' * 17} and sk-{'c3' * 15} with http://u:{SECRET}@h",
]
HARMLESS = [
    "http://127.0.0.1:5000/#/experiments/1/runs/2?workflowType=machine_learning",
    "http://127.0.0.1:5000/#/models/tiny@champion",
    "models:/posttrain@champion",
    "sqlite:////home/user@example/mlflow.db",
    "redirect=http%3A%2F%2Fhost%2Fa?mail=someone@example.org",
    "tokens/response=12 pad_token: <|pad|> max_tokens=5",
    "Basic authentication needs a password; the token ended",
    "write to someone@example.org, see https://example.org/a and b@c",
    "git@github.com:owner/name.git",
    '{"token": " the", "tokens": ["a"], "api_key_env": "OPENAI_API_KEY", "top_token": "is"}',
    "  POSTTRAIN_API_KEY=... posttrain serve-model models:/quickstart@champion --host 0.0.0.0",
    "--token-budget 5 --api-key --port 1 --max-tokens 5 --pad-token <|pad|> --tokens 7",
    "Cookie: two cups of flour; a cookie: sugar",
    "a key of the environment: OPENAI_API_KEY (api_key_env: OPENAI_API_KEY)",
]


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_no_secret_is_left(text: str) -> None:
    shown = redacted(text)
    assert SECRET not in shown and MARK in shown
    assert redacted(shown) == shown
    for token in ("ghp_", "hf_", "sk-"):
        assert token not in shown


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_what_is_not_secret_in_a_url_stays() -> None:
    assert redacted(f"at http://u:{SECRET}@host:5000/api.") == "at http://***@host:5000/api."
    assert address(f"http://u:{SECRET}@host:5000") == "http://host:5000"
    line = json.dumps({"uri": f"http://u:{SECRET}@host", "n": 1})
    assert json.loads(redacted(line)) == {"uri": "http://***@host", "n": 1}


def test_values_of_secret_variables_are_found_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "unusual-form-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:p%40ss%2Fword1@proxy:1")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "of-an-account-1")
    assert redacted("cannot open of-an-account-1") == "cannot open ***"
    assert redacted("the hub refuses unusual-form-1") == "the hub refuses ***"
    assert redacted("login p@ss/word1 failed") == "login *** failed"


def test_trees_lose_secrets_by_key_and_by_form() -> None:
    tree = {"a": [{"api_key": SECRET, "url": f"http://u:{SECRET}@h"}], "n": 3, "token": None}
    assert redacted_tree(tree) == {
        "a": [{"api_key": MARK, "url": "http://***@h"}],
        "n": 3,
        "token": None,
    }
    command = ["agent", "--api-key", SECRET, "--token", SECRET, "--model", "m", "--secret"]
    shown = ["agent", "--api-key", MARK, "--token", MARK, "--model", "m", "--secret"]
    assert redacted_tree({"command": command}) == {"command": shown}


def test_errors_hold_no_secret_also_behind_them_and_copied() -> None:
    text = f"cannot reach http://u:{SECRET}@h"
    assert str(copy.copy(ResourceError(text))) == "cannot reach http://***@h"  # as pickle does
    try:
        try:
            raise ValueError(text)
        except ValueError as inner:
            raise OSError(5, text) from inner
    except OSError as error:
        redact_error(error)
        assert SECRET not in str(error) and SECRET not in str(error.__cause__)
        assert error.errno == 5


def test_streams_and_logs_of_any_library_are_redacted() -> None:
    target = io.StringIO()
    stream = redacting(target)
    assert redacting(stream) is stream
    print("to", f"http://u:{SECRET}@h", file=stream)
    before = logging.getLogRecordFactory()
    try:
        redact_logs()
        redact_logs()
        logger = logging.Logger("library")
        logger.addHandler(logging.StreamHandler(target))
        logger.warning("retrying %s", f"http://u:{SECRET}@h")
        try:
            raise ValueError(f"http://u:{SECRET}@h")
        except ValueError:
            logger.exception("failed")
    finally:
        logging.setLogRecordFactory(before)
    shown = target.getvalue()
    assert SECRET not in shown and "to http://***@h" in shown and "retrying http://***@h" in shown
    assert "ValueError: http://***@h" in shown
