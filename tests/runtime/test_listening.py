"""Which port an endpoint has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.core.errors import ConfigError
from tidemill.runtime.sockets import ports
from tidemill.runtime.sockets.port_owners import PortClaim, PortOwners
from tidemill.runtime.sockets.ports import format_address, is_port_chosen, listen


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port that another process has, with a free one behind it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            yield port
            return


def test_a_default_port_in_use_leads_to_the_next_free_one(taken: int) -> None:
    with listen(MetricsSettings(port=taken), is_chosen=False) as listener:  # type: ignore[union-attr]
        assert taken < listener.getsockname()[1] < taken + ports.TRIED_PORTS


def test_a_chosen_port_in_use_is_refused(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"metrics.port: port {taken} of 127.0.0.1 is in use .* 0 for any free one"):
        listen(MetricsSettings(port=taken), is_chosen=True)


def test_without_a_free_port_there_is_no_endpoint_and_a_warning(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "TRIED_PORTS", 1)
    with capture_logs() as logs:
        assert listen(MetricsSettings(port=taken), is_chosen=False) is None
    assert logs[0]["log_level"] == "warning"
    assert "set metrics.port" in logs[0]["event"]


def test_port_0_is_any_free_one() -> None:
    with listen(MetricsSettings(port=0), is_chosen=True) as one, listen(MetricsSettings(port=0), is_chosen=True) as two:  # type: ignore[union-attr]
        assert one.getsockname()[1] != two.getsockname()[1]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_an_address_of_another_machine_is_refused(host: str, is_chosen: bool) -> None:
    with pytest.raises(ConfigError, match=f"metrics.host: cannot listen on '{host}'"):
        listen(MetricsSettings(host=host, port=0), is_chosen=is_chosen)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_address_is_one_that_a_browser_on_this_machine_opens(host: str, shown: str) -> None:
    with listen(MetricsSettings(host=host, port=0), is_chosen=True) as listener:  # type: ignore[union-attr]
        assert format_address(listener) == f"http://{shown}:{listener.getsockname()[1]}"


def test_a_port_is_chosen_if_the_file_the_environment_or_on_startup_set_it() -> None:
    default, same = MetricsSettings(), MetricsSettings(port=9090)
    assert not is_port_chosen(default, MetricsSettings(**default.model_dump()))
    assert is_port_chosen(same, same)
    assert is_port_chosen(default, MetricsSettings(port=9100))


def test_a_chosen_port_that_a_process_of_the_same_folder_has_leads_to_the_next_one(tmp_path: Path, taken: int) -> None:
    settings = MetricsSettings(port=taken)
    with PortOwners(str(tmp_path)) as first, PortOwners(str(tmp_path)) as second:
        assert first.claim(taken) is PortClaim.OWN
        with capture_logs() as logs, listen(settings, is_chosen=True, owners=second) as listener:  # type: ignore[union-attr]
            found = listener.getsockname()[1]
            assert taken < found < taken + ports.TRIED_PORTS
        assert logs[0]["event"].startswith("another process with this debug.db_dir uses metrics.port")
        assert (logs[0]["port"], logs[0]["taken"]) == (taken, found)
        assert first.claim(found) is PortClaim.OTHER


@pytest.mark.parametrize("folder", ["", "other", "file/below"])
def test_a_chosen_port_of_any_other_process_is_refused(tmp_path: Path, taken: int, folder: str) -> None:
    (tmp_path / "file").touch()
    with PortOwners(str(tmp_path)) as first, PortOwners(str(tmp_path / folder) if folder else "") as second:
        assert first.claim(taken) is PortClaim.OWN
        with pytest.raises(ConfigError, match=f"port {taken} of 127.0.0.1 is in use"):
            listen(MetricsSettings(port=taken), is_chosen=True, owners=second)


def test_a_claim_ends_with_its_block_and_with_a_port_that_cannot_be_had(tmp_path: Path, taken: int) -> None:
    with PortOwners(str(tmp_path)) as first:
        with pytest.raises(ConfigError):
            listen(MetricsSettings(port=taken), is_chosen=True, owners=first)
        with PortOwners(str(tmp_path)) as second:
            assert second.claim(taken) is PortClaim.OWN
    with PortOwners(str(tmp_path)) as third:
        assert third.claim(taken) is PortClaim.OWN
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
