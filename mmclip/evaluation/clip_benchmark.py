"""clip-benchmark's own command line, with the model type ``mmclip`` and a scoring added. Its source stays as it is.

**Scores for a judge that takes cosines only.** A query ranks documents by (q . d) / |d|**gamma_d. Images are the
documents of one direction and texts those of the other, so both sides are divided by their own norm**gamma_d: for one
query its own factor is constant, and one pair of embeddings ranks rightly in both directions. What is left of the norms
passes a judge that normalizes both sides in two more numbers,

    image  [i, sqrt(M**2 - |i|**2), 0]        text  [t, 0, sqrt(M**2 - |t|**2)]

whose cosine is i . t / M**2 (Neyshabur & Srebro 2015, arXiv 1410.5518, here on both sides). M is far above any norm:
both roots are M in float32, so normalizing divides by a power of two, which is exact. With gamma_d = 1 raw features go
out, and every number is the judge's own. In **classification** an image is the query and a class the document, the mean
of its templates' t / |t|**gamma_d; that clip-benchmark normalizes it once more changes nothing, because such a mean has
the norm M, too. Where images have several labels, clip-benchmark ranks images for each class, and an image's norm counts.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmclip.config.model_config import names_a_file
from mmclip.data.shards import is_folder, shards_of
from mmclip.errors import UserError, printable
from mmclip.evaluation.results import NATIVE
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
LONGEST = 2.0**17  # up to here M**2 + |x|**2 and M**2 - |x|**2 round to M**2 in float32, with a factor of 4 to spare


class ScoredModel(nn.Module):
    """Towers whose embeddings, ranked by cosine, are ranked by a scoring.

    towers: ``towers(image=, text=)`` -> raw features (mmclip.models.towers). exponents: the scoring's.
    """

    def __init__(self, towers: nn.Module, exponents: Exponents) -> None:
        super().__init__()
        self.towers = towers
        self.gamma_d = float(exponents.gamma_d)

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] -> [B, D + 2] float32, or the raw [B, D] where every length is divided out anyway.

        Errors: UserError for features that are not finite, or longer than float32 has room for.
        """
        with torch.autocast(images.device.type, enabled=False):
            return self._embedding("image", self.towers(image=images)[0])

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] -> as ``encode_image``."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._embedding("text", self.towers(text=tokens)[1])

    def _embedding(self, side: str, features: Tensor) -> Tensor:
        if not bool(features.isfinite().all()):
            raise UserError(f"{side} embeddings hold NaN or infinity: every value must be finite")
        if self.gamma_d == 1.0:
            return features
        x = normalize(features, self.gamma_d)
        length = magnitude(x)
        if float(length.max()) > LONGEST:
            raise UserError(
                f"{side} embeddings: a length of {float(length.max()):,.0f}; at most {LONGEST:,.0f} can be told from "
                "others in clip-benchmark. With --scoring cosine any length will do"
            )
        root = (M**2 - length.double().square()).sqrt().to(x).unsqueeze(1)
        none = torch.zeros_like(root)
        return torch.cat([x, root, none] if side == "image" else [x, none, root], dim=1)


def load(
    scoring: str, model_name: str, pretrained: str, cache_dir: str | None, device: str
) -> tuple[ScoredModel, Callable[[Any], Tensor], Tokenizer]:
    """clip-benchmark's loader of the type ``mmclip``: (model, transform, tokenizer). Errors: UserError."""
    if cache_dir is not None:
        raise UserError(f"--model_cache_dir: not used by --model_type {MODEL_TYPE}; set HF_HOME instead")
    model = load_clip(model_name, pretrained or None)
    exponents = native_exponents(model.metadata) if scoring == NATIVE else Normalization(scoring).exponents
    return ScoredModel(model.towers, exponents).to(device), model.transform(), model.tokenize


def recall_at_k(scores: Tensor, positive_pairs: Tensor, k: int) -> Tensor:
    """clip-benchmark's, for every k and in the memory of its inputs: [Q] share of a query's relevant documents that are
    among its k best. scores, positive_pairs [Q, N]."""
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices
    return positive_pairs.gather(1, best).sum(1) / positive_pairs.sum(1)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """clip-benchmark's, for every numpy: share of targets [N] among the k best of output [N, C], for each k."""
    hits = output.topk(max(topk), dim=1).indices == target.view(-1, 1)
    return [int(hits[:, :k].sum()) / len(target) for k in topk]


def main(argv: Sequence[str] | None = None) -> None:
    """clip-benchmark's command line, ours added. Errors: UserError; SystemExit from clip-benchmark's own parser."""
    argv = list(sys.argv[1:] if argv is None else argv)
    scoring, theirs = take_scoring(argv)
    parts = ("cli", "models", "metrics.zeroshot_retrieval", "metrics.zeroshot_classification", "metrics.linear_probe")
    try:
        cli, models, *metrics = (importlib.import_module(f"clip_benchmark.{part}") for part in parts)
    except ModuleNotFoundError as error:  # itself, or what it needs: requests, which it does not declare
        package = str(error.name).partition(".")[0]
        raise UserError(f"{package} is not installed: pip install -e '.[clip-benchmark]'") from None
    if {"-h", "--help"} & set(argv):
        print(HELP)
    models.TYPE2FUNC[MODEL_TYPE] = partial(load, scoring or NATIVE)
    if MODEL_TYPE not in models.MODEL_TYPES:
        models.MODEL_TYPES.append(MODEL_TYPE)
    retrieval, classification, probe = metrics
    replacements: list[tuple[Any, str, Any]] = [
        (cli, "run", partial(_run, cli.run, cli.get_dataset_default_task, scoring)),
        (retrieval, "recall_at_k", recall_at_k),
        (classification, "accuracy", accuracy),
        (probe, "accuracy", accuracy),
        (sys, "argv", ["clip_benchmark.py", *theirs]),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        try:
            cli.main()
        except json.JSONDecodeError as error:  # of build, which reads the files that it is given
            raise UserError(f"not the JSON of an evaluation: {printable(error)}") from None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def take_scoring(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the scoring or None, all other arguments). Errors: UserError for a name that is no scoring.

    >>> take_scoring(["eval", "--scoring", "dot", "--task", "auto"])
    ('dot', ['eval', '--task', 'auto'])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--scoring", choices=SCORINGS)
    try:
        own, theirs = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(printable(error)) from None
    return own.scoring, theirs


def _run(
    stock: Callable[[argparse.Namespace], Any],
    default_task: Callable[[str], str],
    scoring: str | None,
    args: argparse.Namespace,
) -> Any:
    """One model on one data set: clip-benchmark's ``run`` with settings that work. Errors: UserError."""
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
    path.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is found before the work
    skipped = args.skip_existing and path.exists()
    try:
        code = stock(args)
    except ValueError as error:
        if str(error).startswith("Unsupported"):  # data set, language: its word for a name that it does not know
            raise UserError(str(error)) from None
        raise
    if ours and not skipped:
        written = json.loads(path.read_text(encoding="utf-8"))
        write_text_atomically(path, json.dumps({**written, "scoring": scoring or NATIVE}))
    return code


def check_folder(root: Path, args: argparse.Namespace) -> int:
    """Number of shards of a data set folder in clip-benchmark's layout; resolves ``args.task`` auto by what it holds.

    Errors: UserError where shards are missing or not counted, or where the folder does not fit the task.
    """
    folder = root / args.split
    if not is_folder(folder) or not (folder / "nshards.txt").is_file():
        splits = sorted(p.parent.name for p in root.glob("*/nshards.txt")) if is_folder(root) else []
        raise UserError(
            f"--dataset_root {printable(root)}: no {folder.name}/nshards.txt, so no shards of --split "
            f"{printable(args.split)}; splits there: {printable(', '.join(splits) or 'none')}"
        )
    shards = len(shards_of(folder))
    kind = "classification"
    if (root / "dataset_type.txt").is_file():
        kind = (root / "dataset_type.txt").read_text(encoding="utf-8", errors="replace").strip().lower()
    if args.task == "auto":
        args.task = "zeroshot_retrieval" if kind == "retrieval" else "zeroshot_classification"
    if (args.task == "zeroshot_retrieval") != (kind == "retrieval"):
        raise UserError(
            f"{printable(root)}: its dataset_type.txt says {printable(kind, 60)}: not for --task {args.task}"
        )
    if args.task == "zeroshot_classification":
        for file, flag in (("classnames.txt", "custom_classname_file"),
                           ("zeroshot_classification_templates.txt", "custom_template_file")):  # fmt: skip
            if not (root / file).is_file() and not getattr(args, flag):
                raise UserError(f"{printable(root)}: classification needs {file} there, or --{flag}")
    return shards


def output_path(args: argparse.Namespace, dataset: str, scoring: str) -> Path:
    """Where the JSON goes: ``args.output`` with clip-benchmark's names and {scoring} filled in; no name makes a folder.

    Errors: UserError for a placeholder that is not known.
    """

    def flat(text: str) -> str:
        return re.sub(r"[^\w.-]+", "-", text).strip("-.")

    template = OUTPUT if args.model_type == MODEL_TYPE and args.output == STOCK_OUTPUT else args.output
    weights = args.pretrained or "own"
    names: Mapping[str, str] = {
        "model": flat(args.model),
        "pretrained": flat(Path(weights).name if Path(weights).is_file() else weights),
        "pretrained_full_path": flat(weights),
        "task": args.task,
        "dataset": dataset.replace("/", "_"),
        "language": args.language,
        "scoring": scoring,
    }
    try:
        return Path(template.format(**names))
    except (KeyError, IndexError, ValueError):
        raise UserError(f"--output {printable(template)}: the names to fill in are {', '.join(names)}") from None
