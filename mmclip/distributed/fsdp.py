"""FSDP2 (--fsdp): each rank keeps a shard of parameters, gradients and moments, and gathers a block while it computes.

Gradients are averaged over ranks by a reduce-scatter, as ``gather_rows`` needs it, after every pass (--accum-freq, too:
whole gradients are the memory to be saved). Batch statistics are each rank's own; rank 0's are kept, as under DDP.
Alpha and gamma are not sharded. Checkpoints and the weights that are validated and exported are whole, as without.
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
    """Refuse (UserError) a single process."""
    if distributed.world()[1] == 1:
        raise UserError("--fsdp shares a model out over processes, and this is one: start several by torchrun")


def shard(model: nn.Module, device: torch.device, precision: str) -> None:
    """Shard rank 0's parameters in place, a group per block and one of the rest. Call it before making an optimizer.

    In bf16 a block's parameters are gathered in bf16, to which autocast rounds the factors of matrix products anyway,
    and gradients are summed in float32.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()  # FSDP shards no other layout
        dist.broadcast(tensor.data, 0)
    how: dict[str, Any] = {"mesh": init_device_mesh(device.type, (distributed.world()[1],))}
    # batch statistics are float32, and a CPU takes no weights of another type beside them
    if precision != "fp32" and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # features may be views, and nothing is written into them
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    for block in blocks(model):
        fully_shard(block, **how)
    # FSDP takes no scalars (CLIP's own logit_scale); see ``replicated``
    fully_shard(model, **how, ignored_params={p for p in model.parameters() if p.ndim == 0})


def blocks(model: nn.Module) -> list[nn.Module]:
    """Composite members of module lists, inner ones first: transformer blocks, timm stages, ResNet bottlenecks."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    listed = {e for container in lists for e in container if any(e.children()) and any(True for _ in e.parameters())}
    return [m for m in reversed(list(model.modules())) if m in listed and not isinstance(m, nn.ModuleList)]


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """Trained scalars, which FSDP leaves alone; average their gradients with the loss's."""
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 0 and not isinstance(p, DTensor)]


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sharded and plain tensors apart, without empty lists: torch reduces over one kind at a time."""
    kinds = ([t for t in tensors if isinstance(t, DTensor) == sharded] for sharded in (True, False))
    return [kind for kind in kinds if kind]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients together, 0-d, on every rank."""
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in alike(gradients)]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; all ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(state: Any) -> Any:
    """A (nested) state dict with whole tensors on rank 0's CPU, and None in place of sharded ones on other ranks."""
    if isinstance(state, dict):
        return {k: gathered(v) for k, v in state.items()}
    if not isinstance(state, DTensor):
        return state
    full = state.full_tensor()
    return full.cpu() if distributed.world()[0] == 0 else None


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor that every rank has read, if ``like`` is sharded."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:  # such as AdamW's count of steps
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def hollow(model: nn.Module) -> nn.Module:
    """A copy of a model, not yet sharded, whose parameters are on the meta device; buffers are shared."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def filled(copied: nn.Module, model: nn.Module) -> Iterator[None]:
    """Fill rank 0's ``hollow`` copy with the model's parameters, so that it can compute alone; all ranks enter it."""
    if copied is model:  # without --fsdp
        yield
        return
    rank = distributed.world()[0]
    full = {n: w for n, t in model.state_dict().items() if (w := whole(t)) is not None and rank == 0}
    if full:
        copied.load_state_dict(full, assign=True)
    full.clear()
    try:
        yield
    finally:
        empty = {n: torch.empty_like(p, device="meta") for n, p in copied.named_parameters()}
        copied.load_state_dict(empty, strict=False, assign=True)
