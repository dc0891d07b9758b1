"""Training of a CLIP: images and captions as the two sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmclip import distributed
from mmclip.config import TrainConfig
from mmclip.config.model_config import export_folder
from mmclip.data.datasets import open_training
from mmclip.data.image_text import ImageTextData, by_key, skipped_line
from mmclip.data.loading import Batch
from mmclip.embeddings.encode import EncodeOptions
from mmclip.embeddings.features import FeatureSource, train_batches
from mmclip.errors import printable
from mmclip.evaluation.eval_set import EvalSource, draw_bank, image_text_sets
from mmclip.evaluation.evaluate import evaluate_model, quick_rates
from mmclip.evaluation.results import Results
from mmclip.evaluation.zero_shot import Classes, ZeroShot, open_classes
from mmclip.losses import ContrastiveLoss, LossOutput, clip_loss, mask_from_ids, schedule
from mmclip.metrics.fisher import PER_DIMENSION, fisher_report
from mmclip.models import metadata
from mmclip.models.export import export_clip
from mmclip.models.factory import ClipModel, build_model
from mmclip.models.text_encoder import text_precision
from mmclip.roles import CLIP_DIRECTIONS, SCALE_INIT, Direction, Exponents, direction_weights
from mmclip.similarity import magnitude
from mmclip.training.monitors import CLIP_ADVICE, BadSamples
from mmclip.training.optimizer import build_adamw, clip_groups, cosine_factor, steps_in_all, warmup_steps
from mmclip.training.step import seed_of, similarity_numbers
from mmclip.training.task import Json, Task


@dataclasses.dataclass
class ClipData:
    """Data of a CLIP run, opened before its model loads."""

    train: ImageTextData
    val: ImageTextData | None
    distractors: dict[str, ImageTextData]  # by the name of their pool
    classes: Classes | None  # for zero-shot accuracy


class ClipTask(Task):
    """Training of both towers of a CLIP on images with captions."""

    sides = ("image", "text")
    unit = "samples"
    advice = CLIP_ADVICE
    metric = "success@1"

    config: TrainConfig
    model: ClipModel

    @staticmethod
    def open_data(config: TrainConfig) -> ClipData:
        """Raises: UserError: Whatever can be refused before a model loads."""
        train, val, distractors = open_training(config)
        source, split = config.zeroshot_data, config.zeroshot_split
        classes = open_classes(source, split) if source is not None else None
        BadSamples(config.max_bad_samples, by_key(train.skipped))
        schedule.check(config, steps_in_all(config, train_batches(config, train, None, None).steps_per_epoch))
        return ClipData(train, val, distractors, classes)

    @staticmethod
    def load_model(config: TrainConfig, device: torch.device) -> ClipModel:
        """The model of a config, with locked trunks, on a device."""
        torch.manual_seed(seed_of(config.seed))
        name = f"local-dir:{export_folder(config.init_from)}" if config.init_from else config.model
        trunks = config.image_trunk, config.text_trunk, config.pretrained_image, config.pretrained_text
        model = build_model(name, config.pretrained, *trunks, config.force_image_size, config.force_context_length)
        model.initial = metadata.initial_run(config.init_from) if config.init_from else {}
        for side, locked in (("image", config.lock_image), ("text", config.lock_text)):
            if locked:
                model.towers.lock(side)
        model.towers.to(device)
        return model

    @staticmethod
    def trained(model: ClipModel) -> tuple[nn.Module, set[str]]:
        """What is trained of a model, and the state-dict names of it that never change."""
        return model.towers, model.towers.locked_names()

    @classmethod
    def open(cls, config: TrainConfig, data: ClipData, model: ClipModel, device: torch.device) -> ClipTask:
        """The task of a run's data and model; with --cache-features locked trunks run over the data here."""
        precision, rank = text_precision(config.precision, device), distributed.world()[0]
        options = EncodeOptions(device, precision, config.batch_size, config.workers, progress=rank == 0)
        cache = Path(config.cache_dir) if config.cache_features else None
        source = FeatureSource.open(data.train, model, options, cache, "training")
        val = zero_shot = None
        if config.benchmark is None:
            val = EvalSource.open(data.val, data.distractors, model, options, cache) if data.val is not None else None
            zero_shot = ZeroShot.open(data.classes, model, options, cache) if data.classes else None
        return cls(config, model, build_loss(config, model).to(device), source, options, val, zero_shot)

    def __init__(
        self,
        config: TrainConfig,
        model: ClipModel,
        loss: ContrastiveLoss,
        source: FeatureSource,
        options: EncodeOptions,
        val: EvalSource | None = None,
        zero_shot: ZeroShot | None = None,
    ) -> None:
        self.config, self.model, self.loss, self.options = config, model, loss, options
        self.source, self.val, self.zero_shot = source, val, zero_shot
        self.towers = self.encoder = self.network = model.towers
        self.locked = self.towers.locked_names()
        self.device, self.precision, self.outputs = options.device, options.precision, self.sides
        self.loader = source.batches(config, model, pin=self.device.type == "cuda")
        self.part_size = config.batch_size
        self.accumulates = config.accum_freq > 1 or config.loss_batch_size is not None
        self.candidates = self.global_batch = self.loader.joint
        self.steps_per_epoch = self.loader.steps_per_epoch
        self.total_steps = steps_in_all(config, self.steps_per_epoch)
        self.warmup = warmup_steps(config.warmup, self.total_steps)
        self.val_steps = config.val_steps or self.steps_per_epoch
        self.bad_samples = BadSamples(config.max_bad_samples, source.skipped)
        captions = val.main.data.captions if val else []
        self.validation_queries = {"i2t": len(captions), "t2i": sum(map(len, captions))} if captions else {}
        locked = [side for side, on in self.towers.locked.items() if on]
        self.fingerprints = {"data": source.data.fingerprint()}
        self.fingerprints |= {f"{side} trunk": self.towers.trunk_fingerprint(side) for side in locked}
        self._exponents: Exponents | None = None

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        return self.loader.batches(epoch, start_step)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        (image, image_cached), (text, text_cached) = (self.source.inputs(s, batch, self.device) for s in self.sides)
        return image if image_cached else self.model.pixels(image), text, image_cached, text_cached

    def begin_step(self, step: int) -> None:
        weight = schedule.i2t_weight_at(self.config, step, self.total_steps)
        if weight is not None:
            self.loss.weights = direction_weights(self.config.loss, weight)
        if self.config.gamma_schedule != "none":
            self._exponents = schedule.exponents_at(self.config, step, self.total_steps)

    def compute_loss(self, features: dict[str, Tensor], batch: Batch, log: bool) -> tuple[LossOutput, Json]:
        news = {} if self._exponents is None else self._change_exponents(self._exponents, features)
        main = metadata.main_direction(self.loss.trained)
        first = self.model.initial and not self.loss.similarity.has_norm_stats(main)
        same = mask_from_ids(batch.image_id.to(self.device), batch.text_id.to(self.device))
        out = self.loss(features, same, untrained=log)
        if first:
            news["initial"] = self._compared_with_start()
        if log and self.config.i2t_weight_end is not None:
            news["i2t_weight"] = self.loss.weights[Direction.I2T]
        return out, news

    @torch.no_grad()
    def _change_exponents(self, to: Exponents, features: dict[str, Tensor]) -> Json:
        """Set a step's exponents; {"transition": …} where they leave the schedule's start, or arrive."""
        norms = {s: distributed.gather_rows(magnitude(x)) for s, x in features.items()}
        before = similarity_numbers(self.loss, CLIP_DIRECTIONS)
        if not self.loss.similarity.change_exponents(to, norms):
            return {}
        after = similarity_numbers(self.loss, CLIP_DIRECTIONS)
        leaves = (before["gamma_q"], before["gamma_d"]) == schedule.start_exponents(self.config)
        arrives = (after["gamma_q"], after["gamma_d"]) == self.loss.similarity.norm.exponents
        return {"transition": {n: [before[n], after[n]] for n in after}} if leaves or arrives else {}

    def _compared_with_start(self) -> Json:
        """The run of --init-from beside this one's first batch: [before, after] by name; None for untrained values."""
        after = similarity_numbers(self.loss, CLIP_DIRECTIONS)
        plain = {n: 1.0 if n.startswith("gamma") else self.model.loaded_scale for n in after}
        before = self.model.metadata or plain
        about = {k: self.model.initial[k] for k in ("run", "loss", "norm")}
        return about | {n: [before.get(n), value] for n, value in after.items()}

    def build_optimizer(self) -> torch.optim.AdamW:
        groups = clip_groups(self.towers, self.loss, self.config)
        return build_adamw(groups, (self.config.beta1, self.config.beta2), self.config.eps)

    def lr_factor(self, step: int) -> float:
        factor = schedule.rate_factor(self.config, step, self.total_steps)
        return factor * cosine_factor(step, self.warmup, self.total_steps)

    def checkpoint_gradients(self, enable: bool) -> None:
        self.towers.clip.set_grad_checkpointing(enable)

    def use_copy(self, network: Any) -> None:
        self.network, self.model = network, dataclasses.replace(self.model, towers=network)

    def validate(self, exponents: Exponents) -> dict[str, float]:
        assert self.val is not None
        options = dataclasses.replace(self.options, progress=False)
        data = image_text_sets(self.val.embed(self.model, options, with_distractors=False))[0]
        return quick_rates(data, exponents, CLIP_DIRECTIONS, [self.metric])

    def introduction(self) -> list[str]:
        def named(data: ImageTextData) -> str:
            return f"{len(data):,} images of {printable(data.path)} [{printable(data.split)}]"

        data, reasons = self.source.data, self.bad_samples.reasons
        evaluated = f"evaluation on {named(self.val.main.data)}" if self.val else "no evaluation data"
        lines = [f"{named(data)}, {self.loader.left_out} left out an epoch; {evaluated}"]
        if data.permuted:
            lines.append("warning: the pairs are permuted (--permute-pairs): nothing true can be learned")
        return lines + ([skipped_line(reasons)] if reasons else [])

    def _metadata(self) -> Json:
        """Metadata of the model as it is, without its data."""
        return metadata.clip_metadata(self.config, self.loss.similarity, self.loss.trained, self.model.initial)

    def metadata(self) -> Json:
        """mmclip.json without the run's steps and versions."""
        data, key = self.source.data, self.fingerprints["data"]
        about = {"path": data.path, "split": data.split, "key": key, "n_images": len(data)}
        return self._metadata() | {"data": about | {"permuted_pairs": data.permuted}}

    def _about(self, **more: Any) -> Json:
        return {"model": self.config.model, **more, "seed": self.config.seed, "versions": metadata.versions()}

    def export(self, folder: Path, steps: int) -> str:
        log_alpha = float(self.loss.similarity.logit_scale(metadata.main_direction(self.loss.trained)).detach())
        export_clip(folder, self.model, log_alpha, self.metadata() | self._about(steps=steps))
        return ""

    def evaluate(self, steps: int, seconds: float) -> Iterator[tuple[str, Results]]:
        if self.val is not None:
            trained, config = self.metadata(), self.config
            sides = {d.document_side for d in metadata.trained_directions(trained)} if config.bank_size else set()
            bank = draw_bank(self.source, sorted(sides), config.bank_size, self.model, self.options, config.seed)
            yield "", self._evaluate(trained, self._about(), bank=bank)

    def _evaluate(self, trained: Json, about: Json, **how: Any) -> Results:
        assert self.val is not None
        how |= {"classes": self.zero_shot, "seed": self.config.seed}
        return evaluate_model(self.val, self.model, self.options, trained, about, **how)

    def baseline(self) -> Json:
        """start.json: results.json of the weights before the first step, with ``native`` as that step has it, and
        Fisher condition numbers of evaluation and training pairs.

        The latter need four pairs a dimension, which evaluation data seldom have, and what is to be predicted from
        them, whose magnitude to normalize, may be decided on training data only.
        """
        trained, pairs, data = self._metadata(), self._training_pairs(), self.source.data
        alphas = {d: self.first_alpha(d, *d.roles(pairs)) for d in self.loss.weights}
        scales = {f"logit_scale_{d.value}": alphas[d] for d, weight in self.loss.weights.items() if weight > 0}
        results = self._evaluate(trained | scales, self._about(steps=0), fisher=True)
        native, each, seed = metadata.native_exponents(trained), np.arange(len(pairs["image"])), self.config.seed
        fisher: Json = {"data": {"path": data.path, "split": data.split}}
        for d in CLIP_DIRECTIONS:
            fisher[d.value] = fisher_report(*d.roles(pairs), (each, each), each, native, alphas[d], seed=seed)
        return {**results.json, "fisher": fisher}

    def _training_pairs(self) -> dict[str, Tensor]:
        """Raw [n, D] of random training images with a caption each, as many as Fisher report and nulls can use."""
        n, enough = len(self.source.data), 2 * PER_DIMENSION * int(self.model.towers.model_cfg["embed_dim"])
        rows = np.sort(np.random.default_rng(self.config.seed).choice(n, min(n, enough), replace=False)).tolist()
        texts = self.loader.drawn(0, rows).tolist()
        image, bad = self.source.vectors("image", self.model, self.options, "before the first step", rows)
        text, _ = self.source.vectors("text", self.model, self.options, "before the first step", texts)
        kept = [i for i in range(len(rows)) if i not in bad]
        return {"image": image[kept], "text": text[kept]}


def initial_gammas(config: TrainConfig, model: ClipModel) -> tuple[float, float]:
    """Initial learned exponents: those of the learned run that --init-from names, else the flag's.

    Exponents at 0 or 1, which have no gradient, start a little inside.
    """
    if model.initial.get("norm") != "learned":
        return config.gamma_init, config.gamma_init
    gamma_q, gamma_d = (min(max(float(g), 1e-3), 1 - 1e-3) for g in metadata.native_exponents(model.metadata))
    return gamma_q, gamma_d


def build_loss(config: TrainConfig, model: ClipModel) -> ContrastiveLoss:
    """The loss of a run; its initial effective scale is the flag's, else a loaded checkpoint's, else CLIP's."""
    scale = config.logit_scale_init or model.metadata.get("effective_scale") or model.loaded_scale or SCALE_INIT
    limit, gammas, start = config.logit_scale_max, initial_gammas(config, model), schedule.start_exponents(config)
    names = ("loss", "norm", "i2t_weight", "positives", "focal", "norm_drift", "i2t_weight_end")
    same = {name: getattr(config, name) for name in names}
    return clip_loss(**same, gather=True, scale_init=min(scale, limit), scale_max=limit, gamma_init=gammas, start=start)
