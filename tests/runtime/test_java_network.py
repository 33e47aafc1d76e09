"""What Java is told of proxies and certificates, and how it is told."""

from __future__ import annotations

import base64
import ssl
import stat
import struct
from pathlib import Path

import pytest
import trustme

from tidemill.core.errors import ConfigError
from tidemill.runtime.embedded.java_network import connected_environment
from tidemill.runtime.embedded.trust_store import read_certificates, write_trust_store


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def bundle(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "bundle.pem"
    pem = authority.cert_pem.bytes()
    path.write_bytes(b"# the first\n" + pem + b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n" + pem)
    return path


def options(environ: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the system properties that a Java process would get."""
    connected_environment(environ, folder)
    lines = (folder / "java.options").read_text().splitlines()
    pairs = [line.strip('"').replace("\\\\", "\\").removeprefix("-D").partition("=") for line in lines]
    return {name: value for name, _, value in pairs}


def test_each_certificate_is_read_once_and_what_is_none_is_passed_over(bundle: Path, authority: trustme.CA) -> None:
    (certificate,) = read_certificates({"SSL_CERT_FILE": str(bundle)})
    assert certificate == ssl.PEM_cert_to_DER_cert(authority.cert_pem.bytes().decode())
    assert read_certificates({"SSL_CERT_DIR": str(bundle.parent)}) == [certificate]


def test_what_openssl_writes_behind_a_trusted_certificate_is_left_out(bundle: Path, tmp_path: Path) -> None:
    (certificate,) = read_certificates({"SSL_CERT_FILE": str(bundle)})
    body = base64.b64encode(certificate + b"trust settings").decode()
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(f"-----BEGIN TRUSTED CERTIFICATE-----\n{body}\n-----END TRUSTED CERTIFICATE-----\n")
    assert read_certificates({"SSL_CERT_FILE": str(trusted)}) == [certificate]


def test_without_variables_the_platform_s_certificates_are_read() -> None:
    assert read_certificates({})


def test_a_variable_that_names_no_certificate_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE=\S+/none: no certificate can be read there"):
        read_certificates({"SSL_CERT_FILE": str(tmp_path / "none")})


def test_a_trust_store_has_every_certificate(tmp_path: Path) -> None:
    write_trust_store([b"one", b"two"], tmp_path / "store")
    content = (tmp_path / "store").read_bytes()
    assert struct.unpack(">Iii", content[:12]) == (0xFEEDFEED, 2, 2)
    assert b"authority-0" in content
    assert content.count(b"X.509") == 2


def test_the_environment_s_proxies_become_java_s(bundle: Path, tmp_path: Path) -> None:
    environ = {
        "SSL_CERT_FILE": str(bundle),
        "HTTPS_PROXY": "http://us%40er:p%22\\w@proxy.example:3128",
        "http_proxy": "other.example",
        "NO_PROXY": "intern.example,10.0.0.7:80, .corp.example,*.x.example",
    }
    found = options(environ, tmp_path)
    assert (found["https.proxyHost"], found["https.proxyPort"]) == ("proxy.example", "3128")
    assert (found["http.proxyHost"], found["http.proxyPort"]) == ("other.example", "80")
    assert found["http.proxyUser"] == "us@er"
    assert found["http.proxyPassword"].replace('\\"', '"') == 'p"\\w'
    assert found["jdk.http.auth.tunneling.disabledSchemes"] == ""
    hosts = found["http.nonProxyHosts"].split("|")
    assert {"localhost", "intern.example", "*.intern.example", "10.0.0.7", "corp.example", "*.x.example"} <= {*hosts}


def test_without_a_proxy_none_is_set_and_one_for_everything_counts_for_both(bundle: Path, tmp_path: Path) -> None:
    environ = {"SSL_CERT_FILE": str(bundle)}
    assert not [name for name in options(environ, tmp_path) if "roxy" in name]
    found = options(environ | {"ALL_PROXY": "http://all.example:1"}, tmp_path)
    assert found["https.proxyHost"] == found["http.proxyHost"] == "all.example"


def test_a_socks_proxy_becomes_java_s(bundle: Path, tmp_path: Path) -> None:
    environ = {"SSL_CERT_FILE": str(bundle), "ALL_PROXY": "socks5h://me:s3cret@[::1]", "NO_PROXY": "[fd00::1],::2"}
    found = options(environ, tmp_path)
    assert (found["socksProxyHost"], found["socksProxyPort"]) == ("::1", "1080")
    assert (found["java.net.socks.username"], found["java.net.socks.password"]) == ("me", "s3cret")
    assert {"[fd00::1]", "[::2]"} <= {*found["socksNonProxyHosts"].split("|")}
    assert "https.proxyHost" not in found


def test_a_proxy_that_is_not_one_is_refused_without_its_password(bundle: Path, tmp_path: Path) -> None:
    for url in ("ftp://me:s3cret@proxy.example", "http://me:s3cret@proxy.example:port"):
        with pytest.raises(ConfigError, match="HTTPS_PROXY is not the address of a proxy") as caught:
            connected_environment({"SSL_CERT_FILE": str(bundle), "https_proxy": url}, tmp_path)
        assert "s3cret" not in str(caught.value)


def test_what_the_user_has_told_java_stays(bundle: Path, tmp_path: Path) -> None:
    own = "-Dhttps.proxyHost=mine -Djavax.net.ssl.trustStore=/mine"
    environ = {"SSL_CERT_FILE": str(bundle), "https_proxy": "http://p:1", "JAVA_TOOL_OPTIONS": own}
    assert not [name for name in options(environ, tmp_path) if "roxy" in name or "trust" in name]
    environ = {"SSL_CERT_FILE": str(bundle), "JDK_JAVA_OPTIONS": "-Dmine=1"}
    assert connected_environment(environ, tmp_path)["JDK_JAVA_OPTIONS"] == f'-Dmine=1 "@{tmp_path}/java.options"'


def test_only_this_user_can_read_the_options(bundle: Path, tmp_path: Path) -> None:
    connected_environment({"SSL_CERT_FILE": str(bundle)}, tmp_path)
    assert stat.S_IMODE((tmp_path / "java.options").stat().st_mode) == 0o600
