import logging

from babylon.core.home import Home, make_directory
from babylon.core.objects import MANIFEST, names, publish
from babylon.core.types import Claim
from babylon.training.progress_directory import (
    PROGRESS_FILE,
    forget_progress,
    progress_directory,
    take_up_progress,
)


def claim(epoch):
    return Claim(window_id="2025-11-14T09:00", epoch=epoch, owner="test")


def test_progress_of_another_machine_is_taken_up_unless_only_a_part_of_it_arrived(tmp_path, caplog):
    """A worker that was killed while it copied must not stop its successors."""
    store = f"file://{tmp_path / 'store'}"
    dead, own = (Home(root=tmp_path / name, store=store) for name in ("dead", "own"))
    for epoch in (1, 2):
        directory = progress_directory(dead, claim(epoch))
        make_directory(directory)
        (directory / PROGRESS_FILE).write_text(f"epoch {epoch}")
        publish(dead, directory)
    stored = tmp_path / "store" / directory.relative_to(dead.root)
    (stored / MANIFEST).unlink()  # it is written last
    with caplog.at_level(logging.WARNING, "babylon"):
        found = take_up_progress(own, claim(3))
    assert (found / PROGRESS_FILE).read_text() == "epoch 1"
    assert "2025-11-14T0900-e2" in caplog.text


def test_progress_is_forgotten_here_and_in_the_object_store(tmp_path):
    home = Home(root=tmp_path / "home", store=f"file://{tmp_path / 'store'}")
    directory = take_up_progress(home, claim(1))
    (directory / PROGRESS_FILE).write_text("epoch 1")
    publish(home, directory)
    assert names(home, home.progress) == [directory]
    forget_progress(home, directory)
    assert not directory.exists() and not list(names(home, home.progress))
    forget_progress(None, directory)  # again, without a store
