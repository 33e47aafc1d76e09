"""Which proxy a request goes through."""

from __future__ import annotations

import pytest

from tidemill.runtime.sockets.http_proxy import find_proxy

PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("http://a.example", {}, None),
        ("http://a.example", {"HTTP_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ("http://a.example", {"HTTP_PROXY": "http://upper", "http_proxy": "http://lower"}, "http://lower"),
        ("https://a.example", {"HTTP_PROXY": "http://proxy"}, None),
        ("https://a.example", {"ALL_PROXY": "socks5h://proxy"}, "socks5h://proxy"),
        ("https://a.example", {"https_proxy": "http://one", "all_proxy": "http://all"}, "http://one"),
        ("http://a.example", {"http_proxy": "http://[::1]:3128"}, "http://[::1]:3128"),
    ],
)
def test_a_variable_names_the_proxy(url: str, environ: dict[str, str], expected: str | None) -> None:
    assert find_proxy(url, environ) == expected


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://a.example", "*"),
        ("http://a.example/path", "a.example"),
        ("http://A.example.", "a.EXAMPLE"),
        ("http://x.a.example", "other, .a.example"),
        ("http://x.a.example", "*.a.example"),
        ("http://a.example:8080", "a.example:8080"),
        ("http://a.example", "a.example:80"),
        ("http://10.1.2.3", "10.0.0.0/8"),
        ("http://[::1]:8080", "::1"),
        ("http://[::1]", "[::1]"),
        ("http://[::1]:8080", "[::1]:8080"),
        ("http://[fd00::5]", "fd00::/8"),
    ],
)
def test_a_host_that_the_list_names_is_reached_without_a_proxy(url: str, hosts: str, variable: str) -> None:
    assert find_proxy(url, {**PROXY, variable: hosts}) is None


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://a.example", ""),
        ("http://a.example", ","),
        ("http://ba.example", "a.example"),
        ("http://a.example:81", "a.example:80"),
        ("http://10.1.2.3", "11.0.0.0/8"),
        ("http://10.1.2.3", "fd00::/8"),
        ("http://a.example", "::1/128"),
        ("http://a.example", "[::1]:8080"),
        ("http://[::1]:8080", "[::1]:80"),
        ("http://a.example", "bad host, :, ."),
    ],
)
def test_any_other_host_is_reached_through_the_proxy(url: str, hosts: str) -> None:
    assert find_proxy(url, {**PROXY, "NO_PROXY": hosts}) == "http://proxy:3128"


@pytest.mark.parametrize("proxy", ["ftp://me:s3cret@host", "http://me:s3cret@host:port", "http://me:s3cret@::1:3128"])
def test_what_is_not_a_proxy_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(ValueError, match=r"ALL_PROXY is not the address of a proxy; .*IPv6") as caught:
        find_proxy("http://a.example", {"ALL_PROXY": proxy})
    assert "s3cret" not in str(caught.value)
