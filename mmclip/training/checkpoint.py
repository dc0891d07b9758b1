"""What a run leaves on disk: resumable checkpoints and the ``model/`` export. Nothing read here can run code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from mmclip.errors import UserError, printable, reason
from mmclip.io import megabytes, remove_partials, require_space, write_atomically, write_text_atomically
from mmclip.models.factory import ClipModel
from mmclip.training.resume import FORMAT

LATEST = "latest"  # a text file that names the newest checkpoint


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``step_NNNNNNNN.pt`` atomically, point ``latest`` at it, and drop all but the newest ``keep``.

    Errors: UserError where it cannot be written, or where a weight is not finite; the checkpoints before it stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)  # of a process that was killed while it saved
    path = folder / f"step_{step:08d}.pt"
    broken = [n for n, t in state["towers"].items() if not t.isfinite().all()]
    if broken:
        raise UserError(
            f"step {step}: {len(broken)} weights are not finite, such as {broken[0]}; no checkpoint is made of them. "
            f"{_newest(folder)}. Try a lower --lr or --grad-clip-norm 1"
        )

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:  # by a path torch would end the process where the disk is full
            torch.save(state, file)

    advice = f"free some space (or lower --keep-checkpoints) and continue with --resume latest. {_newest(folder)}"
    write_atomically(path, write, advice)
    write_text_atomically(folder / LATEST, path.name + "\n")
    # later ones are of a run that was taken back to an earlier step: it will come to them again
    for old in [p for p in sorted(folder.glob("step_*.pt")) if p.name <= path.name][:-keep]:
        old.unlink()
    return path


def require_checkpoint_space(folder: Path, model: ClipModel, keep: int) -> None:
    """Refuse before training what could not be saved: ``keep`` checkpoints, one more while it is written, the export.

    Errors: UserError naming sizes and folder.
    """
    locked = model.towers.locked_names()
    state = model.towers.state_dict()
    weights = sum(t.numel() * t.element_size() for t in state.values())
    kept = sum(t.numel() * t.element_size() for n, t in state.items() if n not in locked)
    moments = sum(2 * p.numel() * p.element_size() for p in model.towers.parameters() if p.requires_grad)
    one = kept + moments
    there = len(list((folder / "checkpoints").glob("step_*.pt")))
    require_space(
        folder,
        one * max(keep + 1 - there, 1) + weights,
        max(one, weights),
        f"the run (--keep-checkpoints {keep} of {megabytes(one)}, one more while it is written, and the model)",
        "lower --keep-checkpoints, or choose other --logs" if keep > 1 else "choose other --logs",
    )


def _newest(folder: Path) -> str:
    pointer = folder / LATEST
    return f"The newest checkpoint is {pointer.read_text().strip()}" if pointer.is_file() else "There is none before it"


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The file that ``--resume`` means: 'latest' follows the pointer in ``folder`` (None before the first one), else a
    path. Errors: UserError for a file that is not there."""
    if resume != LATEST:
        path = Path(resume)
        if not path.is_file():
            raise UserError(f"--resume {printable(resume)}: no such file (a checkpoint's path, or 'latest')")
        return path
    pointer, there = folder / LATEST, sorted(folder.glob("step_*.pt"))
    if not pointer.is_file():
        return there[-1] if there else None
    path = folder / (Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name or "nothing")
    if not path.is_file():
        others = ", ".join(p.name for p in there) or "none"
        raise UserError(
            f"--resume latest: {pointer} names {printable(path.name, 80)}, which is not there; there: {others}"
        )
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: a pickle that would run code is refused. Errors: UserError naming the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch writes checksums and does not read them
        if damaged is not None:
            raise ValueError(f"{damaged} fails its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and file errors of every kind mean the same to the user
        others = ", ".join(sorted(p.name for p in path.parent.glob("step_*.pt") if p != path))
        hint = f"; beside it are {others}: give --resume the path of one" if others else ""
        raise UserError(f"{path}: not a checkpoint that can be read safely: {reason(error, 200)}{hint}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: not an mmclip training checkpoint (model weights go to --pretrained)")
    return state
