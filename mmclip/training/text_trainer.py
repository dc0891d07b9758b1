"""sentence-transformers' trainer with whole checkpoints, batches that follow from (seed, epoch), and texts cut by role.

No mathematics lives here: the loss is :class:`mmclip.losses.sentence_transformers.RoleRankingLoss`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from transformers import PrinterCallback
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME

from mmclip.config import TextTrainConfig
from mmclip.errors import UserError, printable
from mmclip.io import write_atomically
from mmclip.losses.sentence_transformers import RoleRankingLoss, load_loss, save_loss
from mmclip.models.text_encoder import TextEncoder, quiet

KEPT = 2  # checkpoints
PROGRESS_FILE = "mmclip_run.json"  # in a checkpoint: its step, the seconds trained, the number of processes


class RoleCollator:
    """Rows of (query, positive, negative_1…, label) -> tokens by column, cut and prompted by role as ``model.encode``
    does it."""

    valid_label_columns = ("label",)  # the trainer asks for them

    def __init__(self, model: TextEncoder) -> None:
        self.model = model

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {"label": torch.tensor([row["label"] for row in rows])}
        for column in (name for name in rows[0] if name != "label"):
            role = "query" if column == "query" else "document"
            tokens = self.model.tokens([row[column] for row in rows], role)
            batch |= {f"{column}_{name}": value for name, value in tokens.items()}
            batch[f"{column}_task"] = role  # a Router among the modules reads it
        return batch


class EpochBatches(DefaultBatchSampler):
    """All pairs in an order of (seed, epoch), without a last batch that is not full."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, seed: int = 0) -> None:
        super().__init__(dataset, batch_size, drop_last, seed=seed)
        self.pairs = len(dataset)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.pairs).tolist()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size]

    def __len__(self) -> int:
        return self.pairs // self.batch_size


class TextTrainer(SentenceTransformerTrainer):
    """The trainer; what it says and keeps is the run's own affair (``Run``)."""

    def __init__(self, settings: TextTrainConfig, model: TextEncoder, loss: RoleRankingLoss, dataset: Any,
                 folder: Path, total_steps: int, device: torch.device) -> None:  # fmt: skip
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            max_steps=total_steps,
            per_device_train_batch_size=settings.batch_size,
            dataloader_drop_last=True,
            learning_rate=settings.lr,
            learning_rate_mapping={"gamma_hat": settings.gamma_lr} if settings.norm == "learned" else {},
            weight_decay=settings.wd,
            warmup_steps=settings.warmup,
            max_grad_norm=settings.grad_clip_norm,
            bf16=model.precision != "fp32",
            seed=settings.seed,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type == "cuda",
            logging_strategy="no",
            save_strategy="no",  # Run saves
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            log_level_replica="error",
            push_to_hub=False,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several devices are torchrun's, a process each: no DataParallel
        self.role_loss, self.folder = loss, folder
        super().__init__(model=model.encoder, args=arguments, train_dataset=dataset, loss=loss,
                         data_collator=RoleCollator(model))  # fmt: skip
        self.remove_callback(PrinterCallback)
        if settings.grad_checkpointing:
            model.encoder.gradient_checkpointing_enable()  # the trainer's own switch has a name that is going away
        self.step_loss = torch.tensor(math.nan)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """No model card: it would look the base model up on the hub."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Without alpha and gamma: decay would pull gamma to one half."""
        return [name for name in super().get_decay_parameter_names(model) if not name.startswith("loss.")]

    def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, *_: Any, **__: Any) -> EpochBatches:
        self.batches = EpochBatches(dataset, batch_size, drop_last, seed=self.args.seed)
        return self.batches

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Errors: UserError for a loss that is not finite, before anything is changed by it."""
        found: Any = super().compute_loss(*args, **kwargs)
        self.step_loss = found.detach()
        if not bool(self.step_loss.isfinite()):
            raise UserError(
                f"step {self.state.global_step + 1}: the loss is not finite, and nothing is saved of it. Try a lower "
                "--lr, or --logit-scale-init with --norm dot, in a run of another --name"
            )
        return found

    def save_checkpoint(self, progress: dict[str, Any]) -> Path:
        """checkpoint-STEP, whole or not at all; all but the newest are dropped. Rank 0 only."""
        require_finite(self.model, self.state.global_step)
        self.folder.mkdir(parents=True, exist_ok=True)

        def write(partial: Path) -> None:
            with quiet():
                self.model.save_pretrained(str(partial), create_model_card=False)
            self._save_optimizer_and_scheduler(str(partial))
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
            save_loss(self.role_loss, partial)
            (partial / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")

        path = self.folder / f"checkpoint-{self.state.global_step}"
        write_atomically(path, write, "free some space and continue with --resume latest")
        for old in checkpoints(self.folder)[:-KEPT]:
            shutil.rmtree(old)
        return path

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Errors: UserError, one line, for a file that is not whole."""
        path = Path(resume_from_checkpoint)
        try:
            with quiet():
                super()._load_from_checkpoint(resume_from_checkpoint)
            load_loss(self.role_loss, resume_from_checkpoint)
            torch.load(path / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)  # it is loaded later
        except Exception as error:  # damaged files of every kind mean the same
            raise damaged(path, error) from None


def progress_of(checkpoint: Path, ranks: int) -> dict[str, Any]:
    """What a checkpoint says of its run. Errors: UserError for a damaged one, or another number of processes."""
    try:
        progress: dict[str, Any] = json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))
        step, _, before = int(progress["step"]), float(progress["seconds"]), int(progress["ranks"])
    except Exception as error:  # nothing of it is what was written
        raise damaged(checkpoint, error) from None
    if before != ranks:
        raise UserError(
            f"{printable(checkpoint)}: the run had {before} processes at step {step}, now there are {ranks}"
        )
    return progress


def damaged(checkpoint: Path, error: Exception) -> UserError:
    return UserError(
        f"{printable(checkpoint)}: a damaged checkpoint ({printable(error, 120)}): remove that folder, and the same "
        "command goes on from the one before it"
    )


def require_finite(model: Any, step: int) -> None:
    """Errors: UserError for weights that are no numbers: such a model is no result, and no state to go on from."""
    bad = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        raise UserError(
            f"step {step}: weights that are not finite ({len(bad)} tensors, the first {printable(bad[0], 80)}); nothing "
            "is saved of it. Try a lower --lr, in a run of another --name"
        )


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))
