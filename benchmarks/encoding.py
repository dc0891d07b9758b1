"""How fast images and captions become vectors, against the loop that users of open_clip write.

    python benchmarks/encoding.py                                 the built-in scenes, a small ViT: minutes
    python benchmarks/encoding.py --data DIR/flickr8k             photos, or any data of embed.py
    python benchmarks/encoding.py --model ViT-B-32 --images 500   a large model: the towers take all the time
    python benchmarks/encoding.py --quick                         to see that it runs

ours is what scripts/embed.py runs: FeatureSource.vectors of both sides. theirs is open_clip's README with a loader:
``create_model_and_transforms``, a torch ``DataLoader`` over the files, ``model.encode_image`` under ``no_grad``; the
captions in batches through ``get_tokenizer`` and ``model.encode_text``.

Both read the same files with the same random weights, batch size, number of readers, threads and precision. Timed are
the two spans from the data's list to all vectors in float32 on the CPU, the start of the readers in it; loading the
model and one batch to warm up are not. Each measurement is a process of its own, and the contestants take turns, so
that a busy machine slows both. CPU seconds are those of the process and its readers. Medians are compared; the last
line is the ratio, of the images and captions together.

The vectors must agree: the exit code is 1 where the largest difference exceeds TOLERANCE of the largest number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Json, count

CONTESTANTS = ("ours", "open_clip")
SIDES = ("image", "text")
MEASURED = [f"{side}_{what}" for side in SIDES for what in ("seconds", "cpu")]
TOLERANCE = {"fp32": 1e-4, "amp_bf16": 3e-2}  # of the largest number; float32 sums in another order, bf16 has 8 bits


def parser() -> harness.Parser:
    p = harness.Parser(__doc__, rounds=5)
    p.add_argument("--model", default="flickr-small.json", help="a model config JSON or an open_clip name")
    p.add_argument("--images", type=count, default=2000, metavar="N", help="the first N of the data [2000]")
    p.add_training_flags()
    return p


# --- one measurement, in a process of its own -------------------------------------------------------------------------


def ours(spec: Json) -> Callable[[str], Any]:
    """Load the model; returns the encoder of a side."""
    import torch

    from mmclip.data.shards import open_data
    from mmclip.embeddings.encode import EncodeOptions
    from mmclip.embeddings.features import FeatureSource
    from mmclip.models.factory import load_clip

    model = load_clip(spec["config"], spec["weights"])
    model.towers.to(spec["device"])
    device = torch.device(spec["device"])
    options = EncodeOptions(device, spec["precision"], spec["batch_size"], spec["workers"], progress=False)
    source = FeatureSource(open_data(spec["csv"], None, "eval"))
    for side in SIDES:
        source.vectors(side, model, options, "warm-up", list(range(min(spec["batch_size"], len(source.data)))))

    def encode(side: str) -> torch.Tensor:
        vectors, bad = source.vectors(side, model, options, side)
        if bad:
            sys.exit(f"error: {len(bad)} images cannot be read: {next(iter(bad.values()))}")
        return vectors

    return encode


def open_clip(spec: Json) -> Callable[[str], Any]:
    """The other contestant, as its users write it."""
    import csv

    import open_clip
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    open_clip.add_model_config(Path(spec["config"]))
    name = Path(spec["config"]).stem
    model, _, preprocess = open_clip.create_model_and_transforms(name, spec["weights"], device=spec["device"])
    model.eval()
    tokenizer = open_clip.get_tokenizer(name)
    with open(spec["csv"], newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    files, captions = list(dict.fromkeys(r["filepath"] for r in rows)), [r["title"] for r in rows]
    device, size = spec["device"], spec["batch_size"]

    class Images(Dataset[torch.Tensor]):
        def __init__(self, files: list[str]) -> None:
            self.files = files

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, row: int) -> torch.Tensor:
            image: torch.Tensor = preprocess(Image.open(self.files[row]))
            return image

    @torch.no_grad()
    def encode(side: str, files: list[str] = files, captions: list[str] = captions) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=spec["precision"] != "fp32"):
            if side == "image":
                pinned = device != "cpu"
                loader = DataLoader(Images(files), batch_size=size, num_workers=spec["workers"], pin_memory=pinned)
                return torch.cat([model.encode_image(x.to(device, non_blocking=True)).float().cpu() for x in loader])
            parts = [captions[start : start + size] for start in range(0, len(captions), size)]
            return torch.cat([model.encode_text(tokenizer(part).to(device)).float().cpu() for part in parts])

    for side in SIDES:
        encode(side, files[:size], captions[:size])
    return encode


def measure(spec: Json) -> Json:
    from safetensors.torch import save_file

    encode = (ours if spec["contestant"] == "ours" else open_clip)(spec)
    found: Json = {}
    vectors = {}
    for side in SIDES:
        start = harness.clocks()
        vectors[side] = encode(side)
        found |= {f"{side}_{what}": value for what, value in harness.spent(start).items()}
    save_file(vectors, spec["output"])
    return found


# --- both -------------------------------------------------------------------------------------------------------------


def row(data: Json, name: str, numbers: Json) -> str:
    rates = [data["images"] / numbers["image_seconds"], data["captions"] / numbers["text_seconds"]]
    return (
        f"{name:22} {rates[0]:8.1f} images/s {rates[1]:8.1f} captions/s {numbers['image_seconds']:7.2f} s + "
        f"{numbers['text_seconds']:7.2f} s; of CPU {numbers['image_cpu']:7.2f} s + {numbers['text_cpu']:7.2f} s"
    )


def agree(folder: Path, precision: str) -> bool:
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / f"{name}.safetensors") for name in CONTESTANTS)
    good = True
    for side in SIDES:
        a, b = ours[side], theirs[side]
        apart, largest = float((a - b).abs().max()) if a.shape == b.shape else float("inf"), float(b.abs().max())
        good &= apart <= TOLERANCE[precision] * largest
        print(f"{side} vectors: at most {apart:.1e} apart, the largest number is {largest:.3g}")
    print("the vectors agree" if good else "THE VECTORS DO NOT AGREE")
    return good


def compete(args: argparse.Namespace, folder: Path) -> int:
    if args.quick:
        args.images, args.rounds = min(args.images, 48), 1
    about = harness.machine(args.threads, args.device)
    print(about, flush=True)
    model = harness.write_model(args.model, folder)  # a wrong name is reported before data are drawn
    data = harness.export(args.data, args.split, "eval", args.images, folder / "data", None, 1)
    names = ("batch_size", "workers", "precision", "device", "threads")
    spec = {**model, **data, **{n: getattr(args, n) for n in names}}
    print(
        f"{args.model}, {data['images']} images and {data['captions']} captions of {args.data}, batch "
        f"{args.batch_size}, {args.workers} worker(s), {args.precision}",
        flush=True,
    )

    def one(name: str) -> Json | None:
        mine = {**spec, "contestant": name, "output": str(folder / f"{name}.safetensors")}
        return harness.measured(__file__, mine, name)

    found = harness.take_turns(CONTESTANTS, args.rounds, one, partial(row, data))
    rows = [{"contestant": name, "round": i, **now} for name, all_of in found.items() for i, now in enumerate(all_of)]
    of = {name: harness.medians(all_of, MEASURED) for name, all_of in found.items()}
    for name, now in of.items():
        print(row(data, f"{name}, median of {args.rounds}", now))
    if len(of) < len(CONTESTANTS):
        return harness.finish(args, about, rows, [], False)
    good = agree(folder, args.precision)
    us, them = of.values()
    each = [them[f"{side}_seconds"] / us[f"{side}_seconds"] for side in SIDES]
    wall, cpu = (sum(them[f"{s}_{w}"] for s in SIDES) / sum(us[f"{s}_{w}"] for s in SIDES) for w in ("seconds", "cpu"))
    sides = f"images {each[0]:.2f}, captions {each[1]:.2f}"
    last = f"ratio: ours {wall:.2f} times open_clip's ({cpu:.2f} by CPU time); {sides}"
    return harness.finish(args, about, rows, [last], good)


if __name__ == "__main__":
    parser().run(measure, compete)
