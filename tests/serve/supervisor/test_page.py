"""What the supervisor adds to the metrics page."""

from serve.contract.config import Config
from serve.supervisor.run import Server
from serve.wire.folder import SUPERVISOR_PAGE


def test_a_full_disk_does_not_end_the_server(tmp_path, caplog):
    server = Server(tmp_path, Config(), {}, tmp_path / "log")
    blocked = tmp_path / f"{SUPERVISOR_PAGE}.new"
    blocked.mkdir()  # nothing can be written there
    for _ in range(3):
        server._publish()
    assert caplog.text.count("stay as they were") == 1
    blocked.rmdir()
    server._publish()
    assert "earshot_up 0" in (tmp_path / SUPERVISOR_PAGE).read_text()
