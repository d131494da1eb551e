"""`run.log` has what the packages tell of a run, once the folder is the run's."""

import logging

from ostinato_trainer.run_log import RUN_LOG, run_log

logger = logging.getLogger("ostinato_rollout.some_part")


def test_what_is_told_before_the_folder_is_held_waits(tmp_path):
    """Then it is written, with what comes later at once, after what an earlier attempt wrote; levels are as before afterwards."""
    (tmp_path / RUN_LOG).write_text("an earlier attempt\n")
    is_held, before = False, logger.getEffectiveLevel()
    with run_log(tmp_path, is_held=lambda: is_held):
        logger.info("placed in the cluster: %s", "here")
        logger.debug("a detail")
        assert (tmp_path / RUN_LOG).read_text() == "an earlier attempt\n"
        is_held = True
        logger.warning("weights go elsewhere")
        lines = (tmp_path / RUN_LOG).read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["an earlier attempt", "here", "weights go elsewhere"]
    assert "INFO ostinato_rollout.some_part: placed" in lines[1]
    assert logger.getEffectiveLevel() == before
    logger.warning("afterwards")
    assert len((tmp_path / RUN_LOG).read_text().splitlines()) == 3


def test_nothing_is_written_where_no_run_begins(tmp_path):
    """A run that is refused leaves no file."""
    with run_log(tmp_path / "run", is_held=lambda: False):
        logger.warning("refused")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_harms_no_run(tmp_path, capsys):
    """What cannot be written is let go of."""
    with run_log(tmp_path / "absent", is_held=lambda: True):
        logger.info("lost")
    assert capsys.readouterr().err == ""
