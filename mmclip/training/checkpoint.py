"""Checkpoints of a run, and the checks under which another process continues it. No file read here can run code."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmclip.config.sections import CHANGEABLE
from mmclip.distributed.fsdp import shared_out
from mmclip.errors import UserError, printable, reason
from mmclip.io import megabytes, remove_partials, require_space, write_atomically, write_text_atomically

if TYPE_CHECKING:
    from mmclip.training.step import TrainStep

FORMAT = "mmclip-checkpoint-3"
LATEST = "latest"  # a text file that names the newest checkpoint
CONTENT = {
    "step": int,  # optimizer steps taken or passed over
    "taken": int,  # those that had samples to learn from
    "seconds": float,  # of training, all attempts together
    "ranks": int,
    "encoder": dict,  # state dict without locked weights
    "loss": dict,
    "optimizer": dict,
    "settings": dict,
    "fingerprints": dict,  # of the data and of locked weights
    "bad_samples": dict,
    "monitors": dict,
    "pending": dict,  # the line of a step whose validation a signal ended
}
# Settings that may differ in a continuation: they change what is written, how fast, or where the data lie (whose
# fingerprint is compared), and not the weights.
FREE_TO_CHANGE = {
    *("resume", "may_change", "logs", "name", "device", "workers", "torchcompile", "fsdp", "grad_checkpointing"),
    *("train_data", "cache_dir", "val_data", "val_split", "zeroshot_data", "zeroshot_split", "bank_size"),
    *("log_every_n_steps", "val_steps", "watch_steps", "save_steps", "keep_checkpoints", "measure_start"),
    *("report", "report_to", "verbose", "benchmark", "compare", "strict", "max_bad_samples", "encode_batch_size"),
}


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``step_NNNNNNNN.pt`` atomically, point ``latest`` at it, and remove all but the newest ``keep``.

    Raises UserError if the file cannot be written, or a weight is not finite; earlier checkpoints stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)  # of a process that was killed while it saved
    path, pointer = folder / f"step_{step:08d}.pt", folder / LATEST
    last = pointer.read_text().strip() if pointer.is_file() else ""
    newest = f"The newest checkpoint is {last}" if last else "There is none before it"
    broken = [name for name, tensor in state["encoder"].items() if not tensor.isfinite().all()]
    if broken:
        raise UserError(
            f"step {step}: {len(broken)} weights are not finite, such as {broken[0]}; no checkpoint is made of them. "
            f"{newest}. Try a lower --lr or --grad-clip-norm 1"
        )

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:  # by a path, torch ends the process where the disk is full
            torch.save(state, file)

    advice = f"free some space (or lower --keep-checkpoints) and continue with --resume latest. {newest}"
    write_atomically(path, write, advice)
    write_text_atomically(pointer, path.name + "\n")
    # Later ones are of a run that was taken back to an earlier step, and will come to them again
    for old in [p for p in sorted(folder.glob("step_*.pt")) if p.name <= path.name][:-keep]:
        old.unlink()
    return path


def require_checkpoint_space(folder: Path, encoder: nn.Module, locked: Iterable[str], keep: int) -> None:
    """Require (UserError) space for ``keep`` checkpoints, one more while it is written, and the exported model."""
    state, trained = encoder.state_dict(), [p for p in encoder.parameters() if p.requires_grad]
    weights = sum(t.nbytes for t in state.values())
    one = weights - sum(state[name].nbytes for name in locked) + 2 * sum(p.nbytes for p in trained)
    existing = len(list((folder / "checkpoints").glob("step_*.pt")))
    require_space(
        folder,
        one * max(keep + 1 - existing, 1) + weights,
        max(one, weights),
        f"the run (--keep-checkpoints {keep} of {megabytes(one)}, one more while it is written, and the model)",
        "lower --keep-checkpoints, or choose other --logs" if keep > 1 else "choose other --logs",
    )


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """Resolve --resume: 'latest' follows the pointer in ``folder`` (None before the first checkpoint), else a path.

    Raises UserError for a missing file.
    """
    if resume != LATEST:
        path = Path(resume)
        if not path.is_file():
            raise UserError(f"--resume {printable(resume)}: no such file (a checkpoint's path, or 'latest')")
        return path
    pointer, existing = folder / LATEST, sorted(folder.glob("step_*.pt"))
    if not pointer.is_file():
        return existing[-1] if existing else None
    path = folder / (Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name or "nothing")
    if not path.is_file():
        others = ", ".join(p.name for p in existing) or "none"
        raise UserError(
            f"--resume latest: {pointer} names {printable(path.name, 80)}, a missing file; its folder has {others}"
        )
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read tensors and plain values. Raises UserError, also for a pickle that would run code."""
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


def check_settings(state: Mapping[str, Any], path: Path, config: Any, ranks: int) -> None:
    """Compare a checkpoint's content, settings and number of processes with the continuation's, before a model loads.

    Raises UserError, which names what differs.
    """
    if odd := [key for key, kind in CONTENT.items() if not isinstance(state.get(key), kind)]:
        raise UserError(f"--resume {path}: a damaged checkpoint: {', '.join(odd)} missing or of another kind")
    before, now = state["settings"], config.to_dict()
    free = FREE_TO_CHANGE | set(now.get("may_change") or ())
    # A flag that is newer than the checkpoint had no effect then, as its default has none
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name not in before}
    changed = [k for k, v in (defaults | before).items() if k not in free and now.get(k) != v]
    if changed:
        values = ", ".join(
            f"{printable(k, 40)} was {printable(before.get(k, 'missing'), 60)}, is {printable(now.get(k), 60)}"
            for k in sorted(changed, key=lambda k: k not in before)
        )
        intended = all(k in CHANGEABLE for k in changed)
        hint = f" (intended? --may-change {' '.join(changed)})" if intended else ""
        raise UserError(f"--resume {path}: other settings than the run's: {values}{hint}")
    if state["ranks"] != ranks:
        raise UserError(f"--resume {path}: the run had {state['ranks']} processes, now there are {ranks}")


def check_run(state: Mapping[str, Any], path: Path, fingerprints: Mapping[str, str], total_steps: int) -> None:
    """Raises: UserError: Other data, other weights of a locked trunk, or a step beyond the run."""
    for name in {*state["fingerprints"], *fingerprints}:
        if state["fingerprints"].get(name) != fingerprints.get(name):
            what = "training data are" if name == "data" else f"weights of the locked {printable(name, 40)} are"
            raise UserError(f"--resume {path}: the {what} not the run's")
    texts = [*state["bad_samples"].items(), *dict(state["monitors"].get("raised") or {}).items()]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise UserError(f"--resume {path}: a damaged checkpoint: bad samples or alarms are not texts")
    if not 0 <= state["taken"] <= state["step"] <= total_steps:
        raise UserError(f"--resume {path}: step {state['step']} of a run of {total_steps}: a damaged checkpoint")


def restore(state: Mapping[str, Any], path: Path, stepper: TrainStep) -> None:
    """Load a checked checkpoint's tensors, all or none. Raises UserError for tensors that are not this run's."""
    task, parameters = stepper.task, {str(i): p for i, p in enumerate(stepper.parameters)}
    own = {k: v for k, v in task.encoder.state_dict().items() if k not in task.locked}
    moments = state["optimizer"].get("state")
    # A parameter that no step had a gradient of has no moments
    known = moments if isinstance(moments, dict) and (task.partial_gradients or not moments) else parameters
    expected = {str(i): {"step": torch.zeros(()), "exp_avg": parameters[str(i)], "exp_avg_sq": parameters[str(i)]}
                for i in known if str(i) in parameters}  # fmt: skip
    wanted = _flat({"encoder": own, "loss": task.loss.state_dict(), "optimizer": expected})
    saved = _flat({"encoder": state["encoder"], "loss": state["loss"], "optimizer": moments})
    odd = [k for k in {*wanted, *saved} if not _alike(wanted.get(k), saved.get(k))]
    if odd:
        raise UserError(
            f"--resume {path}: not a checkpoint of this model: {', '.join(sorted({k.split()[0] for k in odd}))}: "
            f"{len(odd)} tensors missing, left over or of another kind, such as {printable(min(odd), 80)}"
        )

    def possible(name: str, value: Tensor) -> bool:
        untrained = name.startswith("loss ") and not state["taken"]
        return bool((untrained or value.isfinite().all()) and not (name.endswith(" exp_avg_sq") and (value < 0).any()))

    if broken := [k for k, v in saved.items() if not possible(k, v)]:
        raise UserError(
            f"--resume {path}: a damaged checkpoint: {len(broken)} tensors hold impossible numbers, such as "
            f"{printable(min(broken), 80)}"
        )
    task.encoder.load_state_dict({k: shared_out(v, own[k]) for k, v in state["encoder"].items()}, strict=False)
    task.loss.load_state_dict(state["loss"])
    # Learning rates and decay are the settings', which are equal: a file does not choose them
    own_moments = {int(i): {k: shared_out(v, parameters[str(i)]) for k, v in t.items()} for i, t in moments.items()}
    groups = stepper.optimizer.state_dict()["param_groups"]
    stepper.optimizer.load_state_dict({"state": own_moments, "param_groups": groups})


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by the names that lead to them.

    >>> _flat({"a": {"b": 1, 2: 3}})
    {'a b': 1, 'a 2': 3}
    """
    if not isinstance(value, dict):
        return {name: value}
    return {k: leaf for key, v in value.items() for k, leaf in _flat(v, f"{name} {key}".lstrip()).items()}


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    plain = b.layout == torch.strided and b.device.type == "cpu"  # a file may name any, such as one without storage
    return plain and a.shape == b.shape and a.is_floating_point() == b.is_floating_point()
