"""Files of results."""

import pytest

from eval.record import write_json
from serve.contract.errors import FileError


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    """Only the bench said so; an evaluation ended in a stack trace."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"^cannot write .*run\.json: (Not a dir|File exists)"):
        write_json(tmp_path / "file" / "run.json", {})
