"""One optimizer step: accumulated gradients against the whole batch's, and what a step that fails leaves behind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmclip.config import TrainConfig
from mmclip.data.loading import Batch
from mmclip.embeddings.encode import EncodeOptions
from mmclip.losses import ContrastiveLoss, clip_loss, mask_from_ids
from mmclip.models.factory import ClipModel, build_model
from mmclip.roles import LOSS_WEIGHTS
from mmclip.similarity import Normalization
from mmclip.training.clip_task import ClipTask, build_loss, initial_gammas
from mmclip.training.optimizer import cosine_factor
from mmclip.training.step import NotFinite, TrainStep, seed_of
from tests.helpers.tiny import LiveSource

ROWS = 14  # in parts of 4 the last one has 2
IDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 12, 13])  # known positives in other parts than their own


def batch(dtype: torch.dtype) -> Batch:
    g = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, 32, 32, generator=g).to(dtype)
    tokens = torch.randint(1, 49407, (ROWS, 16), generator=g)
    return Batch(images, tokens, IDS, torch.arange(ROWS), torch.arange(ROWS), [f"k{i}" for i in range(ROWS)])


@functools.cache
def _built(path: Path) -> ClipModel:
    torch.manual_seed(0)
    return build_model(str(path))


def stepper(
    path: Path, dtype: torch.dtype, loss: ContrastiveLoss | None = None, dropout: float = 0.0, steps: int = 10,
    **config: Any,
) -> TrainStep:  # fmt: skip
    """A step on a new tiny model, always of the same weights; dropout inside both towers, two layers deep."""
    built = _built(path)
    model = dataclasses.replace(built, towers=copy.deepcopy(built.towers))
    for blocks in (model.towers.clip.visual.transformer.resblocks, model.towers.clip.transformer.resblocks):
        for block in blocks:
            block.mlp.append(nn.Dropout(dropout))
            block.ln_2 = nn.Sequential(block.ln_2, nn.Dropout(dropout))
    model.towers.to(dtype).train()
    settings = TrainConfig(warmup=0, max_steps=steps, **config)
    loss = build_loss(settings, model) if loss is None else loss
    options = EncodeOptions(torch.device("cpu"), progress=False)
    return TrainStep(ClipTask(settings, model, loss.to(dtype), LiveSource(steps), options))


def gradients(stepper: TrainStep) -> dict[str, Tensor]:
    named = [*stepper.encoder.named_parameters(), *stepper.loss.named_parameters()]
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b|, the largest of those of the image tower, the text tower, each alpha and each gamma."""
    assert a.keys() == b.keys()
    of = {n: "image" if "visual" in n else "text" if n.startswith("clip.") else n for n in b}

    def group(gradients: dict[str, Tensor], name: str) -> Tensor:
        return torch.cat([g.reshape(-1) for n, g in gradients.items() if of[n] == name]).double()

    return max(float((group(a, n) - group(b, n)).norm() / group(b, n).norm()) for n in set(of.values()))


@pytest.mark.parametrize("norm", list(Normalization))
@pytest.mark.parametrize("loss", LOSS_WEIGHTS)
def test_four_accumulated_passes_have_the_gradients_of_one(tiny_model: Path, loss: str, norm: Normalization) -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found, numbers = [], []
        for size, accum in ((16, 1), (4, 4)):
            s = stepper(tiny_model, dtype, clip_loss(loss, norm), batch_size=size, accum_freq=accum)
            numbers.append(s.run(batch(dtype), 0, True))
            found.append(gradients(s))
        assert relative_error(found[1], found[0]) < bound
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)
        assert {n for n in found[0] if "logit_scale" in n or "gamma" in n}, "alpha and gamma have gradients"
        assert (norm is Normalization.LEARNED) == any("gamma" in n for n in found[0])


CURRICULUM: dict[str, Any] = {
    "norm": "dot", "gamma_schedule": "switch", "gamma_start": 1.0, "stage2_lr_factor": 0.5, "focal": 2.0,
    "norm_drift": 0.1, "i2t_weight": 1.0, "i2t_weight_end": 0.0,
}  # fmt: skip


def test_accumulated_passes_of_a_curriculum_have_the_gradients_of_one(tiny_model: Path) -> None:
    found = []
    for size, accum in ((16, 1), (4, 4)):
        s = stepper(tiny_model, torch.float64, steps=4, batch_size=size, accum_freq=accum, lr=1e-4, **CURRICULUM)
        lines = [s.run(batch(torch.float64), step, False) for step in range(3)]
        assert [list(line) for line in lines] == [[], ["transition"], []], "the switch is told although no line is due"
        found.append((gradients(s), lines[1]["transition"]))
        assert s.loss.weights == pytest.approx({"i2t": 1 / 3, "t2i": 2 / 3})
        rates = {g["lr"] / g["peak_lr"] for g in s.optimizer.param_groups}
        assert rates == {0.5 * cosine_factor(2, 0, 4)}, "half of the schedule's"
    assert relative_error(found[1][0], found[0][0]) < 1e-10
    for name, (before, after) in found[0][1].items():
        assert found[1][1][name] == pytest.approx([before, after], rel=1e-10)
        assert not name.startswith("effective") or after == pytest.approx(before, rel=1e-10)
    assert found[0][1]["gamma_d"] == [1.0, 0.0]


def test_a_switch_in_a_step_that_is_not_finite_is_taken_back(tiny_model: Path) -> None:
    s = stepper(tiny_model, torch.float32, steps=4, batch_size=16, **CURRICULUM)
    s.run(batch(torch.float32), 0, False)
    before, bad = {n: t.clone() for n, t in s.loss.state_dict().items()}, batch(torch.float32)
    assert bad.images is not None
    bad.images[9] = torch.nan
    with pytest.raises(NotFinite):
        s.run(bad, 1, True)
    assert all(torch.equal(v, s.loss.state_dict()[n]) for n, v in before.items())
    assert "transition" in s.run(batch(torch.float32), 1, False), "and it comes with the next step"


def test_learned_gammas_begin_where_the_run_before_left_them(tiny_model: Path) -> None:
    model = dataclasses.replace(_built(tiny_model), metadata={"norm": "learned", "gamma_q": 0.25, "gamma_d": 1.0})
    settings = TrainConfig(norm="learned", gamma_init=0.4)
    assert initial_gammas(settings, model) == (0.4, 0.4), "a model that --model names is not a run that goes on"
    model.initial = {"norm": "learned"}
    assert initial_gammas(settings, model) == (0.25, 0.999), "a gamma at its end would have no gradient"
    assert build_loss(settings, model).similarity.exponents.gamma_q.item() == pytest.approx(0.25)  # type: ignore[union-attr]


def may_compile() -> None:
    """Skip where torch.compile cannot; forget what was compiled before: past a limit networks run as they are."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("how", "same_masks"),
    [
        ({}, True),
        ({}, False),
        ({"grad_checkpointing": True}, True),
        ({"torchcompile": True, "grad_checkpointing": True}, True),
    ],
    ids=str,
)
def test_dropout_is_replayed_in_the_second_pass(tiny_model: Path, how: dict[str, bool], same_masks: bool) -> None:
    """Against one graph over all parts, each drawn under its part's seed; with other seeds it must not agree.

    A compiled network draws other masks than an eager one, so it is held against itself.
    """
    if how.get("torchcompile"):
        may_compile()
    flags = {"batch_size": 4, "accum_freq": 4, "seed": 5, **how}
    s = stepper(tiny_model, torch.float64, clip_loss("sym", "learned"), 0.3, **flags)
    s.run(batch(torch.float64), 7, False)
    accumulated = gradients(s)
    s = stepper(tiny_model, torch.float64, clip_loss("sym", "learned"), 0.3, **flags)
    features = []
    for i, part in enumerate(batch(torch.float64).split(4)):
        torch.manual_seed(seed_of(5, 0, 7, i) + (not same_masks))
        features.append(s.network(part.images, part.tokens, False, False))
    image, text = (torch.cat(side) for side in zip(*features, strict=True))
    s.loss({"image": image, "text": text}, mask_from_ids(IDS, torch.arange(ROWS))).loss.backward()
    error = relative_error(accumulated, gradients(s))
    assert error < 1e-12 if same_masks else error > 1e-2
    assert not how.get("torchcompile") or compiled_graphs() > 0


@pytest.mark.parametrize(
    "how",
    [{"grad_checkpointing": True, "accum_freq": 4}, {"torchcompile": True, "accum_freq": 4}],
    ids=str,
)
def test_compiled_and_checkpointed_steps_have_the_plain_ones_gradients(tiny_model: Path, how: dict[str, Any]) -> None:
    compiled = how.get("torchcompile", False)
    if compiled:
        may_compile()
    found = []
    for flags in ({}, how):
        size = 16 // flags.get("accum_freq", 1)
        s = stepper(tiny_model, torch.float64, clip_loss("asym-t2i", "learned"), batch_size=size, **flags)
        s.run(batch(torch.float64), 0, False)
        found.append(gradients(s))
    assert relative_error(found[1], found[0]) < 1e-12
    assert not compiled or compiled_graphs() > 0


def test_batch_statistics_count_a_part_once(tiny_model: Path) -> None:
    once = nn.BatchNorm1d(16, dtype=torch.float64)
    s = stepper(tiny_model, torch.float64, clip_loss(), batch_size=4, accum_freq=4)
    for part in batch(torch.float64).split(4):
        once(s.encoder(image=part.images)[0])
    s = stepper(tiny_model, torch.float64, clip_loss(), batch_size=4, accum_freq=4)
    visual = s.encoder.clip.visual
    visual.norm_at_end = nn.BatchNorm1d(16, dtype=torch.float64)
    plain = visual.forward
    visual.forward = lambda x: visual.norm_at_end(plain(x))
    s.run(batch(torch.float64), 0, False)
    assert int(visual.norm_at_end.num_batches_tracked) == 4
    torch.testing.assert_close(visual.norm_at_end.running_mean, once.running_mean)
    torch.testing.assert_close(visual.norm_at_end.running_var, once.running_var)


@pytest.mark.parametrize("accum", [1, 4])
def test_a_step_that_is_not_finite_changes_nothing_and_names_its_samples(tiny_model: Path, accum: int) -> None:
    s = stepper(tiny_model, torch.float32, clip_loss("sym", "learned"), batch_size=16 // accum, accum_freq=accum)
    s.run(batch(torch.float32), 0, False)

    def everything() -> list[Tensor]:
        moments = [t for state in s.optimizer.state.values() for t in state.values()]
        return [t.clone() for t in (*s.encoder.state_dict().values(), *s.loss.state_dict().values(), *moments)]

    before, bad = everything(), batch(torch.float32)
    assert bad.images is not None
    bad.images[9] = torch.nan
    with pytest.raises(NotFinite) as caught:
        s.run(bad, 1, True)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    facts = caught.value.facts
    assert facts["keys_with_non_finite_features"] == ["k9"] and len(facts["keys"]) == ROWS and facts["step"] == 2
    assert facts["loss"] == "nan" and facts["gradients_not_finite"] and not facts["parameters_not_finite"]
    s.run(batch(torch.float32), 1, False)  # and the run could go on


def test_overflows_are_noticed_although_the_loss_is_finite_or_the_norm_divided_out(tiny_model: Path) -> None:
    facts = []
    for norms in (False, True):
        s = stepper(tiny_model, torch.float32, clip_loss(), batch_size=16)
        with torch.no_grad():
            s.encoder.clip.visual.proj.mul_(1e25 if norms else 1)
        s.loss.similarity.logit_scale_i2t.register_hook(lambda g, norms=norms: g if norms else g * torch.inf)
        with pytest.raises(NotFinite) as caught:
            s.run(batch(torch.float32), 0, False)
        facts.append(caught.value.facts)
    assert facts[0]["gradients_not_finite"] == ["similarity.logit_scale_i2t"]
    assert [len(f["keys_with_non_finite_features"]) for f in facts] == [0, ROWS]


def test_the_gradients_norm_is_clipped_to_the_flag(tiny_model: Path) -> None:
    s = stepper(tiny_model, torch.float64, clip_loss(), batch_size=16, grad_clip_norm=0.01)
    numbers = s.run(batch(torch.float64), 0, True)
    norm = torch.stack([g.norm() for g in gradients(s).values()]).norm()
    assert numbers["grad_norm"] > 0.02 and float(norm) == pytest.approx(0.01, rel=1e-3)


def test_a_batch_splits_into_parts_in_order() -> None:
    whole = batch(torch.float32)
    parts = whole.split(4)
    assert [len(p.keys) for p in parts] == [4, 4, 4, 2] and [k for p in parts for k in p.keys] == whole.keys
    for field in ("images", "tokens", "image_id", "caption_row", "text_id"):
        assert torch.equal(torch.cat([getattr(p, field) for p in parts]), getattr(whole, field))
    assert dataclasses.replace(whole, images=None).split(4)[3].images is None
