"""clip-benchmark's own command line, with the model type ``mmclip`` and a scoring added. Its source is not changed.

**Scores for a benchmark that ranks by cosine.** A query ranks documents by (q . d) / |d|**gamma_d. Images are the
documents of one direction and texts those of the other, so both sides are divided by their own norm**gamma_d: for one
query its own factor is constant, and one pair of embeddings ranks rightly in both directions. Two more dimensions keep
the remaining norms through the normalization of both sides,

    image  [i, sqrt(M**2 - |i|**2), 0]        text  [t, 0, sqrt(M**2 - |t|**2)]

whose cosine is i . t / M**2 (Neyshabur & Srebro 2015, arXiv 1410.5518, here on both sides). M is far above any norm:
both roots are M in float32, so normalizing divides by a power of two, which is exact. With gamma_d = 1 the features are
raw, and every number is clip-benchmark's. In **classification** an image is the query and a class the document, the
mean of its templates' t / |t|**gamma_d; clip-benchmark's further normalization changes nothing, because such a mean has
the norm M, too. Where images have several labels, clip-benchmark ranks images for each class, so image norms count.

**Replaced while it runs**, where no argument helps (version 1.6.2); the tests fail where one is no longer needed:

    cli.run                                  wrapped, to correct the settings of each evaluation before it starts:
                                             --output with a model's slashes, more workers than shards, autocast that
                                             turns scores into bfloat16 on a CPU, the task of a retrieval folder
    metrics.zeroshot_retrieval.recall_at_k   refuses a k above the number of candidates, and takes memory for Q x k x N
    metrics.*.accuracy                       float() of an array with an axis, an error since numpy 2.4
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmclip.config.model_config import names_a_file
from mmclip.data.shards import is_folder, shards_of
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
from mmclip.evaluation.zero_shot import NAMES, TEMPLATES
from mmclip.io import write_text_atomically
from mmclip.models.factory import Tokenizer, load_clip
from mmclip.models.metadata import native_exponents
from mmclip.roles import FIXED_NORMALIZATIONS, Exponents, Normalization
from mmclip.similarity import magnitude, normalize

MODEL_TYPE = "mmclip"
SCORINGS = (NATIVE, *(n.value for n in FIXED_NORMALIZATIONS))
TASKS = ("zeroshot_classification", "zeroshot_retrieval", "image_caption_selection")
STOCK_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"  # clip-benchmark's default
OUTPUT = STOCK_OUTPUT.replace(".json", "_{scoring}.json")
HELP = f"""--scoring {{{",".join(SCORINGS)}}} is added to eval, for --model_type {MODEL_TYPE}: how a query ranks
documents, in both directions; {NATIVE} (the default) is the normalization that the model was trained with.
--model is a run's folder, its model/ folder, local-dir:FOLDER, an open_clip model name or a model config JSON.
Everything else is clip-benchmark's own:
"""

M = 2.0**30
LARGEST_NORM = (
    2.0**17
)  # up to here M**2 + |x|**2 and M**2 - |x|**2 round to M**2 in float32, with a factor of 4 to spare


class ScoredModel(nn.Module):
    """Towers whose embeddings, ranked by cosine, are ranked by a scoring.

    Args:
        towers: ``towers(image=, text=)`` -> raw features (mmclip.models.towers).
        exponents: The scoring's.
    """

    def __init__(self, towers: nn.Module, exponents: Exponents) -> None:
        super().__init__()
        self.towers = towers
        self.gamma_d = float(exponents.gamma_d)

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] -> [B, D + 2] float32; raw [B, D] where every norm is divided out.

        Raises:
            UserError: Features that are not finite, or whose norms exceed ``LARGEST_NORM``.
        """
        with torch.autocast(images.device.type, enabled=False):
            return self._embedding("image", self.towers(image=images)[0])

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Encode token ids [B, L] as ``encode_image``."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._embedding("text", self.towers(text=tokens)[1])

    def _embedding(self, side: str, features: Tensor) -> Tensor:
        if not bool(features.isfinite().all()):
            raise UserError(f"{side} embeddings hold NaN or infinity: every value must be finite")
        if self.gamma_d == 1.0:
            return features
        x = normalize(features, self.gamma_d)
        norm = magnitude(x)
        if float(norm.max()) > LARGEST_NORM:
            raise UserError(
                f"{side} embeddings: a norm of {float(norm.max()):,.0f}; at most {LARGEST_NORM:,.0f} is exact in "
                "clip-benchmark. With --scoring cosine any norm will do"
            )
        root = (M**2 - norm.double().square()).sqrt().to(x).unsqueeze(1)
        zero = torch.zeros_like(root)
        return torch.cat([x, root, zero] if side == "image" else [x, zero, root], dim=1)


def load(
    scoring: str, model_name: str, pretrained: str, cache_dir: str | None, device: str
) -> tuple[ScoredModel, Callable[[Any], Tensor], Tokenizer]:
    """Load for clip-benchmark: (model, transform, tokenizer). Raises UserError."""
    if cache_dir is not None:
        raise UserError(f"--model_cache_dir: not used by --model_type {MODEL_TYPE}; set HF_HOME instead")
    model = load_clip(model_name, pretrained or None)
    exponents = native_exponents(model.metadata) if scoring == NATIVE else Normalization(scoring).exponents
    return ScoredModel(model.towers, exponents).to(device), model.transform(), model.tokenize


def recall_at_k(scores: Tensor, positive_pairs: Tensor, k: int) -> Tensor:
    """Share of a query's relevant documents among its k best, [Q]: clip-benchmark's, for every k and in the memory of
    its inputs scores and positive_pairs [Q, N]."""
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices
    return positive_pairs.gather(1, best).sum(1) / positive_pairs.sum(1)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """Share of targets [N] among the k best of output [N, C], for each k: clip-benchmark's, for every numpy."""
    hits = output.topk(max(topk), dim=1).indices == target.view(-1, 1)
    return [int(hits[:, :k].sum()) / len(target) for k in topk]


def main(argv: Sequence[str] | None = None) -> None:
    """Run clip-benchmark's command line. Raises UserError, and SystemExit from clip-benchmark's own parser."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--scoring", choices=SCORINGS)
    try:
        own, theirs = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(printable(error)) from None
    parts = ("cli", "models", "metrics.zeroshot_retrieval", "metrics.zeroshot_classification", "metrics.linear_probe")
    try:
        cli, models, retrieval, *classifiers = (importlib.import_module(f"clip_benchmark.{part}") for part in parts)
    except ModuleNotFoundError as error:  # itself, or what it needs: requests, which it does not declare
        package = str(error.name).partition(".")[0]
        raise UserError(f"{package} is not installed: pip install -e '.[clip-benchmark]'") from None
    if {"-h", "--help"} & set(argv):
        print(HELP)
    models.TYPE2FUNC[MODEL_TYPE] = partial(load, own.scoring or NATIVE)
    if MODEL_TYPE not in models.MODEL_TYPES:
        models.MODEL_TYPES.append(MODEL_TYPE)
    replacements: list[tuple[Any, str, Any]] = [
        (cli, "run", partial(_run, cli.run, cli.get_dataset_default_task, own.scoring)),
        (retrieval, "recall_at_k", recall_at_k),
        *((module, "accuracy", accuracy) for module in classifiers),
        (sys, "argv", ["clip_benchmark.py", *theirs]),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        try:
            cli.main()
        except json.JSONDecodeError as error:  # of build, which reads result files
            raise UserError(f"not the JSON of an evaluation: {printable(error)}") from None


def _run(
    stock: Callable[[argparse.Namespace], Any],
    default_task: Callable[[str], str],
    scoring: str | None,
    args: argparse.Namespace,
) -> Any:
    """Evaluate one model on one data set: clip-benchmark's ``run`` with corrected settings. Raises UserError."""
    ours = args.model_type == MODEL_TYPE
    if scoring is not None and not ours:
        raise UserError(f"--scoring {scoring} needs --model_type {MODEL_TYPE}: every other type is scored by cosine")
    name = args.dataset.removeprefix("wds/")
    root = args.dataset_root.format(dataset=name, dataset_cleaned=name.replace("/", "-"))
    if args.dataset.startswith("wds/") and "://" not in root:
        shards = check_folder(Path(root), args)
        # webdataset refuses workers without a shard, and only a fork can hand its pipeline to a worker
        args.num_workers = min(args.num_workers, shards if multiprocessing.get_start_method() == "fork" else 0)
    if args.task == "auto":
        args.task = default_task(name)
    if ours:
        if args.task not in TASKS:
            raise UserError(
                f"--task {args.task}: nothing in it is ranked, so a scoring has no meaning there; take --model_type "
                "open_clip with --model local-dir:RUN/model"
            )
        is_local = args.model.startswith("local-dir:") or args.model.endswith(".json") or is_folder(Path(args.model))
        if is_local and not names_a_file(args.pretrained):
            args.pretrained = ""  # a folder holds its own weights; clip-benchmark's default is a tag of another model
    if ours or not torch.cuda.is_available():
        args.amp = False
    path = output_path(args, name, scoring or NATIVE)
    args.output = str(path).replace("{", "{{").replace("}", "}}")  # it is formatted once more
    path.parent.mkdir(parents=True, exist_ok=True)  # an unwritable place is an error before the work
    skipped = args.skip_existing and path.exists()
    try:
        code = stock(args)
    except ValueError as error:
        if str(error).startswith("Unsupported"):  # its word for an unknown data set or language
            raise UserError(str(error)) from None
        raise
    if ours and not skipped:
        written = json.loads(path.read_text(encoding="utf-8"))
        write_text_atomically(path, json.dumps({**written, "scoring": scoring or NATIVE}))
    return code


def check_folder(root: Path, args: argparse.Namespace) -> int:
    """Count the shards of a data set folder in clip-benchmark's layout; resolve ``args.task`` auto by its type.

    Raises:
        UserError: Shards are missing or not counted, or the folder does not fit the task.
    """
    folder, kind = root / args.split, root / "dataset_type.txt"
    if not is_folder(folder) or not (folder / "nshards.txt").is_file():
        splits = sorted(p.parent.name for p in root.glob("*/nshards.txt")) if is_folder(root) else []
        raise UserError(
            f"--dataset_root {printable(root)}: no {folder.name}/nshards.txt, so no shards of --split "
            f"{printable(args.split)}; splits there: {printable(', '.join(splits) or 'none')}"
        )
    shards = len(shards_of(folder))
    text = kind.read_text(encoding="utf-8", errors="replace").strip().lower() if kind.is_file() else "classification"
    if args.task == "auto":
        args.task = "zeroshot_retrieval" if text == "retrieval" else "zeroshot_classification"
    if (args.task == "zeroshot_retrieval") != (text == "retrieval"):
        raise UserError(f"{printable(root)}: its {kind.name} says {printable(text, 60)}: not for --task {args.task}")
    if args.task == "zeroshot_classification":
        for file, flag in ((NAMES, "custom_classname_file"), (TEMPLATES, "custom_template_file")):
            if not (root / file).is_file() and not getattr(args, flag):
                raise UserError(f"{printable(root)}: classification needs {file} there, or --{flag}")
    return shards


def output_path(args: argparse.Namespace, dataset: str, scoring: str) -> Path:
    """Fill clip-benchmark's names and {scoring} into ``args.output``; no name makes a folder.

    Raises:
        UserError: An unknown placeholder.
    """
    template = OUTPUT if args.model_type == MODEL_TYPE and args.output == STOCK_OUTPUT else args.output
    weights = args.pretrained or "own"
    model, short, full = (
        re.sub(r"[^\w.-]+", "-", text).strip("-.")
        for text in (args.model, Path(weights).name if Path(weights).is_file() else weights, weights)
    )
    names = {"model": model, "pretrained": short, "pretrained_full_path": full, "task": args.task}
    names |= {"dataset": dataset.replace("/", "_"), "language": args.language, "scoring": scoring}
    try:
        return Path(template.format(**names))
    except (KeyError, IndexError, ValueError):
        raise UserError(f"--output {printable(template)}: the names to fill in are {', '.join(names)}") from None
