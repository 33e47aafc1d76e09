"""Login with the key of the printed address, or with name and password; and logout."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tidemill.web.access.guard import LOGIN_PATH, LOGOUT_PATH
from tidemill.web.access.logins import SESSION_SECONDS, Logins, TooManyLoginsError
from tidemill.web.pages import Pages
from tidemill.web.routes import Routes


def build_login(logins: Logins, pages: Pages, cookie: str, *, is_secure: bool) -> Routes:
    """Return the routes of login and logout.

    Args:
        logins: Authenticates users.
        pages: Renders the login page.
        cookie: The name of the login cookie.
        is_secure: Whether browsers may send the cookie over https only.
    """
    router = Routes(include_in_schema=False)
    by_key = logins.key is not None

    def answer_page(request: Request, target: str, error: str = "", status: int = 200) -> Response:
        values = {"next": target, "error": error, "by_key": by_key, "has_users": bool(logins.users)}
        return pages.answer(request, "login.html", status, **values)

    def log_in(request: Request, secret: str, target: str) -> Response:
        # After a link from another site, a redirect would not carry a SameSite=Strict cookie; this page does.
        response = pages.answer(request, "entered.html", target=pages.url(target))
        _set_cookie(response, cookie, secret, is_secure=is_secure)
        return response

    def use_key(request: Request, key: str, target: str) -> Response:
        secret = logins.use_key(key, _find_address(request))
        if secret is None:
            text = "This key is wrong; each start has a new one. Open the address in the newest log."
            return answer_page(request, target, text, 403)
        return log_in(request, secret, target)

    @router.get(LOGIN_PATH)
    async def show(request: Request, next: str = "/", key: str = "") -> Response:
        target = _choose_target(next)
        try:
            return use_key(request, key, target) if key and by_key else answer_page(request, target)
        except TooManyLoginsError as error:
            return _answer_wait(answer_page(request, target, f"{error}.", 429), error)

    @router.post(LOGIN_PATH)
    async def enter(request: Request) -> Response:
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode(errors="replace")).items()}
        target = _choose_target(form.get("next", "/"))
        try:
            if by_key:
                return use_key(request, form.get("key", ""), target)
            secret = await logins.use_password(form.get("name", ""), form.get("password", ""), _find_address(request))
        except TooManyLoginsError as error:
            return _answer_wait(answer_page(request, target, f"{error}.", 429), error)
        if secret is None:
            return answer_page(request, target, "Name or password is wrong.", 403)
        return log_in(request, secret, target)

    @router.post(LOGOUT_PATH)
    async def leave(request: Request) -> Response:
        logins.close(request.cookies.get(cookie))
        response = RedirectResponse(pages.url(LOGIN_PATH), 303)
        response.delete_cookie(cookie)
        return response

    return router


def _set_cookie(response: Response, cookie: str, secret: str, *, is_secure: bool) -> None:
    response.set_cookie(
        cookie, secret, max_age=int(SESSION_SECONDS), httponly=True, samesite="strict", secure=is_secure
    )


def _answer_wait(response: Response, error: TooManyLoginsError) -> Response:
    response.headers["Retry-After"] = str(int(error.wait_seconds) + 1)
    return response


def _find_address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _choose_target(wanted: str) -> str:
    """Return the path to open after the login; it always is a path of this server.

    Example:
        >>> _choose_target("/tasks?status=failed"), _choose_target("//evil.example"), _choose_target("https://e.x/")
        ('/tasks?status=failed', '/', '/')
    """
    is_own = wanted.startswith("/") and not wanted.startswith(("//", "/\\")) and "\\" not in wanted
    return wanted if is_own and wanted.isprintable() else "/"
