"""SGLang's own DFLASH model takes an exported drafter, tensor by tensor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_dart.train.capture import FrozenTarget
from sglang_dart.train.export import dflash_config, write_checkpoint

# In a process of its own, since SGLang's configuration belongs to the process.
LOADER = """
import sys
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from sglang_dart import cpu_host
cpu_host.activate()
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

target, drafter = sys.argv[1:]
arguments = ServerArgs(model_path=target, device="cpu")
runtime_context.publish(arguments, role="scheduler")
with runtime_context.get_parallel().override(tp_rank=0, pp_rank=0, attn_tp_rank=0):
    from sglang.srt.models.dflash import DFlashDraftModel

    model = DFlashDraftModel(AutoConfig.from_pretrained(drafter))
    tensors = load_file(f"{drafter}/model.safetensors")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(tensors.items())
assert not any(parameter.isnan().any() for parameter in model.parameters())
found = model.state_dict()
plain = [name for name in tensors if name in found]
assert all(torch.equal(found[name].to(tensors[name].dtype), tensors[name]) for name in plain)
print("same", len(plain), "of", len(tensors))
"""


def test_exported_drafter_is_loaded(
    target_folder: Path,
    block_target: FrozenTarget,
    make_block_method: Callable,
    tmp_path: Path,
) -> None:
    domino = {"pure_draft_prefix_len": 1, "emb_dim": 5, "gru_hidden_dim": 7, "shift_label": True}
    raw = dflash_config(
        block_target.config.to_dict(),
        layers=2,
        taps=[1, 4, 6],
        block_size=6,
        mask_token_id=263,
        intermediate_size=32,
        domino=domino,
    )
    write_checkpoint(tmp_path, raw, make_block_method("domino").model.state_dict())
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(target_folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # The others are fused: q, k, v and the MLP's gate and up.
    assert done.stdout.splitlines()[-1] == "same 19 of 29"
