"""Hides secrets wherever configuration, errors or logs are shown.

A secret is recognised by its key (`redact`), or by its form within a text (`redact_text`): the user part of a URL,
`password=...`, `--token ...`, signatures in URLs, private keys, tokens with a well-known prefix. Masking too much is
better than masking too little. Values passed to clients are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

MASK = "***"

#: Words that make a value secret if they are part of its key.
_WORDS = r"passw|pwd|passphrase|secret|token|credential|authori[sz]ation|cookie|api[._-]?key|jaas"
_SECRET_KEY = re.compile(rf"(?:{_WORDS})|[._-]key$|^key[._-]?pem$|^hash$|(?:^|[._-])auth$", re.IGNORECASE)
_SASL = re.compile(r"sasl[._]", re.IGNORECASE)
_SASL_PUBLIC = re.compile(r"sasl[._]mechanisms?$", re.IGNORECASE)
_SSL_KEY = re.compile(r"ssl[._]key(?:[._]|$|store[._-]?key)", re.IGNORECASE)
#: Paths and names of secret files are not secret, and are needed to find errors.
_PUBLIC = re.compile(
    r"[._](?:location|path|file|url|mechanism|format|type|enabled?)$|^env_inherit_deny$", re.IGNORECASE
)
#: The text before `://`, and a name after the word that makes it secret, are bounded: without a bound, a long text of
#: only such words would take quadratic time, with the GIL held.
_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^/?#\s'\"]*)@")
_ASSIGNED = re.compile(
    rf"(?P<name>(?:{_WORDS})[\w.-]{{0,100}})(?P<equals>['\"]?\s{{0,100}}[=:]\s*)"
    r"(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s,;&'\"}\])]+)",
    re.IGNORECASE,
)
_USER_OPTIONS = frozenset({"-u", "-U", "--user", "--proxy-user"})
#: Any header may be secret, except these.
PUBLIC_HEADERS = frozenset({"accept", "accept-encoding", "content-encoding", "content-type", "user-agent"})
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}")
#: An option with its value after a blank, within one text: a command line in an error, or one passed to a shell.
_OPTION = re.compile(
    rf"(?P<option>(?<![\w-])--?[\w.-]{{0,60}}(?:{_WORDS})[\w.-]{{0,60}})(?P<blank>\s{{1,10}})"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\"-]\S*)",
    re.IGNORECASE,
)
#: The user option of curl and similar programs: a name with a password.
_USER_OPTION = re.compile(
    r"(?P<option>(?<![\w-])(?:-[uU]|--(?:proxy-)?user)(?:\s{1,10}|=)?['\"]?)[^\s:'\"=-][^\s:'\"]{0,200}:\S+"
)
_SIGNATURE = re.compile(r"(?P<name>[?&](?:sig|[\w-]{0,40}signature)=)[^&\s'\"#]+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
#: Tokens with a recognisable prefix: of Stripe and OpenAI, GitHub, AWS, Slack, and JSON web tokens.
_KNOWN_TOKEN = re.compile(
    r"\b(?:[spr]k[-_](?:live|test|proj|ant)[-_][\w-]{6,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,})"
)


def is_secret(key: str) -> bool:
    """Return whether the value of a key with this name is a secret.

    Example:
        >>> [is_secret(key) for key in ("sasl.password", "ssl.key.pem", "ssl.ca.location", "topic")]
        [True, True, False, False]
    """
    if _PUBLIC.search(key):
        return False
    if _SASL.match(key):
        return not _SASL_PUBLIC.match(key)
    return bool(_SECRET_KEY.search(key) or _SSL_KEY.search(key))


def announces_secret(argument: str) -> bool:
    """Return whether a command argument is an option whose value, the next argument, is a secret.

    Example:
        >>> [announces_secret(argument) for argument in ("--password", "--db-token", "--token=x", "password", "--top")]
        [True, True, False, False, False]
    """
    return argument.startswith("-") and "=" not in argument and len(argument) <= 100 and is_secret(argument.lstrip("-"))


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of a command as texts, with their secrets masked.

    Example:
        >>> redact_arguments(["curl", "--token", "hunter2", "http://me:hunter2@host/"])
        ['curl', '--token', '***', 'http://***@host/']
    """
    masked, option = [], ""
    for argument in arguments:
        masked.append(redact_argument(argument, option))
        option = argument
    return masked


def redact_argument(argument: str, before: str) -> str:
    """Return one argument of a command with its secrets masked; `before`: the argument before it.

    Example:
        >>> redact_argument("me:hunter2", "-u"), redact_argument("1000", "-u")
        ('***', '1000')
    """
    if not argument.startswith("-") and (announces_secret(before) or (before in _USER_OPTIONS and ":" in argument)):
        return MASK
    return redact_text(argument)


def redact(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a mapping with every secret replaced by `***`.

    Example:
        >>> redact({"sasl.password": "hunter2", "url": "http://me:hunter2@host/"})
        {'sasl.password': '***', 'url': 'http://***@host/'}
    """
    return {key: _redact_item(str(key), item) for key, item in value.items()}


def redact_text(text: str) -> str:
    """Mask everything in a text that looks like a secret; the module docstring lists the forms.

    Example:
        >>> redact_text("cannot reach postgres://app:hunter2@db/x")
        'cannot reach postgres://***@db/x'
    """
    text = _KNOWN_TOKEN.sub(MASK, _BEARER.sub(rf"\1 {MASK}", text))
    if "@" in text:
        text = _USERINFO.sub(rf"\g<scheme>{MASK}@", text)
    if "=" in text or ":" in text:
        text = _SIGNATURE.sub(rf"\g<name>{MASK}", _ASSIGNED.sub(_mask_assigned, text))
    if "-" in text:
        text = _USER_OPTION.sub(rf"\g<option>{MASK}", _OPTION.sub(_mask_option, text))
        if "PRIVATE KEY-----" in text:
            text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    return text


def find_url_secrets(url: str) -> frozenset[str]:
    """Return the passwords in a URL, as written and decoded: no message may repeat them.

    Example:
        >>> sorted(find_url_secrets("redis://app:p%40ss@host/0"))
        ['p%40ss', 'p@ss']
    """
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return frozenset()
    found = {password, unquote(password)} if password else set()
    found |= {value for key, value in parse_qsl(parts.query) if value and is_secret(key)}
    return frozenset(found)


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """Mask these secrets in a text, and everything that looks like a secret.

    Example:
        >>> mask_secrets("login of app with p@ss failed", {"p@ss"})
        'login of app with *** failed'
    """
    for secret in secrets:
        text = text.replace(secret, MASK)
    return redact_text(text)


def _mask_assigned(found: re.Match[str]) -> str:
    # An example that must stay readable: InvalidPasswordError: password authentication failed ...
    if not is_secret(found["name"]) or found["value"] == MASK or found["name"].endswith("Error"):
        return found[0]
    return f"{found['name']}{found['equals']}{MASK}"


def _mask_option(found: re.Match[str]) -> str:
    return f"{found['option']}{found['blank']}{MASK}" if is_secret(found["option"].lstrip("-")) else found[0]


def _redact_item(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and all(isinstance(item, Mapping) and "hash" in item for item in value.values()):
        return redact(value)  # `debug.tokens`: names and roles are not secret
    # An empty value is shown, so that the reader sees that a password is missing.
    if is_secret(key) and value is not None and value != "" and not isinstance(value, bool):
        return MASK
    if key.lower() == "headers" and isinstance(value, Mapping):
        return {name: item if str(name).lower() in PUBLIC_HEADERS else MASK for name, item in value.items()}
    return _redact_value(value)


def _redact_value(value: Any) -> Any:
    match value:
        case str():
            return redact_text(value)
        case Mapping():
            return redact(value)
        case Sequence() if not isinstance(value, bytes):
            return [_redact_value(item) for item in value]
        case _:
            return value
