"""torchtitan's Trainer and its llama for debugging under FSDP2, with a tokenizer and a data set of its own.

torchtitan captures the forward and the backward as a CUDA graph; here that is turned off. On one rank a weight that was
gathered becomes too large in the third step.
"""

import json
import tempfile
from pathlib import Path

import torch
from model import BATCHES, device_of, parse, say
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention import SDPBackend
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

ARGS = parse()
WORDS = ["<end>", "<begin>", "to", "be", "or", "not", "that", "is", "the", "question"]


class Faulty(Trainer):
    def __init__(self, config):
        super().__init__(config)
        self.model_parts[0].layers["0"].feed_forward.register_forward_pre_hook(self.spoil)

    def spoil(self, module, inputs):
        """Not earlier: a rank's own part of a weight is gathered by all ranks."""
        if (torch.distributed.get_rank(), self.step) == (ARGS.rank, 3):  # it counts from 1
            with torch.no_grad():
                inputs[0][..., 0] = 100
                module.w1.weight[:, 0] = 3e38  # finite; what it is multiplied with is not

    def forward_backward_step(self, **given):
        loss = super().forward_backward_step(**given)
        say(f"rank {torch.distributed.get_rank()} loss {loss.item().hex()}")
        return loss


def write_assets(folder):
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<begin>", "eos_token": "<end>"}))
    lines = (json.dumps({"text": " ".join(WORDS[2 + row % 4 :] * 4)}) for row in range(64))
    (folder / "data").mkdir()
    (folder / "data" / "rows.json").write_text("\n".join(lines))


def configuration(folder):
    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(folder), str(folder / "outputs")
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "data"))
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 16, BATCHES
    config.training.disable_cuda_graphs, config.debug.seed = True, 0
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:  # other attentions are kernels of Triton's or of cuDNN
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return config


device_of(ARGS)
with tempfile.TemporaryDirectory() as name:
    write_assets(Path(name))
    trainer = Faulty(configuration(Path(name)))
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
