"""FSDP2 for the towers (--fsdp): every process keeps its share of parameters, gradients and moments, and gathers a
block's parameters for as long as that block computes.

Gradients are DDP's: a reduce-scatter takes the mean over processes, as ``distributed.gather_rows`` needs it. They are
shared out after every pass, under --accum-freq, too: gradients of a whole model are what is to be saved. Batch
statistics are each process's own; those of rank 0 are kept, as under DDP, which spreads them. Alpha and gamma stay
outside. What leaves a process (checkpoints, the weights that are validated and exported) is whole, the same as without.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mmclip import distributed
from mmclip.errors import UserError


def require_processes() -> None:
    """Errors: UserError where there is nobody to share with."""
    if distributed.world()[1] == 1:
        raise UserError("--fsdp shares a model out over processes, and this is one: start several by torchrun")


def shard(towers: nn.Module, device: torch.device, precision: str) -> None:
    """Share out the parameters, in place: a group of each block, and one of all that is in none.

    In bf16 a block's parameters travel in bf16, to which autocast would round those of its matrix products anyway, and
    gradients are summed in float32. They start as rank 0 has them. Call it before an optimizer is made.
    """
    for tensor in (*towers.parameters(), *towers.buffers()):
        tensor.data = tensor.data.contiguous()  # FSDP shares out no other layout
        dist.broadcast(tensor.data, 0)
    how: dict[str, Any] = {"mesh": init_device_mesh(device.type, (distributed.world()[1],))}
    # batch statistics are float32, and a CPU takes no weights of another type beside them
    if precision != "fp32" and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in towers.modules()):
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # features may be views, and nothing is written into them
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    for block in blocks(towers):
        fully_shard(block, **how)
    # FSDP takes no scalars (CLIP's own logit_scale); see ``replicated``
    fully_shard(towers, **how, ignored_params={p for p in towers.parameters() if p.ndim == 0})


def blocks(towers: nn.Module) -> list[nn.Module]:
    """Transformer blocks, timm's blocks and stages, a ResNet's bottlenecks: what stands in a list of modules and is
    made of modules itself, inner ones first."""
    lists = [m for m in towers.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    listed = {e for container in lists for e in container if any(e.children()) and any(True for _ in e.parameters())}
    return [m for m in reversed(list(towers.modules())) if m in listed and not isinstance(m, nn.ModuleList)]


def replicated(towers: nn.Module) -> list[nn.Parameter]:
    """Trained scalars, which FSDP leaves alone: their gradients are averaged with the loss's."""
    return [p for p in towers.parameters() if p.requires_grad and p.ndim == 0 and not isinstance(p, DTensor)]


# --- sums over gradients ----------------------------------------------------------------------------------------------


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that are shared out and those that are not, where there are any: torch computes with one kind at a time."""
    kinds = [[t for t in tensors if isinstance(t, DTensor) == shared] for shared in (True, False)]
    return [kind for kind in kinds if kind]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, on every process."""
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in alike(gradients)]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if it is shared out: then every process asks for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- checkpoints ------------------------------------------------------------------------------------------------------


def gathered(state: Any) -> Any:
    """A state dict with whole tensors, on rank 0's CPU; the others help, and have None in their place.

    What is not shared out stays as it is, so without --fsdp this changes nothing.
    """
    if isinstance(state, dict):
        return {k: gathered(v) for k, v in state.items()}
    if not isinstance(state, DTensor):
        return state
    full = state.full_tensor()
    return full.cpu() if distributed.world()[0] == 0 else None


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, which every process has read, this one's share, if ``like`` is shared out."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:  # such as AdamW's count of steps
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


# --- a model that one process can run ---------------------------------------------------------------------------------


def hollow(towers: nn.Module) -> nn.Module:
    """A copy of towers that are not shared out yet, without the numbers of their parameters; buffers are the same."""
    memo: dict[int, Any] = {id(b): b for b in towers.buffers()}
    for p in towers.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(towers, memo)


@contextlib.contextmanager
def filled(copy_of: nn.Module, towers: nn.Module) -> Iterator[None]:
    """While it is open, rank 0's ``hollow`` copy holds the parameters of ``towers`` as they stand. All processes open
    it; then rank 0 may go on alone. Without --fsdp the towers are their own copy."""
    if copy_of is towers:
        yield
        return
    full: dict[str, Tensor] = {}
    for name, tensor in towers.state_dict().items():
        gathered = whole(tensor)
        if distributed.world()[0] == 0:
            full[name] = gathered
    if full:
        copy_of.load_state_dict(full, assign=True)
    full.clear()
    try:
        yield
    finally:
        empty = {n: torch.empty_like(p, device="meta") for n, p in copy_of.named_parameters()}
        copy_of.load_state_dict(empty, strict=False, assign=True)
