"""What leaves a run's folder, and what its logs hold, without keys, tokens and passwords.

Three nets, since no one of them is tight: names of keys, forms of values, and the values of
variables in this process whose names say that they are secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

REMOVED = "(removed)"

_SECRET_WORDS = (
    r"password|passwd|passphrase|secrets?|credentials?|authorization|cookies?|bearer"
    r"|api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key|signature|sig"
)
_SECRET_KEY = re.compile(
    rf"(?:^|[_\-. ])(?:{_SECRET_WORDS}|auth|pass|passcode|pwd|pat|dsn|jwt|keys?|tokens?"
    r"|webhook(?:[_-]?url)?|connection[_-]?string)"
    r"(?:[_\-. ]?\d+|[_\-. ](?:value|b64|base64|header))?$",
    re.IGNORECASE,
)
_SECRET_QUERY = re.compile(rf"{_SECRET_WORDS}|token|key|auth|code|pass|pwd?$", re.IGNORECASE)
_SECRET_TABLE = re.compile(
    r"(?:^|_)(?:env_vars|environ|env_variables|environment_variables|headers|extra_headers|cookies"
    r"|credentials|secrets)$",
    re.IGNORECASE,
)
_HARMLESS_KEY = re.compile(r"^(?:eos|bos|pad|unk|mask|sep|cls|stop)_tokens?$", re.IGNORECASE)
_HARMLESS_VALUE = re.compile(r"^environment(?:/task|/agent)*$")
"""What the option `key` of an algorithm may be."""
_NAMES_A_VARIABLE = re.compile(r"(?:_var|_vars|_env|_from_env|_variable)$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"KEY|TOKEN|SECRET|PASS(?:WORD|WD|PHRASE)?(?:_|$)|CREDENTIAL|COOKIE|DSN|(?:^|_)PAT(?:_|$)", re.I
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,}|xox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|(?:gsk_|xai-|nvapi-|r8_|pplx-|pypi-|ya29\.)[A-Za-z0-9_\-]{20,}|dapi[0-9a-f]{32}"
    r"|SG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}"
    r"|AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}|AIza[A-Za-z0-9_\-]{30,}|npm_[A-Za-z0-9]{20,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*)"
    r"|\b(?:Bearer|Basic)\s+[A-Za-z0-9+/=._\-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END)[\s\S])*(?:-----END[A-Z ]*-----)?"
    r"|(?<=//hooks\.slack\.com/services/)[A-Za-z0-9/]+"
    r"|(?<=/api/webhooks/)\d+/[A-Za-z0-9_\-]+",
)
_HEX_KEY = re.compile(r"[0-9a-f]{40}")
"""As keys of Weights & Biases, and as commits."""
_NAMES_A_COMMIT = re.compile(r"revision|commit|sha|hash|digest|version", re.IGNORECASE)
_VALUE = r"(\"[^\"]*\"|'[^']*'|(?:[Tt]oken )?[^\s\"',;]+)"
_FLAG_IN_TEXT = re.compile(rf"(?<![\w\-])--?([A-Za-z][\w\-]*)[\s=]{_VALUE}")
_ASSIGNMENT = re.compile(rf"(?<![\w\-?&])([A-Za-z][\w\-]*)[\"']?\s?[=:]\s?{_VALUE}")
"""`--name value`, `NAME=value`, `Name: value` and `"name": value` inside a text, as a command."""
_USER_OF_PROXY = re.compile(
    r"(?<![\w/])[^\s:/@\"'=]{1,100}:[^\s:/@\"']{1,300}@(?!sha\d)(?=[\w.\-])"
)
_PASSWORD_WITH_SLASH = re.compile(r"(?<=://)[^/\s:@]{1,100}:(?!\d+/)[^\s@\"']{1,300}@")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.\-]*://[^\s\"'<>]+")
_FLAG = re.compile(r"^--?([A-Za-z][\w.\-]*)(?:=(.*))?$", re.DOTALL)
_LEAST_CHARACTERS = 6
"""A shorter value of a secret variable, such as "true", would also hit what is none."""


def without_any_secret(value: Any, variables: Mapping[str, str]) -> Any:
    """`value`, JSON, with REMOVED in the places of what is or may be secret.

    Names of variables that hold a secret stay: they tell a reader where it comes from.

    >>> without_any_secret({"api_key": "abc", "url": "http://me:pw@host/?token=1"}, {})
    {'api_key': '(removed)', 'url': 'http://host/?token=(removed)'}
    """
    known = sorted(_secret_values(variables), key=len, reverse=True)
    return _clean(value, known)


class SecretFilter:
    """Takes secrets out of the lines of a log: values of variables, and what has their form.

    Assignments and flags, which `without_any_secret` also cleans, stay: a line that tells of
    "tokens: 512" is no secret.

    >>> SecretFilter({"API_TOKEN": "of the house"})(b"asked with of the house")
    b'asked with (removed)'
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        found = _secret_values(variables)
        # As they stand in JSON too, and in JSON that a line of JSON quotes.
        for escapes in (True, False, True, False):
            found |= {json.dumps(it, ensure_ascii=escapes)[1:-1] for it in found}
        known = sorted(found, key=len, reverse=True)
        forms = [*map(re.escape, known), _SECRET_VALUE.pattern]
        self._forms = re.compile("|".join(forms).encode())

    def __call__(self, line: bytes) -> bytes:
        return self._forms.sub(REMOVED.encode(), line)


def _secret_values(variables: Mapping[str, str]) -> set[str]:
    return {
        value
        for name, value in variables.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _LEAST_CHARACTERS
    }


def _clean(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {_clean_text(str(k), known): _member(str(k), v, known) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return _clean_list(value, known)
    return _clean_text(value, known) if isinstance(value, str) else value


def _member(key: str, value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping) and _SECRET_TABLE.search(key):
        return dict.fromkeys(value, REMOVED)
    if isinstance(value, list) and _SECRET_TABLE.search(key):
        return _removed(value)
    is_harmless = isinstance(value, str) and _HARMLESS_VALUE.match(value)
    if _is_secret_key(key) and not is_harmless:
        return _removed(value)
    is_hex = isinstance(value, str) and _HEX_KEY.fullmatch(value)
    if is_hex and not _NAMES_A_COMMIT.search(key):
        return REMOVED
    return _clean(value, known)


def _is_secret_key(key: str) -> bool:
    # A word boundary inside camelCase too: `apiKey`.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    is_harmless = _NAMES_A_VARIABLE.search(spaced) or _HARMLESS_KEY.match(spaced)
    return bool(_SECRET_KEY.search(spaced)) and not is_harmless


def _removed(value: Any) -> Any:
    """Every text below a secret key; numbers stay, `max_tokens` and such are counts."""
    if isinstance(value, str):
        return REMOVED if value else value
    if isinstance(value, Mapping):
        return {key: _removed(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_removed(member) for member in value]
    return value


def _clean_list(values: Sequence[Any], known: Sequence[str]) -> list[Any]:
    """Also the word after a flag such as `--api-key`, one behind its `=`, and tables of JSON."""
    cleaned = []
    is_secret_next = False
    for value in values:
        flag = _FLAG.match(value) if isinstance(value, str) else None
        if is_secret_next and flag is None:
            cleaned.append(_removed(value))
        elif flag is not None and flag[2] is not None:
            hidden = REMOVED if _is_secret_flag(flag[1]) else _clean_word(flag[2], known)
            cleaned.append(f"{value[: flag.start(2)]}{hidden}")
        else:
            cleaned.append(
                _clean_word(value, known) if isinstance(value, str) else _clean(value, known)
            )
        is_secret_next = flag is not None and flag[2] is None and _is_secret_flag(flag[1])
    return cleaned


def _is_secret_flag(name: str) -> bool:
    """Also `inference.env_vars` and all below it: what a config keeps there is removed as well."""
    parts = name.replace("-", "_").split(".")
    return _is_secret_key(parts[-1]) or any(map(_SECRET_TABLE.search, parts))


def _clean_word(word: str, known: Sequence[str]) -> str:
    """A word of a command, where it is JSON by the keys of its tables."""
    if word.lstrip().startswith(("{", "[")):
        try:
            table = json.loads(word)
        except (ValueError, RecursionError):
            return _clean_text(word, known)
        return json.dumps(_clean(table, known), ensure_ascii=False)
    return _clean_text(word, known)


def _clean_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, REMOVED)
    text = _SECRET_VALUE.sub(REMOVED, text)
    text = _PASSWORD_WITH_SLASH.sub("", text)
    text = _USER_OF_PROXY.sub("", text)
    text = _FLAG_IN_TEXT.sub(_clean_assignment, text)
    text = _ASSIGNMENT.sub(_clean_assignment, text)
    return _URL.sub(lambda found: _clean_url(found[0]), text) if "://" in text else text


def _clean_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return REMOVED
    fields = []
    for field in parts.query.split("&") if parts.query else []:
        name, equals, _ = field.partition("=")
        fields.append(f"{name}={REMOVED}" if equals and _SECRET_QUERY.search(name) else field)
    host = parts.netloc.rpartition("@")[2]
    # A fragment may carry a token and says nothing of where a server is. Put together by hand:
    # without a host, as in `sqlite:////data/runs.db`, urlunsplit leaves slashes out.
    query = f"?{'&'.join(fields)}" if fields else ""
    return f"{parts.scheme}://{host}{parts.path}{query}"


def _clean_assignment(found: re.Match[str]) -> str:
    """Numbers stay, they are counts."""
    name, value = found.groups()
    if not _is_secret_key(name) or value.strip("\"'").isdigit():
        return found[0]
    return f"{found[0][: -len(value)]}{REMOVED}"
