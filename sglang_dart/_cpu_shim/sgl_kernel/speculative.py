"""Tree operators of `sgl_kernel.speculative`, as SGLang's NGRAM algorithm imports them."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions and links from the ancestor mask.

    tree_mask flat [bs * N * N], verified_seq_len [bs]. Fills positions [bs * N] and
    retrive_* [bs, N] (int64, -1 for none). Parents stand before their children.
    """
    width = draft_token_num
    node = torch.arange(width)
    ancestor = tree_mask.view(batch_size, width, width).bool() & (node[:, None] > node)
    depth = ancestor.sum(2)
    parent = torch.where(ancestor, node, -1).amax(2)
    # [bs, later node, node]: is the later one a child, or a younger sibling?
    later = node[:, None] > node
    child = (parent.unsqueeze(2) == node) & later
    sibling = (parent.unsqueeze(2) == parent.unsqueeze(1)) & (parent.unsqueeze(1) >= 0) & later

    def first(relation: torch.Tensor) -> torch.Tensor:
        earliest = torch.where(relation, node[:, None], width).amin(1)
        return torch.where(earliest < width, earliest, -1)

    positions.copy_((verified_seq_len.unsqueeze(1) + depth).view(-1))
    retrive_index.copy_(torch.arange(batch_size * width).view(batch_size, width))
    retrive_next_token.copy_(first(child).view_as(retrive_next_token))
    retrive_next_sibling.copy_(first(sibling).view_as(retrive_next_sibling))
