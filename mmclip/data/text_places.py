"""What a text run's evaluation data are called, on the command line, in tables and on disk."""

from __future__ import annotations

from pathlib import Path

EVALUATIONS = "evaluations"  # of a run: a folder each for what is evaluated beside the first
TEST = "test"


def folder_and_split(asked: str) -> tuple[Path, str]:
    """Of an entry of --val-data, FOLDER or FOLDER:SPLIT.

    >>> folder_and_split("data/scifact:dev"), folder_and_split("data/scifact")
    ((PosixPath('data/scifact'), 'dev'), (PosixPath('data/scifact'), 'test'))
    """
    folder, colon, split = asked.rpartition(":")
    return (Path(folder), split) if colon and not Path(asked).is_dir() else (Path(asked), TEST)


def evaluation_name(folder: Path | str, split: str) -> str:
    """Of its table and of its folder.

    >>> evaluation_name("data/scifact", "test")
    'scifact-test'
    """
    return f"{Path(folder).resolve().name}-{split}"
