"""A bare checkpoint file is given its architecture where its sizes leave one, and a line with all of them where not."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch

from mmclip.commands.evaluate import load_model
from mmclip.errors import UserError
from mmclip.models.architectures import architecture_of


def checkpoint(name: str, path: Path, **changes: tuple[int, ...] | None) -> Path:
    """A checkpoint of the right shapes and hardly any bytes: each tensor is one number, expanded."""
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in open_clip.create_model(name, device="meta").state_dict().items()}
    shapes |= {k.replace("__", "."): v for k, v in changes.items()}
    state = {"module." + k: torch.zeros(()).expand(s) for k, s in shapes.items() if s is not None}
    torch.save({"epoch": 3, "state_dict": state}, path)
    return path


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")


def test_sizes_that_one_model_has_name_it(tmp_path: Path) -> None:
    assert architecture_of(checkpoint("ViT-S-32", tmp_path / "s.pt")) == "ViT-S-32"
    assert architecture_of(checkpoint("ViT-S-16-alt", tmp_path / "a.pt")) == "ViT-S-16-alt"


def test_what_has_no_weights_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fit ViT-B-32, ViT-B-32-quickgelu; name it: --model ViT-B-32 --pretrained"):
        architecture_of(checkpoint("ViT-B-32", tmp_path / "b.pt"))


@pytest.mark.parametrize("changes", [{"visual__conv1__weight": (384, 3, 31, 31)}, {"ln_final__weight": None}])
def test_sizes_that_no_model_has_are_one_line(tmp_path: Path, changes: dict[str, tuple[int, ...] | None]) -> None:
    with pytest.raises(UserError, match=r"fit none of open_clip's own transformers"):
        architecture_of(checkpoint("ViT-S-32", tmp_path / "x.pt", **changes))


def test_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    for name, content in (("x.pt", b"\x80\x04no"), ("x.safetensors", b"no"), ("y.pt", json.dumps([]).encode())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"not a checkpoint that can be read|not a file of plain tensors") as error:
            load_model(str(tmp_path / name))
        assert "\n" not in str(error.value)
