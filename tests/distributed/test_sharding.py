"""FSDP2 against DDP on two gloo ranks, by whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from mmclip import load_model
from mmclip.commands import train as run
from mmclip.config import TrainConfig
from mmclip.distributed import fsdp as sharding
from mmclip.errors import UserError
from tests.helpers.ranks import Found, off, run_ranks, worst
from tests.helpers.sharded import CASES, EXACT, FLOOR, SPLIT, built, config, continued, on_rank
from tests.helpers.tiny import run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sharding")
    for kind in ("native", "resnet", "timm"):
        config(place, kind)
    return place


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    return run_ranks(on_rank, 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_gradients_numbers_and_states_are_ddps(ranks: list[Found], name: str) -> None:
    # bf16 has 8 bits, and FSDP rounds at other places, except beside batch statistics; float32 sums there
    bound = {"bf16": 0.1, "bf16 resnet": 1e-5}.get(name, EXACT)
    for found in ranks:
        ddp, fsdp = found[name]["ddp"], found[name]["fsdp"]
        same(fsdp["gradients"], ddp["gradients"], bound)
        assert fsdp["numbers"] == pytest.approx(ddp["numbers"], rel=bound)
    ddp, fsdp = ranks[0][name]["ddp"], ranks[0][name]["fsdp"]
    same(fsdp["state"], ddp["state"], bound)
    same(fsdp["last"], ddp["last"], bound)
    other = ranks[1][name]["fsdp"]["state"]
    assert set(other["encoder"].values()) >= {None} and other["loss"], "a whole checkpoint is on one rank"


def same(got: Found, expected: Found, bound: float = EXACT) -> None:
    far, name = worst(got, expected, FLOOR)
    assert far <= bound, f"{name} is off by {far:.1e}"


def test_gradients_that_are_added_up_fail_the_comparison(ranks: list[Found]) -> None:
    expected = ranks[0]["plain"]["ddp"]["gradients"]
    name = "clip.visual.transformer.resblocks.0.mlp.c_fc.weight"
    assert off(ranks[0]["summed"][name], expected[name]) > 0.5


def test_ranks_hold_half_of_parameters_gradients_and_moments(ranks: list[Found]) -> None:
    for name in CASES:
        for what, (_, total) in ranks[0][name]["fsdp"]["held"].items():
            held = [found[name]["fsdp"]["held"][what][0] for found in ranks]
            assert total and max(held) <= 0.52 * total, f"{name}: {what}"
            assert total <= sum(held) <= total + 2 * len(held), f"{name}: {what}: only scalars stay with every rank"
            assert [found[name]["ddp"]["held"][what] for found in ranks] == [(total, total)] * 2


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_checkpoint_is_taken_up_with_and_without(ranks: list[Found], how: str) -> None:
    unbroken = ranks[0]["locked"]["fsdp"]
    same(ranks[0]["continued"][how], unbroken["last"])
    assert worst(unbroken["last"], unbroken["state"], FLOOR)[0] > 1e-2, "it went on"


def test_one_process_takes_up_the_checkpoint(ranks: list[Found], folder: Path) -> None:
    case = CASES["locked"]._replace(more=(("batch_size", sum(SPLIT)),))
    same(continued(folder, case, False, slice(None)), ranks[0]["locked"]["fsdp"]["last"])


def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(ranks: list[Found]) -> None:
    facts = [r["not finite"][how]["facts"] for r in ranks for how in ("fsdp", "ddp")]
    assert facts == facts[:1] * 4
    # rank 1's first part of five rows: its batch statistics carry one bad row into all of them
    assert facts[0]["keys_with_non_finite_features"] == [f"k{i}" for i in range(10, 15)]
    assert facts[0]["gradients_not_finite"] and not facts[0]["parameters_not_finite"]
    found, ddp = (ranks[0]["not finite"][how] for how in ("fsdp", "ddp"))
    for state in (found["after"], found["before"]):
        del state["optimizer"]["param_groups"]  # the learning rate is the step's
    same(found["after"], found["before"], 0)
    same(found["went on"], ddp["went on"])


def test_rank_0_runs_the_whole_model_alone_for_a_while(ranks: list[Found]) -> None:
    found = ranks[0]["filled"]
    torch.testing.assert_close(found["features True"], found["features False"], rtol=EXACT, atol=EXACT)
    assert [r["filled"]["inside True"] for r in ranks] == [{"cpu"}, {"meta"}], "the others hold no copy"
    for r in ranks:
        assert r["filled"]["after True"] == {"meta"} and r["filled"]["after False"] == {"cpu"}
    same(found["went on True"], found["went on False"])


def test_a_rank_may_hold_nothing_of_a_parameter(ranks: list[Found]) -> None:
    gradients = ranks[1]["odd parameters"]["fsdp"]["gradients"]
    assert {f"clip.visual.ln_post.{n}" for n in ("one", "scalar", "norm.weight")} <= gradients.keys()
    buffers = ranks[0]["odd parameters"]["fsdp"]["state"]["encoder"]
    assert buffers["clip.visual.ln_post.norm.running_mean"].abs().max() > 0


def test_blocks_are_told_from_other_lists(folder: Path) -> None:
    def names(towers: nn.Module) -> list[str]:
        of = {m: n for n, m in towers.named_modules()}
        return sorted(of[b] for b in sharding.blocks(towers))

    assert names(built(folder / "native.json").towers) == [
        "clip.transformer.resblocks.0",
        "clip.visual.transformer.resblocks.0",
    ]
    assert {f"clip.visual.layer{i}.0" for i in range(1, 5)} <= set(names(built(folder / "resnet.json").towers))
    found = names(built(folder / "timm.json").towers)
    assert {"clip.text.transformer.encoder.layer.0", "clip.visual.trunk.blocks.0"} <= set(found)
    nested = sharding.blocks(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))))
    assert [len(list(b.modules())) for b in nested] == [2, 4], "inner ones first"


def test_what_it_cannot_do_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--fsdp shares a model out over processes, and this is one: start several"):
        run.run(TrainConfig(fsdp=True, device="cpu", logs=str(tmp_path / "logs")))
    assert not (tmp_path / "logs").exists()
    with pytest.raises(UserError, match=r"^--fsdp beside --torchcompile: "):
        TrainConfig(fsdp=True, torchcompile=True)


def test_the_script_trains_validates_saves_resumes_and_exports(
    tiny_data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    common = ["--train-data", tiny_data, "--model", tiny_model, "--logs", tmp_path, "--workers", 0, "--lr", "1e-3",
              "--eps", "1e-3", "--warmup", 1, "--keep-last", "--norm", "learned", "--device", "cpu", "--batch-size", 20,
              "--max-steps", 4, "--save-steps", 2, "--val-steps", 3]  # fmt: skip
    shared = run_script("train_clip.py", *common, "--name", "shared", "--fsdp", "--measure-start", ranks=2)
    assert shared.returncode == 0, shared.stderr[-3000:]
    assert "step 3: validation success@1" in shared.stderr and (tmp_path / "shared" / "start.json").is_file()
    checkpoint = tmp_path / "shared" / "checkpoints" / "step_00000002.pt"
    plain = run_script("train_clip.py", *common, "--name", "plain", "--resume", checkpoint, ranks=2)
    assert plain.returncode == 0 and "continuing after step 2" in plain.stderr, plain.stderr[-3000:]
    a, b = (load_model(str(tmp_path / name)) for name in ("shared", "plain"))
    for name, value in b.towers.state_dict().items():
        torch.testing.assert_close(a.towers.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    results = [json.loads((tmp_path / n / "results.json").read_text(encoding="utf-8")) for n in ("shared", "plain")]
    assert results[0]["retrieval"] == results[1]["retrieval"]
