"""Tree to the arrays that verification reads: positions, child and sibling links, mask."""

from __future__ import annotations

from typing import Literal

import torch

from sglang_dart.types import PackedTree, Tree


def pack(
    tree: Tree, length: torch.Tensor, *, impl: Literal["auto", "torch", "cpp"] = "torch"
) -> PackedTree:
    """Pack trees for verification, without a host synchronisation.

    length [bs] int64: committed positions before each root. Children are linked in node order.
    impl: "cpp" needs host tensors; "auto" takes it for them, and "torch" elsewhere.
    """
    if impl == "cpp" or (impl == "auto" and tree.parent.device.type == "cpu"):
        from sglang_dart.tree.core import pack_cpp

        return pack_cpp(tree, length)
    node = torch.arange(tree.width, device=tree.parent.device)
    # child_of[b, p, c]: node c is a child of node p. Root and padding have parent -1.
    child_of = tree.parent[:, None, :] == node[:, None]
    sibling_of = (tree.parent[:, None, :] == tree.parent[:, :, None]) & (node > node[:, None])
    sibling_of &= (tree.parent >= 0)[:, :, None]
    return PackedTree(
        token=tree.token,
        position=length[:, None] + tree.depth,
        first_child=_first(child_of, node),
        next_sibling=_first(sibling_of, node),
        mask=_ancestors(tree.parent, node),
    )


def _first(choice: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """The first node that each row of choice [..., N] bool marks, -1 if there is none."""
    none = node.shape[0]
    first = torch.where(choice, node, none).amin(dim=-1)
    return torch.where(first == none, -1, first)


def _ancestors(parent: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """[bs, N, N] bool: row i marks i and its ancestors. Each pass doubles how far a row sees."""
    bs, width = parent.shape
    jump = torch.where(parent >= 0, parent.long(), node)
    seen = (node[:, None] == node).expand(bs, width, width)
    for _ in range((width - 1).bit_length()):
        seen = seen | seen.gather(1, jump[..., None].expand(bs, width, width))
        jump = jump.gather(1, jump)
    return seen
