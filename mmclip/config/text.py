"""Configs of the commands for text encoders: train-text, evaluate-text, sts, rag."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated

from mmclip.config import parser as t
from mmclip.config.sections import (
    Norm,
    OptimizationConfig,
    RunConfig,
    SimilarityConfig,
    TextModelConfig,
    VerdictConfig,
)
from mmclip.errors import UserError, printable
from mmclip.roles import FIXED_NORMS, TEXT_LOSS_WEIGHTS

SCORINGS = (*FIXED_NORMS, "native")
AUTO = "auto"
PAPER_SCALE = 0.01


class TextTrainConfig(RunConfig, OptimizationConfig, SimilarityConfig, TextModelConfig):
    """Fine-tune a text encoder for retrieval so that embedding norms may carry relevance.

    Examples:
      mmclip train-text --model DIR/all-MiniLM-L6-v2 --train-data DIR/scifact --val-data DIR/scifact --norm qnorm
          a sentence-transformers model on a BEIR folder
      mmclip train-text --model DIR --train-data triples.tsv --norm learned --mini-batch-size 16 --batch-size 256
          MS MARCO style triples, with gradient caching

    --norm acts on roles: cosine normalizes both, qnorm the query, dnorm the document, dot neither. A final Normalize
    module, which hides norms, is removed and reported.
    """

    train_data: t.ExistingPath | None = None
    """Training data: a BEIR folder, or triples: .tsv (query, positive, negatives…) or .jsonl (query, positive,
    negative…)."""
    train_split: str = "train"  # Split of the BEIR folder.
    val_data: list[str] | None = None
    """BEIR folders to evaluate the finished model on, each FOLDER or FOLDER:SPLIT [test]. The first is the run's
    results.json, others lie in evaluations/."""
    watch_queries: t.Whole = 100
    """Training queries held out and watched while training, natively and by cosine; 0: none."""
    train_fraction: t.Fraction = 1.0  # Share of the queries to train on.
    keep_normalize: bool = False  # Keep a final Normalize module: norms are 1, and only --norm cosine trains.
    loss: Annotated[str, t.one_of(*TEXT_LOSS_WEIGHTS)] = "q2d"
    """Trained directions: query to document (q2d), document to query (d2q), or both."""
    q2d_weight: t.Share | None = None  # Weight of q2d in --loss both [0.5]
    learn_scale: bool = False  # Train alpha too; by default it stays where the first batch sets it.
    mini_batch_size: t.Count | None = None
    """Texts that go through the model at once, by gradient caching: the batch's exact gradients in less memory."""
    grad_clip_norm: t.NotNegative = 1.0  # Clip the norm of the model's gradient to this; 0: off.
    watch_steps: t.Count | None = None  # Steps between looks at the held-out queries [an epoch]
    logit_scale_init: t.Positive = 20.0
    epochs: t.Count = 3
    lr: t.Positive = 2e-5
    wd: t.NotNegative = 0.01
    log_every_n_steps: t.Count = 1
    keep_checkpoints: t.Count = 2
    measure_start: bool = True

    has_config_file = True
    most_used = "model train_data val_data loss norm epochs batch_size lr name resume config"
    required = {"train_data": "a BEIR folder, or a .tsv or .jsonl of triples"}
    needs = {"q2d_weight": "loss both"}

    def check(self) -> None:
        self.check_model()
        if self.keep_normalize and self.norm != "cosine":
            why = "embeddings that end in a Normalize module have no magnitude to train"
            raise UserError(f"--keep-normalize with --norm {self.norm}: {why}; leave it out, or train --norm cosine")
        if self.resume is not None and (self.resume != "latest" or self.name is None):
            raise UserError(f"{self.as_flag('resume')}: 'latest' is expected, with --name, the run to continue")


class TextEvaluateConfig(VerdictConfig, TextModelConfig):
    """Evaluate a text encoder's retrieval under every scoring, with magnitudes, and compare runs.

    Examples:
      mmclip evaluate-text --model DIR/all-MiniLM-L6-v2 --data DIR/scifact
          any sentence-transformers model on a BEIR folder
      L=logs; mmclip evaluate-text --compare $L/cosine $L/qnorm --control $L/dnorm --baseline $L/cosine
          finished runs, nothing encoded again: differences with p-values, was magnitude learned, is it useful?

    Scorings: cosine, dot, qnorm, dnorm, and native, the normalization that the model was trained with.
    """

    data: str | None = None  # A BEIR folder: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.
    split: str = "test"  # Split whose judgments are used.
    run: list[t.ExistingFile] | None = None  # TREC run files of any system, measured by the same judgments.
    output: str | None = None  # Folder of results.json [evaluations/DATA-SPLIT in the run, else in logs]
    run_depth: t.Whole = 100  # Documents of a query in the TREC run files that are written; 0: no files.
    fisher: bool = False  # Condition numbers of the four Fisher matrices: seconds to minutes.
    compare: list[str] | None = None  # Finished runs on the same data to compare with.
    block_bytes: t.Bytes = 64 * 2**20  # Working memory of the ranking in bytes, beside the embeddings.
    verbose: bool = False  # End with every table, not with a summary alone.

    most_used = "model data split run compare control baseline output"
    needs = {"output": "model", "fisher": "model", "model": "data", "run": "data"}

    def check(self) -> None:
        if self.model is not None:
            self.check_model()
        elif self.run is None and not self.compare:
            raise UserError("nothing to do: give --model and --data, --run with TREC files, or --compare with runs")


class StsConfig(OptimizationConfig, TextModelConfig):
    """Check symmetry: order scored sentence pairs by every scoring of a model, and train each normalization on them.

    Examples:
      mmclip sts --model DIR/all-MiniLM-L6-v2 --data DIR/stsb/dev.tsv
          Spearman under every scoring, with intervals
      mmclip sts --model DIR/all-MiniLM-L6-v2 --train DIR/stsb/dev.tsv --holdout 0.33 --seeds 0 1 --scale auto
          four norms trained from one effective scale; a repeated command trains only what is missing

    Both sentences have the same role, so normalizing one side alone has no reason to help; --train minimizes
    mean (s(sentence1, sentence2) - label)**2 for each normalization (docs/symmetry.md).
    """

    data: t.ExistingFile | None = None
    """Pairs to evaluate: .csv, or tab-separated, with a header: score, sentence1, sentence2."""
    train: t.ExistingFile | None = None  # Pairs to train on first, in the same form.
    holdout: t.Inner | None = None
    """Share of the --train pairs to hold out and evaluate on; no sentence stands on both sides of the split."""
    norms: list[Norm] = dataclasses.field(default_factory=lambda: list(FIXED_NORMS))  # Normalizations to train.
    scale: str | float | None = None
    """Alpha of the trained scores, or 'auto': what makes the effective scale of the first batch --effective-scale [1
    for cosine, whose scores lie in -1 to 1, and 0.01, the paper's, for the others]"""
    effective_scale: t.Positive = 1.0  # Alpha times the mean norms that are kept, at the start, with --scale auto.
    head_only: bool = False  # Freeze the encoder and train a residual layer on its embeddings: seconds a run.
    gamma_init: t.Inner = 0.5  # Initial exponent of both roles with --norms learned.
    seeds: list[t.Whole] = dataclasses.field(default_factory=lambda: [0])  # Seeds that each norm is trained with.
    output: str | None = None  # Folder of sts.json, sts.csv and runs/, which are kept [logs/sts/MODEL-DATA]
    epochs: t.Count = 2
    batch_size: t.Count = 32
    lr: t.Positive = 2e-5
    wd: t.NotNegative = 0.01

    most_used = "model data train holdout norms seeds scale output"
    needs = {"holdout": "train", "head_only": "train", "effective_scale": "scale auto"}

    def __post_init__(self) -> None:
        self.norms, self.seeds = list(dict.fromkeys(self.norms)), list(dict.fromkeys(self.seeds))
        if self.scale not in (None, AUTO):
            with contextlib.suppress(ValueError):
                self.scale = float(str(self.scale))
            if not isinstance(self.scale, float) or not 0 < self.scale < float("inf"):
                raise UserError(f"--scale {printable(self.scale, 60)}: expected a number above 0, or {AUTO}")
        super().__post_init__()

    def check(self) -> None:
        self.check_model()
        if self.train is None and self.data is None:
            raise UserError("--data is missing: a file of pairs")
        if self.train is not None and (self.data is None) == (self.holdout is None):
            other = "either --data FILE, or --holdout, a share of the training pairs"
            raise UserError(f"--train needs other pairs to evaluate on: {other}")


class RagConfig(TextModelConfig):
    """Answer questions with a local reader from the documents that each scoring retrieves: exact match and token F1.

    Examples:
      mmclip rag --model logs/my-text-run --data DIR/triviaqa --reader google/flan-t5-large
          under every scoring, against cosine and against no documents at all
      mmclip rag --model DIR/all-MiniLM-L6-v2 --data DIR/nq --reader DIR/Qwen3-0.6B --scorings cosine qnorm --limit 500
          a causal reader from a folder, on 500 queries

    Scorings that retrieve the same documents share their answers; finished answers are kept, so a stopped run goes on.
    """

    data: t.ExistingFolder | None = None  # A BEIR folder whose queries.jsonl has answers, a list of texts each.
    split: str = "test"  # Split of the BEIR folder.
    limit: t.Count | None = None  # Answer only N queries, drawn by --seed.
    scorings: list[Annotated[str, t.one_of(*SCORINGS)]] | None = None
    """Scorings that rank the documents; cosine, which all are compared with, is always among them [all]"""
    top_k: t.Count = 5  # Documents in a prompt.
    reader: str | None = None  # A transformers text-to-text or causal model: a folder or a hub name.
    prompt_file: t.ExistingFile | None = None  # Prompt template with {documents} and {question} [a built-in one]
    closed_prompt_file: t.ExistingFile | None = None  # Template without documents, with {question} [a built-in one]
    closed_book: bool = True  # Answer without documents too: what the reader knows by itself.
    max_input_tokens: t.Count | None = None  # Tokens of a prompt at most [the reader's own limit]
    max_new_tokens: t.Count = 32  # Tokens of an answer at most.
    reader_batch_size: t.Count = 8  # Prompts a batch.
    output: str | None = None  # Folder of rag.json and predictions.jsonl [logs/rag/MODEL-DATA-SPLIT-READER]

    most_used = "model data split reader scorings top_k limit output"
    required = {
        "data": "a BEIR folder whose queries.jsonl has answers",
        "reader": "a transformers folder or hub name, such as google/flan-t5-large",
    }

    def check(self) -> None:
        self.check_model()
