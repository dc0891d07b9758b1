"""How fast pictures and captions become vectors, against the loop that users of open_clip write.

    python benchmarks/embedding.py                                 the built-in scenes, a small ViT: minutes
    python benchmarks/embedding.py --data DIR/flickr8k             photos, or any data of embed.py
    python benchmarks/embedding.py --model ViT-B-32 --images 500   a large model: the towers take all the time
    python benchmarks/embedding.py --quick                         to see that it runs

ours is what scripts/embed.py runs: ``mmclip.embeddings.features.FeatureSource.vectors`` of both sides, by ``mmclip.embeddings.encode.EncodeOptions``.
theirs is open_clip's README with a loader: ``create_model_and_transforms``, a torch ``DataLoader`` over the files,
``model.encode_image`` under ``no_grad``; the captions in batches through ``get_tokenizer`` and ``model.encode_text``.

Both read the same files of the same pictures with the same weights (random ones: what a vector says does not matter
here), batch size, number of readers, threads and precision. Timed are the two spans from the data's list to all vectors
in float32 on the CPU, the start of the readers in it; loading the model and one batch to warm up are not. Each
measurement is a process of its own, and the contestants take turns, so that a busy machine slows both. CPU seconds are
those of the process and its readers. Medians are compared; the last line is the ratio, of the pictures and captions
together.

The vectors must agree: the exit code is 1 where the largest difference is beyond rounding, TOLERANCE of the largest
number.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side_by_side as m
from harness import Parser, count, exit_code, machine, write_csv

CONTESTANTS = ("ours", "open_clip")
SIDES = ("image", "text")
MEASURED = [f"{side}_{what}" for side in SIDES for what in ("seconds", "cpu")]
TOLERANCE = {"fp32": 1e-4, "amp_bf16": 3e-2}  # of the largest number; float32 sums in another order, bf16 has 8 bits


def parser() -> argparse.ArgumentParser:
    p = Parser(__doc__)
    p.add_argument("--model", default="flickr-small.json", help="a model config JSON or an open_clip name")
    p.add_argument("--images", type=count, default=2000, metavar="N", help="the first N of the data (default: 2000)")
    m.add_flags(p)
    return p


# --- one measurement, in a process of its own -------------------------------------------------------------------------


def ours(told: m.Json) -> dict[str, Callable[[], Any]]:
    """What encodes each side."""
    import torch

    from mmclip.data.shards import open_data
    from mmclip.embeddings.encode import EncodeOptions
    from mmclip.embeddings.features import FeatureSource
    from mmclip.models.factory import load_clip

    model = load_clip(told["config"], told["weights"])
    model.towers.to(told["device"])
    device = torch.device(told["device"])
    options = EncodeOptions(device, told["precision"], told["batch_size"], told["workers"], progress=False)
    source = FeatureSource(open_data(told["csv"], None, "eval"))
    first = list(range(min(told["batch_size"], len(source.data))))
    for side in SIDES:
        source.vectors(side, model, options, "warm-up", first)

    def encode(side: str) -> torch.Tensor:
        vectors, bad = source.vectors(side, model, options, side)
        if bad:
            sys.exit(f"error: {len(bad)} pictures cannot be read: {next(iter(bad.values()))}")
        return vectors

    return {side: lambda side=side: encode(side) for side in SIDES}  # type: ignore[misc]


def open_clip(told: m.Json) -> dict[str, Callable[[], Any]]:
    """The same of the other side, as its users write it."""
    import csv

    import open_clip
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    open_clip.add_model_config(Path(told["config"]))
    name = Path(told["config"]).stem
    model, _, preprocess = open_clip.create_model_and_transforms(name, told["weights"], device=told["device"])
    model.eval()
    tokenizer = open_clip.get_tokenizer(name)
    with open(told["csv"], newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    files, captions = list(dict.fromkeys(r["filepath"] for r in rows)), [r["title"] for r in rows]
    device, size = told["device"], told["batch_size"]

    class Pictures(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, row: int) -> torch.Tensor:
            picture: torch.Tensor = preprocess(Image.open(files[row]))
            return picture

    def autocast() -> torch.autocast:
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=told["precision"] != "fp32")

    def image() -> torch.Tensor:
        loader = DataLoader(Pictures(), batch_size=size, num_workers=told["workers"], pin_memory=device != "cpu")
        with torch.no_grad(), autocast():
            return torch.cat([model.encode_image(x.to(device, non_blocking=True)).float().cpu() for x in loader])

    def text() -> torch.Tensor:
        parts = [captions[start : start + size] for start in range(0, len(captions), size)]
        with torch.no_grad(), autocast():
            return torch.cat([model.encode_text(tokenizer(part).to(device)).float().cpu() for part in parts])

    with torch.no_grad(), autocast():
        model.encode_image(torch.stack([preprocess(Image.open(f)) for f in files[:size]]).to(device))
        model.encode_text(tokenizer(captions[:size]).to(device))
    return {"image": image, "text": text}


def measure(told: m.Json) -> m.Json:
    from safetensors.torch import save_file

    work = (ours if told["contestant"] == "ours" else open_clip)(told)
    found: m.Json = {}
    vectors = {}
    for side in SIDES:
        start = m.clocks()
        vectors[side] = work[side]()
        spent = [b - a for a, b in zip(start, m.clocks(), strict=True)]
        found |= {f"{side}_seconds": spent[0], f"{side}_cpu": spent[1]}
    save_file(vectors, told["output"])
    return found


# --- both -------------------------------------------------------------------------------------------------------------


def row(name: str, data: m.Json, numbers: dict[str, float]) -> str:
    rates = [data["images"] / numbers["image_seconds"], data["captions"] / numbers["text_seconds"]]
    return (
        f"{name:22} {rates[0]:8.1f} images/s {rates[1]:8.1f} captions/s {numbers['image_seconds']:7.2f} s + "
        f"{numbers['text_seconds']:7.2f} s; of CPU {numbers['image_cpu']:7.2f} s + {numbers['text_cpu']:7.2f} s"
    )


def compete(args: argparse.Namespace, folder: Path) -> int:
    """Take turns; print medians, agreement and, last, the ratio. The exit code."""
    from safetensors.torch import load_file

    about = machine(args.threads, args.device)
    print(about, flush=True)
    model = m.write_model(args.model, folder)  # a wrong name is told before data are drawn
    data = m.export(args.data, args.split, "eval", args.images, folder / "data", None, 1)
    settings = {n: getattr(args, n) for n in ("batch_size", "workers", "precision", "device")}
    told = {**model, **data, **settings}
    print(
        f"{args.model}, {data['images']} images and {data['captions']} captions of {args.data}, batch "
        f"{args.batch_size}, {args.workers} worker(s), {args.precision}",
        flush=True,
    )
    found: dict[str, list[m.Json]] = {name: [] for name in CONTESTANTS}
    rows = []
    for turn in range(args.rounds):
        for name in CONTESTANTS if turn % 2 == 0 else reversed(CONTESTANTS):
            mine = {**told, "contestant": name, "output": str(folder / f"{name}.safetensors")}
            new = m.in_a_process(str(Path(__file__)), sys.executable, mine, args.threads) if name in found else None
            if new is None:
                found.pop(name, None)
                continue
            found[name].append(new)
            rows.append({"contestant": name, "round": turn, **new})
            print(row(name, data, new), flush=True)
    if args.csv and rows:
        write_csv(args.csv, about, rows)
    medians = {name: dict(zip(MEASURED, m.medians(found[name], MEASURED), strict=True)) for name in found}
    for name in found:
        print(row(f"{name}, median of {args.rounds}", data, medians[name]))
    if len(found) < len(CONTESTANTS):
        return exit_code(False)
    vectors = [load_file(folder / f"{name}.safetensors") for name in CONTESTANTS]
    agree = True
    for side in SIDES:
        a, b = (v[side] for v in vectors)
        apart = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
        agree &= apart <= TOLERANCE[args.precision] * float(b.abs().max())
        print(f"{side} vectors: at most {apart:.1e} apart, the largest number is {float(b.abs().max()):.3g}")
    print("the vectors agree" if agree else "THE VECTORS DO NOT AGREE")
    us, them = medians.values()
    each = [them[f"{side}_seconds"] / us[f"{side}_seconds"] for side in SIDES]
    wall, cpu = (sum(them[f"{s}_{w}"] for s in SIDES) / sum(us[f"{s}_{w}"] for s in SIDES) for w in ("seconds", "cpu"))
    sides = f"images {each[0]:.2f}, captions {each[1]:.2f}"
    print(f"ratio: ours {wall:.2f} times open_clip's ({cpu:.2f} by CPU time); {sides}")
    return 0 if agree else 1


def main() -> int:
    args = parser().parse_args()
    if args.told:
        print(json.dumps(measure(json.loads(args.told))))
        return 0
    if args.quick:
        args.images, args.rounds = min(args.images, 48), 1
    m.settle(args)
    with tempfile.TemporaryDirectory() as folder:
        return compete(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
