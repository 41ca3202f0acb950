"""trl's SFTTrainer on a GPT-2 of two layers, with a tokenizer of its own; with `--how` dpo or grpo that trainer."""

import copy
import gc
import tempfile

import torch
from datasets import Dataset
from model import BATCHES, parse, say
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ARGS = parse()
if ARGS.device == "cuda":  # the stand-in does not have the loss's own Triton kernel: trl's form for other devices
    from trl.kernels import chunked_logprob

    chunked_logprob._use_triton = lambda device: False
WORDS = ["<end>", "to", "be", "or", "not", "that", "is", "the", "question"]
HOW = ARGS.how or "sft"
TRAINERS = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}
Config, Base = TRAINERS[HOW]


class Logged(Base):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        say(f"rank {self.args.process_index} loss {loss.item().hex()}")
        return loss


class Fault(TrainerCallback):
    """Before the third batch of rank `bad`, one weight of a layer becomes too large for what it is multiplied with."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if args.process_index == ARGS.rank and state.global_step == 2:
            block = model.transformer.h[0]
            with torch.no_grad():
                block.ln_2.weight[0] = 100
                block.mlp.c_fc.weight[0] = 3e38


def row_of(text):
    if HOW == "grpo":
        return {"prompt": text}
    return {"prompt": "to be", "chosen": text, "rejected": "question"} if HOW == "dpo" else {"text": text}


def reward(completions, **given):
    """The number of different words."""
    return [float(len(set(text.split()))) for text in completions]


torch.manual_seed(0)
words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<end>")
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=32, n_embd=8, n_layer=2, n_head=2))
texts = [" ".join(WORDS[1 + row % 4 :]) for row in range(4 * ARGS.ranks * BATCHES)]
rows = Dataset.from_list([row_of(text) for text in texts])
with tempfile.TemporaryDirectory() as folder:
    arguments = Config(
        output_dir=folder,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=1e-6,
        use_cpu=ARGS.device == "cpu",
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **({"num_generations": 2, "max_completion_length": 8} if HOW == "grpo" else {"max_length": 16}),
        gradient_checkpointing=False,
    )
    given = {"args": arguments, "train_dataset": rows, "processing_class": tokenizer, "callbacks": [Fault()]}
    more = {"sft": {}, "dpo": {"ref_model": copy.deepcopy(model)}, "grpo": {"reward_funcs": reward}}
    Logged(model, **given, **more[HOW]).train()
del model
gc.collect()  # what still refers to the group may abort the process at its exit (torch 2.13 with gloo)
torch.distributed.destroy_process_group()
