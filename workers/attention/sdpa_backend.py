"""Single tokens whose keys are gathered: in groups of similar lengths, since all are padded to the longest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.workers.attention.metadata import DecodeIndex, num_cached_keys
from tramontane.workers.device.pinned_memory import on_device

SHORT = 256
MAX_GROUP_KEYS = 2**15


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B of the single tokens, with up to L keys each.

    ``tokens`` [B] counts among the single tokens. ``key_rows`` [B, L] in position order;
    entries past ``key_lens`` [B] repeat the token's own row.
    """

    tokens: Tensor
    key_rows: Tensor
    key_lens: Tensor


def decode_groups(index: DecodeIndex) -> list[DecodeGroup]:
    """All tokens of a micro-batch, each in one group; in their order if there is one group."""
    ring, device = index.ring, index.positions.device
    key_lens = [1 + num_cached_keys(start, ring.window) for start in index.starts]
    groups = []
    for members in group_by_length(key_lens):
        tokens = on_device(members, torch.int64, device)
        own_B, lens_B = index.positions[tokens], on_device([key_lens[i] for i in members], torch.int64, device)
        offsets_L = torch.arange(max(key_lens[i] for i in members), device=device)
        oldest_B = own_B - lens_B + 1
        key_positions_BL = torch.minimum(oldest_B[:, None] + offsets_L, own_B[:, None])
        groups.append(DecodeGroup(tokens, ring.rows(index.slots[tokens][:, None], key_positions_BL), lens_B))
    return groups


def group_by_length(lens: list[int]) -> list[list[int]]:
    """Members of each group, so that padding to the group's longest at most doubles it (below 256 it does not matter)
    and no group of several gathers more than 32,768 keys. [300, 9000, 7, 310] -> [[2], [0, 3], [1]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lens.__getitem__):
        limit = max(2 * lens[groups[-1][0]], SHORT) if groups else 0
        if groups and lens[i] <= limit and (len(groups[-1]) + 1) * lens[i] <= MAX_GROUP_KEYS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [list(range(len(lens)))] if len(groups) == 1 else groups
