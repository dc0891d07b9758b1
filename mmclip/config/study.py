"""Configs of the commands that train many small models: study, advise, demo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from mmclip.config.parser import Check, Config, Count, FolderName, NotNegative, Whole, one_of
from mmclip.config.sections import ImageFilesConfig, TextModelConfig
from mmclip.errors import UserError
from mmclip.roles import CLIP_DIRECTIONS, Direction

DIRECTIONS = {"text": ("q2d",), "clip": ("both", "i2t", "t2i")}  # the first is the default
MAX_ITEMS = {"text": 6000, "clip": 2500}  # documents; images
METRICS = "success@K, recall@K, mrr@K, ndcg@K or map"
Metric = Annotated[str, Check(METRICS, lambda v: re.fullmatch(r"(success|recall|mrr|ndcg)@[1-9]\d{0,5}|map", v))]
AtLeast2 = Annotated[int, Check("a whole number of at least 2", lambda v: v >= 2)]
AtLeast100 = Annotated[int, Check("a whole number of at least 100", lambda v: v >= 100)]
HeldOut = Annotated[float, Check("a number from 0.1 to 0.8", lambda v: 0.1 <= v <= 0.8)]


class StudyConfig(Config):
    """Run a grid of trainings: what magnitude learning costs and gives, in tables with intervals, claims and a page.

    Examples:
      mmclip study
          configs/study_scenes.yaml: built-in data, eight minutes on two cores
      MMCLIP_SHARED=DIR mmclip study --config study_flickr8k_heads
          projection heads on frozen trunks; after an interruption the same command goes on

    The file has settings of mmclip train for all runs, and
      config: flickr8k_heads            what they start from, one of configs/ or a path
      seeds: [0, 1, 2]                  every arm runs with each
      arms:                             settings of each arm; a list is an axis of the grid, equal arms run once
        - {loss: sym, norm: [cosine, dot, qnorm]}
        - {loss: sym, norm: dot, init_from: sym cosine, name: fine-tuned}     from the run of that arm and seed
        - {loss: sym, norm: learned, seeds: [0, 1, 2, 3, 4]}                  with seeds of its own
      script: train_text                for text encoders: settings of mmclip train-text
      show: [table6]                    tables for the terminal
    A run is known by its settings: a study that was stopped, or whose file has grown, trains only what is missing.
    """

    config: str = "study_scenes"  # The study: a YAML file, or the name of one in configs/.
    logs: str = "logs"  # The study lands in LOGS/NAME/.
    name: FolderName | None = None  # Name of the study's folder [that of its file]
    seeds: list[Whole] | None = None  # Seeds instead of the file's.
    jobs: Whole = 0  # Runs at once; 0: one a GPU, without a GPU one a core, four at most.
    set: list[str] | None = None  # Settings of every run instead of the file's, such as train_data=DIR cache_dir=DIR.
    dry_run: bool = False  # List the runs, and which are finished; train nothing.
    verbose: bool = False  # Print all tables, too; they stand in the page.

    most_used = "config set seeds jobs dry_run verbose logs name"

    def check(self) -> None:
        for text in self.set or []:
            if "=" not in text:
                raise UserError(f"--set {text!r}: expected SETTING=VALUE")
        if len(set(self.seeds or [])) < len(self.seeds or []):
            raise UserError(f"{self.as_flag('seeds')}: different whole numbers are expected")


class AdviseConfig(ImageFilesConfig, TextModelConfig):
    """Which side should be normalized for a model and its data: cosine, dot, qnorm, dnorm or learned?

    Examples:
      mmclip advise --model DIR/all-MiniLM-L6-v2 --data DIR/scifact --document-length 64
          a sentence-transformers model on a BEIR folder, documents cut to 64 tokens
      mmclip advise --model ViT-B-32 --pretrained laion2b_s34b_b79k --data DIR/flickr8k
          an open_clip model on images with captions, both directions

    Raw embeddings of the training split are encoded once; on them a linear head, the identity at first, is trained with
    each norm and several seeds, and judged on training queries that were held out whole. The rule, fixed before any
    number:
      1. Fewer than 30 held-out queries (images) for which any head finds anything: can't tell.
      2. A norm is recommended where its head beats cosine's, and, where it keeps the documents' norms, also its
         control's and its own embeddings ranked by cosine. Of several, the one whose gain over cosine is the most
         certain.
      3. Else cosine, where no other norm can gain --margin or more.
      4. Else can't tell: norms that cannot gain --margin are named, and the smallest effect that would have shown.
    Not covered: training the encoder itself. Heads on frozen embeddings cannot restore what the encoder discarded.
    """

    pretrained: str | None = None  # Weights of a CLIP model's name or JSON: an open_clip tag or a checkpoint file.
    data: str | None = None  # A BEIR folder (text), or images with captions as mmclip evaluate takes them (clip).
    task: Annotated[str, one_of("auto", "text", "clip")] = "auto"  # auto: a folder with corpus.jsonl is text.
    split: str | None = None  # Training split; a BEIR folder without one lends its test queries [train]
    max_items: AtLeast100 | None = None
    """Encode at most N documents (text) or images with their captions (clip). What the queries need is kept, the rest
    drawn at random [6000 documents, 2500 images]"""
    direction: Annotated[str, one_of("q2d", "i2t", "t2i", "both")] | None = None
    """Trained directions: q2d (text); i2t or t2i alone, or both together, judged by their mean (clip) [q2d; both]"""
    held_out: HeldOut = 0.4  # Share of the training queries (images) that only judge.
    seeds: AtLeast2 = 3  # Trials of each norm: one seed has no spread.
    steps: Count = 200  # Steps of a head at most; fewer where held-out queries are answered better.
    batch_size: AtLeast2 = 128  # Pairs a step.
    rank: Count | None = None  # Heads are the identity plus a matrix of this rank [any matrix]
    metric: Metric = "ndcg@10"  # What is compared: success@K, recall@K, mrr@K, ndcg@K or map.
    margin: NotNegative = 0.005  # A gain that does not matter.
    fisher: bool = True  # Condition numbers of the Fisher matrices as evidence: a minute at D = 512.
    output: str | None = None  # Folder of advise.json, advise.png and the embeddings [logs/advice/MODEL-DATA]

    most_used = "model pretrained data split direction metric margin output"
    required = {
        "data": "a BEIR folder, or images with captions as mmclip evaluate takes them",
        "model": "a sentence-transformers model (text), or a CLIP model or run",
    }

    def check(self) -> None:
        valid = DIRECTIONS[self.kind]
        if self.direction is not None and self.direction not in valid:
            raise UserError(f"{self.as_flag('direction')} of {self.kind} data: expected {' or '.join(valid)}")
        if self.kind == "text":
            self.check_model()

    @property
    def kind(self) -> str:
        """The task, "text" or "clip"; auto is decided by the data's folder."""
        if self.task != "auto":
            return self.task
        try:
            return "text" if (Path(str(self.data)) / "corpus.jsonl").is_file() else "clip"
        except OSError:  # longer than a name may be, as a pattern of many shards is
            return "clip"

    @property
    def target(self) -> str:
        """What is judged: a direction, or "both"."""
        return self.direction or DIRECTIONS[self.kind][0]

    @property
    def weights(self) -> dict[Direction, float]:
        """Trained directions with their weights in the loss."""
        return dict.fromkeys(CLIP_DIRECTIONS, 0.5) if self.target == "both" else {Direction(self.target): 1.0}

    @property
    def limit(self) -> int:
        return MAX_ITEMS[self.kind] if self.max_items is None else self.max_items


class DemoConfig(Config):
    """Train a baseline, a magnitude-aware model and its control on the built-in scenes, and show them side by side.

    Examples:
      mmclip demo
          five minutes on two cores, into logs/demo-scenes-seed0
      mmclip demo --variant scenes-uninformative
          a null: nothing about a caption or image alone predicts relevance
    """

    variant: Annotated[str, one_of("scenes", "scenes-uninformative")] = "scenes"  # Built-in data.
    seed: Whole = 0  # Seed of the three runs.
    logs: str = "logs"  # The runs land in LOGS/demo-VARIANT-seedN/.
    verbose: bool = False  # End with every table, not with a summary alone.
