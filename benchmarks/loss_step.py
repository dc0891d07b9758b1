"""A step of a contestant of loss.py, measured in a process of its own, and the rate that its floor is counted in."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from harness import MIB, Json, peak_mib, settled_mib, spent

THEIRS = "ClipLoss"
SCALE = 14.285714  # 1 / 0.07, as both begin
STEPS, SECOND = 20, 1.0  # steps of a measurement: as many as fit, at least one
RATE = {
    "cpu": (512, 2048),
    "cuda": (4096, 2**31),
}  # rows and columns, at most, of the product whose rate is the floor's


def features(batch: int, dim: int, dtype: Any, device: str) -> tuple[Any, Any]:
    """Raw (image, text), each [B, D], of many lengths; a text is its image and noise. Made in place: no peak."""
    import torch

    gen = torch.Generator(device).manual_seed(0)
    sides = [torch.randn(batch, dim, dtype=dtype, device=device, generator=gen) for _ in range(2)]
    sides[1].mul_(2).add_(sides[0])
    for side in sides:
        side.mul_(torch.randn(batch, 1, dtype=dtype, device=device, generator=gen).mul_(0.3).exp_())
        side.requires_grad_()
    return sides[0], sides[1]


def loss_function(spec: Json) -> tuple[Callable[[Any, Any], Any], list[Any]]:
    """(raw image, raw text -> loss, its parameters) of a contestant: "ClipLoss", or "LOSS NORM" and maybe ", HOW"."""
    import torch

    if spec["name"] == THEIRS:
        from open_clip.loss import ClipLoss

        theirs, log_scale = ClipLoss(), torch.nn.Parameter(torch.tensor(SCALE, device=spec["device"]).log())
        unit = torch.nn.functional.normalize
        return lambda x, y: theirs(unit(x, dim=-1), unit(y, dim=-1), log_scale.exp()), [log_scale]

    from mmclip.losses import clip_loss, mask_from_ids, tiled

    name, _, how = spec["name"].partition(", ")
    if how == "again":
        tiled.KEEP.update(dict.fromkeys(tiled.KEEP, 0))
    ours = clip_loss(*name.split()).to(spec["device"])

    def known(rows: int) -> Json:
        """Five captions of an image lie together; no two captions are the same."""
        each = torch.arange(rows, device=spec["device"])
        return {"positives": mask_from_ids(each // 5, each)} if how == "ids" else {}

    def loss(x: Any, y: Any) -> Any:
        return ours({"image": x, "text": y}, **known(len(x)), untrained=False).loss

    return loss, list(ours.parameters())


def measure(spec: Json) -> Json | None:
    """Median seconds and CPU seconds of a step, peak memory above the inputs, the loss and its gradient's length."""
    import torch

    torch.set_num_threads(spec["threads"])
    on_cuda, dtype = spec["device"] == "cuda", getattr(torch, spec["dtype"])
    loss, parameters = loss_function(spec)

    def step(x: Any, y: Any) -> Any:
        for tensor in (x, y, *parameters):
            tensor.grad = None
        value = loss(x, y)
        value.backward()
        return value.detach()

    step(*features(64, spec["dim"], dtype, spec["device"]))  # what is made once is not a step's
    x, y = features(spec["batch"], spec["dim"], dtype, spec["device"])
    try:
        if on_cuda:
            step(x, y)  # kernels are chosen or compiled by size
            x.grad = y.grad = None
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / MIB if on_cuda else settled_mib()
        times: list[Json] = []
        while not times or (len(times) < STEPS and sum(t["seconds"] for t in times) < SECOND):
            start = time.perf_counter(), time.process_time()
            value = step(x, y)
            if on_cuda:
                torch.cuda.synchronize()
            times.append(spent(*start))
        peak = torch.cuda.max_memory_allocated() / MIB if on_cuda else peak_mib()
    except torch.OutOfMemoryError:
        return None
    slope = [float(t.grad.double().norm()) for t in (x, y)]
    took = {what: median(t[what] for t in times) for what in ("seconds", "cpu")}
    return {**took, "mib": peak - before, "loss": float(value), "slope": slope}


def rate(spec: Json) -> Json:
    """FLOP per second, and per second of CPU, of [B, D] x [D, B] in parts that suit the device: the floor's unit."""
    import torch

    torch.set_num_threads(spec["threads"])
    x, y = (t.detach() for t in features(spec["batch"], spec["dim"], getattr(torch, spec["dtype"]), spec["device"]))
    height, width = RATE[spec["device"]]
    blocks, pieces, times = x.split(height)[:8], y.split(width), list[Json]()
    out = x.new_empty(len(blocks[0]), len(pieces[0]))
    for _ in range(4):  # the first is not counted
        start = time.perf_counter(), time.process_time()
        for rows in blocks:
            for columns in pieces:
                torch.mm(rows, columns.T, out=out[: len(rows), : len(columns)])
        if spec["device"] == "cuda":
            torch.cuda.synchronize()
        times.append(spent(*start))
    flop = 2 * sum(map(len, blocks)) * len(y) * spec["dim"]
    return {what: flop / median(t[what] for t in times[1:]) for what in ("seconds", "cpu")}
