"""Sessions and how to open one: with a key or with a user's password; and tokens, which need no session.

Invariants: a session ends after 12 hours or at logout; there are at most a thousand, and the oldest are dropped first.
After too many wrong passwords for one user from one address, further passwords for that user from that address are
refused for a while; after too many wrong passwords in total, all passwords are. The key needs no such limit because it
cannot be guessed. Failures are logged. Used on one event loop only.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from tidemill.config.sections.web_settings import TokenSettings, UserSettings
from tidemill.core.errors import escape_surrogates
from tidemill.runtime.log.setup import throttle
from tidemill.web.access.hashes import is_password, is_token

log = structlog.get_logger(__name__)

SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 1000
#: Allowed wrong passwords per period: for one user from one address, and in total.
MAX_FAILURES = 10
MAX_ALL_FAILURES = 60
FAILURE_SECONDS = 60.0
#: Longer passwords are not hashed.
_MAX_PASSWORD_CHARS = 1024
_SHOWN_CHARS = 100


#: Failed logins are logged at most this often, with the number of suppressed entries.
_LOG_SECONDS = 60.0


def _log_failure(what: str, address: str, name: str | None = None) -> None:
    user = {} if name is None else {"user": escape_surrogates(name[:_SHOWN_CHARS])}
    throttle(log, _LOG_SECONDS).warning(f"a login with a wrong {what} was refused", address=address, **user)


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """The sender of a request.

    Attributes:
        name: The user's or the token's name; "key" for the key of the printed address.
        role: read or operate.
        csrf: The CSRF token that a change must carry; '' for API tokens, which browsers never add on their own.
    """

    name: str
    role: str
    csrf: str = ""

    @property
    def may_operate(self) -> bool:
        """Whether changes are allowed."""
        return self.role == "operate"


@dataclass(slots=True)
class _Session:
    identity: UserIdentity
    ends_at: float


class TooManyLoginsError(Exception):
    """Too many logins have failed."""

    def __init__(self, wait_seconds: float) -> None:
        super().__init__(f"too many failed logins; try again in {wait_seconds:.0f} s")
        self.wait_seconds = wait_seconds


@dataclass(slots=True)
class Logins:
    """Authenticates users and tokens.

    Args:
        key: The key in the printed address; None if there are users or tokens.
        users: Users by name.
        tokens: Tokens by name.
        clock: Returns monotonic seconds.
    """

    key: str | None
    users: Mapping[str, UserSettings]
    tokens: Mapping[str, TokenSettings]
    clock: Callable[[], float] = time.monotonic
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _failures: deque[tuple[float, tuple[str, str]]] = field(default_factory=deque)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def find_session(self, secret: str | None) -> UserIdentity | None:
        """Return the identity of a session; None if there is no such session."""
        session = self._sessions.get(secret or "")
        if session is None or session.ends_at <= self.clock():
            return None
        return session.identity

    def find_token(self, token: str) -> UserIdentity | None:
        """Return the identity of a token; None if the token is unknown."""
        found = [name for name, known in self.tokens.items() if is_token(token, known.hash)]
        return UserIdentity(found[0], self.tokens[found[0]].role) if found else None

    def use_key(self, key: str, address: str) -> str | None:
        """Open a session with the key of the printed address; return its secret, or None if the key is wrong."""
        if self.key is None or not hmac.compare_digest(key.encode(errors="replace"), self.key.encode()):
            _log_failure("key", address)
            return None
        return self._open("key", "operate")

    async def use_password(self, name: str, password: str, address: str) -> str | None:
        """Open a session for a user; return its secret, or None if name or password are wrong.

        Raises:
            TooManyLoginsError: Too many logins have failed; this password was not checked.
        """
        async with self._one_at_a_time:
            self._refuse_too_many((address, name))
            user = self.users.get(name)
            known = None if user is None or len(password) > _MAX_PASSWORD_CHARS else user.hash
            is_right = await asyncio.to_thread(is_password, password[:_MAX_PASSWORD_CHARS], known)
            if user is None or not is_right:
                self._failures.append((self.clock(), (address, name)))
                _log_failure("password", address, name)
                return None
        return self._open(name, user.role)

    def close(self, secret: str | None) -> None:
        """End a session."""
        self._sessions.pop(secret or "", None)

    def _open(self, name: str, role: str) -> str:
        now = self.clock()
        for secret in [secret for secret, session in self._sessions.items() if session.ends_at <= now]:
            del self._sessions[secret]
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        secret = secrets.token_urlsafe(32)
        self._sessions[secret] = _Session(UserIdentity(name, role, secrets.token_urlsafe(32)), now + SESSION_SECONDS)
        return secret

    def _refuse_too_many(self, who: tuple[str, str]) -> None:
        now = self.clock()
        while self._failures and self._failures[0][0] <= now - FAILURE_SECONDS:
            self._failures.popleft()
        own = [at for at, failed in self._failures if failed == who]
        times = own if len(own) >= MAX_FAILURES else [at for at, _ in self._failures]
        if len(own) >= MAX_FAILURES or len(times) >= MAX_ALL_FAILURES:
            raise TooManyLoginsError(times[0] + FAILURE_SECONDS - now)
