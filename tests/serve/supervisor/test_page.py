"""What the supervisor adds to the metrics page."""

from serve.supervisor.page import SupervisorMetrics
from serve.wire.folder import SUPERVISOR_PAGE


def test_a_full_disk_does_not_end_the_server(tmp_path, caplog):
    page = SupervisorMetrics(tmp_path)
    blocked = tmp_path / f"{SUPERVISOR_PAGE}.new"
    blocked.mkdir()  # nothing can be written there
    for _ in range(3):
        page.write("earshot_up 0\n")
    assert caplog.text.count("cannot write the supervisor's metrics") == 1
    blocked.rmdir()
    page.write("earshot_up 0\n")
    assert "earshot_up 0" in (tmp_path / SUPERVISOR_PAGE).read_text()
