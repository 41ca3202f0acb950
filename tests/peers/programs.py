"""The peers' programs: where each lies in a checkout, how it is started, and what is known of it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

FORMULAS = Path(__file__).with_name("formulas.py")
WORKLOADS, BENCHMARKS, GRIST, REWRITTEN = "TrainCheck-Evaluation-Workloads", "TrainCheck-Benchmarks", "GRIST", ""


class KnownFault(Enum):
    """What is known of a program."""

    NONE = "healthy"
    SILENT = "silent"
    """It trains wrongly, and no number of it is bad: not in gpuwatch's scope."""
    NUMBER = "bad number"
    LATENT = "bad number on other inputs"
    """Whether its own inputs make a bad number is what the peer's own check says in the run without gpuwatch."""


class PeerProgram(NamedTuple):
    name: str
    source: str
    """The checkout's name; "" for one that was rewritten (formulas.py)."""
    path: str
    """The program, in the checkout."""
    fault: KnownFault
    cause: str
    """As its authors tell it, in words of ours."""
    args: tuple[str, ...] = ()
    before: str = ""
    """A program that is run first, in the same folder: it writes the data."""
    nproc: int = 1
    on_host: bool = False
    """It asks for a GPU, and gets the host."""
    calls: int = 0
    """Of GRIST's check, in a program that has no end."""
    images: int = 0
    """How many images its data sets have; 0: as many as its subsets need."""
    says: str = ""
    """Of a bad number: what names its operation, as an expression; "" if no operation is to blame."""
    kinds: tuple[str, ...] = ()
    """Causes that are right, best first; () where nobody can know it."""


def _healthy(source: str, folder: str, path: str, args: str = "", **more: object) -> PeerProgram:
    name = Path(path).parent.name if "/" in path else path
    return PeerProgram(name, source, f"{folder}/{path}", KnownFault.NONE, "", tuple(args.split()), **more)


def _workload(path: str, args: str = "", **more: object) -> PeerProgram:
    return _healthy(WORKLOADS, "fp_rate/workloads", path, args, **more)


def _convolution(path: str, args: str = "--epochs 1", **more: object) -> PeerProgram:
    return _healthy(BENCHMARKS, "false-positive/CNN", path, args, **more)


def _language(path: str, args: str) -> PeerProgram:
    return _healthy(BENCHMARKS, "false-positive/RNN", path, f"--epochs 1 --data WORDS {args}")


def _silent(name: str, path: str, cause: str, args: str = "", **more: object) -> PeerProgram:
    path = f"silent-issue-detection/bug-reprod-scripts/{path}"
    return PeerProgram(name, WORKLOADS, path, KnownFault.SILENT, cause, tuple(args.split()), **more)


# fp_rate/autocast is left out: 300 steps of 512 x 4096 x 4096, sizes that are written in it, are too many for one core
HEALTHY = [
    _workload("dcgan/main.py", "--dataset mnist --dataroot . --workers 0 --niter 1 --manualSeed 5 --outf ."),
    _workload("ddp-multigpu/multigpu.py", "--batch_size 8 1 2", on_host=True, nproc=2),
    _workload("gat/main.py", "--epochs 3 --num-heads 2 --hidden-dim 16 --val-every 1"),
    _workload("gcn/main.py", "--epochs 10 --val-every 1"),
    _workload("mnist/main.py", "--epochs 1"),
    _workload("mnist-forward-forward/main.py"),
    _workload("mnist-hogwild/main.py", "--epochs 1"),
    _workload("mnist-rnn/main.py", "--epochs 1"),
    _workload("regression/main.py"),
    _workload("reinforce-actor-critic/actor_critic.py"),
    _workload("reinforce-reinforce/reinforce.py"),
    _workload("resnet18/main.py", "--dummy --epochs 1 --batch-size 4 --seed 3", on_host=True),
    _workload("siamese-network/main.py", "--epochs 1"),
    _workload("time-sequence-prediction/train.py", "--steps 1", before="generate_sine_wave.py"),
    _workload("vae/main.py", "--epochs 2"),
    _workload("word-language-model-lstm/main.py", "--epochs 2 --tied --data WORDS"),
    _workload("word-language-model-transformer/main.py", "--epochs 2 --model Transformer --lr 5 --data WORDS"),
    _convolution("trainset/MNIST-1epo/main.py"),
    _convolution("trainset/MNIST-3epo-CIFAR10/main.py"),
    _convolution("trainset/MNIST-3epo-larger-model/main.py"),
    _convolution("validset/MNIST-FashionMNIST/main.py"),
    _convolution("validset/MNIST-HighRes-CIFAR10/main.py", images=64),
    _language("trainset/word_language_model-RNN_TANH-1epo/main.py", "--model RNN_TANH"),
    _language("validset/word_language_model-GRU-3epo/main.py", "--model GRU"),
    _language("validset/word_language_model-LSTM-3epo/main.py", "--model LSTM"),
    _language("validset/word_language_model-RNN_RELU-3epo/main.py", "--model RNN_RELU"),
    _language(
        "validset/word_language_model-RNN_TANH-different-hyperparam/main.py",
        "--model RNN_TANH --tied --lr 15 --clip 1 --bptt 40 --dropout 0.1 --nlayers 3",
    ),
]

SILENT = [
    _silent("pytorch-51800", "pytorch-51800/bug_repro.py", "spectral_norm evaluated before it trained", on_host=True),
    _silent("pytorch-51800 (MNIST)", "pytorch-51800/mnist_51800_buggy.py", "the same, in a training"),
    _silent(
        "pytorch-104336", "pytorch-104336/bug.py", "DDP after .cpu(): gradients not reduced", on_host=True, nproc=2
    ),
    _silent("pytorch-forum-84911", "pytorch-forum-84911/bug.py", "an optimizer of frozen weights", images=8),
    _silent("stackoverflow-60335387", "stackoverflow-60335387/bug.py", "no zero_grad", on_host=True, images=60),
    _silent("stackoverflow-67180955", "stackoverflow-67180955/bug.py", "workers draw the same random numbers"),
]


def _grist(number: int, path: str, cause: str, says: str, kinds: tuple[str, ...], **more: object) -> PeerProgram:
    path = f"scripts/study_case/ID_{number}/{path}"
    name = f"ID {number}" + (", searched" if path.endswith("_grist.py") else "")
    return PeerProgram(name, GRIST, path, KnownFault.LATENT, cause, (), says=says, kinds=kinds, **more)


def _named(operation: str) -> str:
    """By its name, or in the line of source that is quoted: `log`, torch.log(p), p.log()."""
    return rf"`{operation}`|\b(torch|[a-z_]+|\))\.{operation}\("


LOG_OF_SOFTMAX = ("log of a softmax that is 0", _named("log"), ("domain",))
LOG_OF_SIGMOID = ("log of a sigmoid that is 0 or 1", _named("log"), ("domain",))
EXP_OF_ENERGY = ("exp of a free energy", _named("exp"), ("domain", "precision"))

LATENT = [
    _grist(number, path, *cause, calls=calls)
    for number, path, cause, calls in (
        (22, "My_pytorch1.py", EXP_OF_ENERGY, 60),
        (22, "My_pytorch1_grist.py", EXP_OF_ENERGY, 300),
        (23, "ch5.3_softmax.py", LOG_OF_SOFTMAX, 100),
        (23, "ch5.3_softmax_grist.py", LOG_OF_SOFTMAX, 3000),
        (26, "0401_logistic_regression.py", LOG_OF_SIGMOID, 300),
        (26, "0401_logistic_regression_grist.py", LOG_OF_SIGMOID, 3000),
        (27, "0503_softmax_regression_cost_grist.py", LOG_OF_SOFTMAX, 3000),
        (32, "0504_softmax_regression.py", LOG_OF_SOFTMAX, 300),
        (32, "0504_softmax_regression_grist.py", LOG_OF_SOFTMAX, 3000),
        (33, "logistic_classification.py", LOG_OF_SIGMOID, 300),
        (33, "logistic_classification_grist.py", LOG_OF_SIGMOID, 3000),
        (34, "softmax_classification.py", LOG_OF_SOFTMAX, 300),
        (34, "softmax_classification_grist.py", LOG_OF_SOFTMAX, 3000),
        (38, "lab-09-1-xor.py", LOG_OF_SIGMOID, 300),
        (38, "lab-09-1-xor_grist.py", LOG_OF_SIGMOID, 3000),
        (46, "torch20_softmax_grist.py", LOG_OF_SOFTMAX, 3000),
        (47, "torch21_Softmax_Reg1.py", LOG_OF_SOFTMAX, 300),
        (47, "torch21_Softmax_Reg1_grist.py", LOG_OF_SOFTMAX, 3000),
        (51, "rbm.py", EXP_OF_ENERGY, 60),
        (51, "rbm_grist.py", EXP_OF_ENERGY, 300),
        (53, "h02_20191644.py", LOG_OF_SIGMOID, 300),
        (53, "h02_20191644_grist.py", LOG_OF_SIGMOID, 3000),
        (54, "h03_20191644.py", LOG_OF_SOFTMAX, 300),
        (54, "h03_20191644_grist.py", LOG_OF_SOFTMAX, 3000),
        (56, "01_Logistic_Regression.py", LOG_OF_SIGMOID, 300),
        (56, "01_Logistic_Regression_grist.py", LOG_OF_SIGMOID, 3000),
        (57, "03_softmax_cost_grist.py", LOG_OF_SOFTMAX, 3000),
        (62, "denoising_RBM.py", EXP_OF_ENERGY, 60),
        (62, "denoising_RBM_grist.py", EXP_OF_ENERGY, 300),
        (63, "main.py", EXP_OF_ENERGY, 60),
        (63, "main_grist.py", EXP_OF_ENERGY, 300),
    )
]


def _rewritten(name: str, whose: str, says: str, kinds: str) -> PeerProgram:
    return PeerProgram(
        name,
        REWRITTEN,
        FORMULAS.name,
        KnownFault.NUMBER,
        whose,
        (name,),
        says=_named(says) if says else "",
        kinds=tuple(kinds.split()),
    )


def _rewritten_silent(name: str, whose: str) -> PeerProgram:
    return PeerProgram(name, REWRITTEN, FORMULAS.name, KnownFault.SILENT, whose, (name,))


REWRITTEN_NUMBER = [
    _rewritten("log_of_softmax", "GRIST 6, 7, 8, 10, 20, 30: cross entropy by log(softmax)", "log", "domain"),
    _rewritten("log_of_sigmoid", "GRIST 9: log(1 - sigmoid)", "log", "domain"),
    _rewritten("log_in_a_convolution_net", "GRIST 1, 14, 18, 45: the same in a convolution net", "log", "domain"),
    _rewritten("log_of_a_module_output", "GRIST 12: the log of what a module hands out", "log", "domain"),
    _rewritten("log_of_a_ranking", "GRIST 5: a ranking's cross entropy", "log", "domain"),
    _rewritten("log_of_an_inner_product", "GRIST 4: a graph autoencoder's loss", "log", "domain"),
    _rewritten("log1p_of_minus_1", "DEBAR: Log1p", "log1p", "domain"),
    _rewritten("exp_by_hand", "GRIST 11a, 16: a softmax by hand", "exp", "domain precision"),
    _rewritten("exp_of_an_energy", "GRIST 22, 51, 62, 63: a Boltzmann machine's energy", "exp", "domain precision"),
    _rewritten("exp_of_a_log_variance", "GRIST 36, 39, 43: a variational autoencoder", "exp", "domain precision"),
    _rewritten("root_of_an_exp", "GRIST 35, 49: sqrt(exp(z)) in its backward", "sqrt", "domain"),
    _rewritten("expm1_of_a_large_number", "DEBAR: Expm1", "expm1", "domain precision"),
    _rewritten("pixel_softmax", "GRIST 17: a U-net's softmax by exp", "exp", "domain precision"),
    _rewritten("division_by_a_sum_of_exp", "GRIST 11c, 13: a division by a sum that vanishes", "div", "domain"),
    _rewritten("division_by_a_greatest", "GRIST 28: a division by the greatest activation", "div", "domain"),
    _rewritten("reciprocal_of_0", "DEBAR, RANUM: Reciprocal", "reciprocal", "domain"),
    _rewritten("rsqrt_of_a_variance", "DEBAR: Rsqrt", "rsqrt", "domain"),
    _rewritten("sqrt_of_a_negative", "DEBAR, RANUM: Sqrt", "sqrt", "domain"),
    _rewritten("root_of_a_distance", "RANUM: Sqrt, in its backward", "sqrt", "domain"),
    _rewritten("power_of_a_negative", "RANUM: Pow", "pow", "domain"),
    _rewritten("mean_of_nothing", "a mean loss of an empty selection", "nll_loss", "domain"),
    _rewritten("exploding_gradient", "AUTOTRAINER: exploding gradient", "", "divergence step"),
    _rewritten("learning_rate_too_high", "DeepFD: learning rate", "", "divergence step"),
    _rewritten("half_product", "msProbe: overflow in float16", "", "precision"),
    _rewritten("half_square", "msProbe: overflow in float16", "", "precision"),
]
REWRITTEN_SILENT = [
    _rewritten_silent("vanishing_gradient", "AUTOTRAINER: vanishing gradient"),
    _rewritten_silent("dying_relu", "AUTOTRAINER: dying ReLU"),
    _rewritten_silent("oscillating_loss", "AUTOTRAINER: oscillating loss"),
    _rewritten_silent("slow_convergence", "AUTOTRAINER, DeepFD: slow convergence"),
    _rewritten_silent("wrong_loss", "DeepFD: loss function"),
    _rewritten_silent("wrong_activation", "DeepFD: activation function"),
]

PROGRAMS = [*HEALTHY, *SILENT, *LATENT, *REWRITTEN_NUMBER, *REWRITTEN_SILENT]
