"""The scenarios: which script with which fault, and the truth about it.

A truth is what follows from the script, and not what some version of gpuwatch said. `run.py --plain` checks the
scripts against it without gpuwatch. What a truth leaves out is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ANY = "any"
"""In `between`: whatever stands there."""


@dataclass(frozen=True)
class Scenario:
    """A script with its arguments, the options of launch, and what must come out."""

    name: str
    script: str
    verdict: dict[str, Any]
    """Fields of report.json's verdict. A set as value: one of these."""
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    nproc: int = 2
    weaker: tuple[dict[str, Any], ...] = ()
    """Verdicts that say less and nothing wrong: they count as `unknown`."""
    together: dict[int, str] = field(default_factory=dict)
    """Rank -> module: all the origins that nothing orders, in the verdict and its `concurrent`."""
    evidence: str = ""
    """Regular expressions: for the verdict's evidence, its statement, and what the script's ranks print."""
    statement: str = ""
    stdout: str = ""
    stdout_without: str = ""
    warnings: tuple[tuple[int, str, str, str], ...] = ()
    """(rank, kind, module, role) of warnings that the report must have."""
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Rank -> what the report counts for it, such as {"scaler_skips": 4}; -1: at least one."""
    own_faults: int = 0
    """How many errors of gpuwatch itself the run must record."""
    witness: str | None = None
    """What scripts/witness.py says of the fault, where that does not follow from the verdict; "": nothing at all."""
    preflight: bool = False

    @property
    def code(self) -> int:
        """The exit code of launch."""
        return {"clean": 0, "crash": 1, "unknown": 6}.get(self.verdict["kind"], 4)

    @property
    def said_by_witness(self) -> str | None:
        """The line that the witness must print; "" for none at all, None where it has nothing to say of the case."""
        verdict = self.verdict
        if self.witness is not None or verdict["kind"] == "clean":
            return self.witness or ""
        if verdict.get("rank") is None or verdict.get("phase") not in ("forward", "backward", "weight"):
            return None
        phase = verdict["phase"]
        if phase == "backward" and verdict.get("role") in ("grad weight", "grad bias"):
            phase = "gradient"
        return f"rank={verdict['rank']} phase={phase} module={verdict['module']} class={verdict['class']}"


CLEAN = {"kind": "clean"}


def _overflow(**fields: Any) -> dict[str, Any]:
    return {"kind": "overflow", **{"class" if name == "cls" else name: value for name, value in fields.items()}}


def _found(phase: str, rank: int | None, module: str, cls: str, **more: Any) -> dict[str, Any]:
    return _overflow(phase=phase, rank=rank, module=module, cls=cls, **{"between": None, **more})


def _forward(rank: int, module: str, cls: str = "Linear", **more: Any) -> dict[str, Any]:
    return _found("forward", rank, module, cls, **{"role": "output", "value": "+inf", **more})


def _backward(rank: int, module: str, cls: str, **more: Any) -> dict[str, Any]:
    return _found("backward", rank, module, cls, **{"role": "grad input[0]", "value": "nan", **more})


LEAF = _forward(1, "body.up", dtype="float32", batch=2, certainty="established")
ZERO_LENGTH = _backward(1, "length", "Length", dtype="float32", batch=2)

_SCALE = "rank=1 phase=backward module=block.scale class=Scale batch=2"
_NOT_SEEN = "the record does not show where it was made"

FORWARD = [
    Scenario("leaf", "forward_leaf.py", LEAF),
    Scenario(
        "leaf, trained on",
        "forward_leaf.py",
        LEAF,
        options=("--on-overflow", "continue"),
        stdout="rank 0 trained to the end",
    ),
    Scenario(
        "leaf, one of four ranks",
        "forward_leaf.py",
        {**LEAF, "rank": 2, "batch": 1},
        args=("--rank", "2", "--batch", "1"),
        nproc=4,
    ),
    Scenario("leaf, --sync", "forward_leaf.py", LEAF, options=("--sync",)),
    Scenario("leaf, --modules", "forward_leaf.py", LEAF, options=("--modules", "body.*")),
    Scenario(
        "leaf, --every 5, a watched batch",
        "forward_leaf.py",
        {**LEAF, "batch": 5},
        args=("--batch", "5", "--batches", "7"),
        options=("--every", "5"),
    ),
    Scenario(
        "leaf, --every 5, an idle batch",
        "forward_leaf.py",
        # nobody looked: a second run finds it in host memory, and on a device an optimizer step comes before
        _overflow(phase="forward", rank=1, module={None, "body.up"}, cls={None, "Linear"}, root="Net", batch=7),
        args=("--batch", "7", "--batches", "9"),
        options=("--every", "5"),
        witness="rank=1 phase=forward module=body.up class=Linear batch=7",
    ),
    Scenario(
        "residual add",
        "residual_add.py",
        _forward(1, "blocks.1", "Block", dtype="float16", batch=2, between=("blocks.1.fc2", None)),
    ),
    Scenario(
        "between two children",
        "between_children.py",
        _found("forward", 0, "block", "Block", between=("block.enter", "block.leave"), value="+inf", batch=1),
    ),
    Scenario("keywords and dicts", "kwargs_dict.py", _forward(0, "scores", "Scores", role="output.logits[0]", batch=1)),
    Scenario(
        "a head outside of DDP, whose weights differ by design",
        "own_head.py",
        _forward(1, "head", batch=2, certainty="established"),
        statement="(?s)^(?!.*(bit flip|differs)).*$",
    ),
    Scenario("shared module", "shared_module.py", _forward(0, "grow", batch=1)),
    Scenario("LSTM", "recurrent.py", _forward(1, "lstm", "LSTM", role="output[0]", value="nan", batch=2)),
    Scenario("module added late", "late_module.py", _forward(1, "adapters.late", batch=4)),
    Scenario(
        "two models and optimizers", "gan.py", _forward(0, "features.0", root="Discriminator", batch=7), witness=None
    ),
    Scenario("exception caught in a forward", "caught_exception.py", CLEAN, stdout="rank 1 left out 1"),
    Scenario(
        "overflow after a caught exception",
        "caught_exception.py",
        _forward(1, "body.up", batch=4),
        args=("--fault", "later"),
    ),
    Scenario("evaluation between training", "evaluation.py", CLEAN),
    Scenario("overflow in evaluation", "evaluation.py", _forward(1, "body.up", batch=7), args=("--fault", "eval")),
    Scenario("evaluation on rank 0 alone", "evaluation_on_rank_0.py", CLEAN, args=("--fault", "none")),
    Scenario(
        "overflow where rank 0 alone has evaluated",
        "evaluation_on_rank_0.py",
        # weights differ between the ranks' batches of one number, because those are different steps
        _forward(1, "head", batch=4),
        witness="rank=1 phase=forward module=head class=Linear batch=4",
    ),
    Scenario(
        "two ranks in one batch",
        "two_ranks.py",
        _overflow(phase="forward", role="output", value="+inf", batch=2, certainty="supported"),
        together={0: "body.up", 1: "head"},
        witness="rank=0 phase=forward module=body.up class=Linear batch=2",
    ),
    Scenario("autocast in float16", "autocast.py", _forward(1, "body.up", dtype="float16", batch=2)),
    Scenario("autocast in bfloat16", "autocast.py", CLEAN, args=("--dtype", "bfloat16"), preflight=True),
]

INPUTS_AND_WEIGHTS = [
    Scenario("bad batch", "bad_batch.py", _found("input", 1, "", "Net", role="input[0]", value="nan", batch=3)),
    Scenario(
        "weight bad at the start, on one rank",
        "weights_at_start.py",
        _found("weight", 1, "head", "Linear", role="weight", value="nan", batch=0),
    ),
    Scenario(
        "weight bad at the start, on all ranks",
        "weights_at_start.py",
        _found("weight", None, "head", "Linear", role="weight", value="nan", batch=0, certainty="unknown"),
        args=("--where", "all"),
    ),
    Scenario(
        "bit flip to inf",
        "bit_flip.py",
        _found("weight", 1, "encoder.gain", "Linear", role="weight", value="+inf", batch=3),
    ),
    Scenario(
        "bit flip to a huge number",
        "bit_flip.py",
        # the output is the first non-finite tensor; the fault is the weight, which differs on rank 0
        _found("weight", 1, "encoder.gain", "Linear", role="weight", batch=3),
        witness="rank=1 phase=forward module=encoder.gain class=Linear",
        args=("--becomes", "huge"),
        evidence="(?i)weight.*(differ|other ranks|replica)|(differ|other ranks|replica).*weight",
    ),
    Scenario(
        "an expert that one rank has trained alone overflows there",
        "expert.py",
        # the copies of its weight differ since the last step; what overflows is what it was handed
        _forward(1, "expert", batch=2),
        nproc=3,
        statement="(?s)^(?!.*(bit flip|memory)).*$",
        evidence="a step on this rank alone can have made it",
    ),
]

PLACES = [
    *(
        Scenario(
            f"a weight changed through .data{', compiled' if compiled else ''}",
            "places.py",
            _found("weight", 1, "head", "Linear", role="weight", value="nan", batch=2),
            args=("--fault", "data", "--compile", str(compiled)),
            witness=None if not compiled else "",
        )
        for compiled in (0, 1)
    ),
    Scenario(
        "a buffer that nobody has initialised",
        "places.py",
        _overflow(rank=1, module="rotary", cls="Rotary", phase="buffer", role="buffer inv_freq", value="nan", batch=2),
        args=("--fault", "buffer"),
        statement="^Rank 1 on .*: buffer `rotary.inv_freq` was not finite before batch 2's forward",
    ),
    Scenario(
        "all ranks alike",
        "places.py",
        _overflow(phase="forward", role="output", value="+inf", batch=2),
        args=("--fault", "alike"),
        together={0: "body.up", 1: "body.up"},
        statement="^Both ranks overflowed alike",
        witness="rank=0 phase=forward module=body.up class=Linear batch=2",
    ),
    Scenario(
        "a wild weight upstream",
        "places.py",
        # `up` is where it overflows; that `enter` has a wild weight is the line beside it
        _overflow(rank=1, batch=2, certainty="supported", module="body.up"),
        args=("--fault", "wild"),
        evidence="changed since it was last read, and not by a recorded step: weight of `enter`",
        witness="rank=1 phase=forward module=body.up class=Linear batch=2",
    ),
    Scenario(
        "a compiled module within a forward that is not",
        "places.py",
        _forward(1, "body.up", batch=2),
        args=("--fault", "compiled"),
        witness="",
    ),
    Scenario(
        "inside of compiled code that is not inspected",
        "places.py",
        # the leaf is `body.up`; frames show `body` or the model around it, and it is said that no more is known
        _overflow(rank=1, phase="forward", batch=2, certainty="supported"),
        args=("--fault", "hidden"),
        evidence="compiled code inside .* was not inspected",
        witness="",
    ),
    Scenario(
        "a leaf, and gpuwatch has failed to read what a module returned a batch before",
        "places.py",
        # what was not recorded cannot be excluded
        _forward(1, "body.up", batch=2, certainty="supported"),
        args=("--fault", "lazy"),
        evidence="a part of gpuwatch failed in batch 1 .*forward hook.*not computed yet",
        own_faults=1,
    ),
    Scenario(
        "a value that goes on by an attribute",
        "by_another_way.py",
        # no frame shows it: the module around it that takes it out has returned it first
        _overflow(rank=1, phase="forward", module="encoder", batch=2, certainty="supported"),
        evidence="MulBackward0 of `encoder`",
        witness="rank=1 phase=forward module=taker class=Taker batch=2",
    ),
    Scenario(
        "a value that goes on by a list",
        "by_another_way.py",
        # which of the two has made it, no number tells: the smallest module that holds both is the model
        _overflow(rank=1, phase="forward", module="", batch=2, certainty="supported"),
        args=("--way", "list"),
        statement="made by code of `encoder` or of `taker` itself",
        witness="rank=1 phase=forward module=taker class=Taker batch=2",
    ),
    Scenario(
        "a value that goes on by a list, without gradients",
        "by_another_way.py",
        # `encoder` has made it, and no frame and no graph tells: nothing of `taker` is proven
        _overflow(rank=1, phase="forward", batch=2, certainty="supported"),
        args=("--way", "list", "--gradients", "0"),
        evidence="ran without gradients: autograd's graph",
        witness="rank=1 phase=forward module=taker class=Taker batch=2",
    ),
    Scenario(
        "a process that leaves in a forward with exit code 0",
        "places.py",
        {"kind": "crash", "rank": 1, "batch": 2, "certainty": "established"},
        args=("--fault", "exit"),
        statement="exited with code 0 in the forward of batch 2, in `leave` ",
        witness="",
    ),
]

BACKWARD = [
    Scenario("activation's gradient", "zero_length.py", ZERO_LENGTH),
    Scenario(
        "activation's gradient, --sync",
        "zero_length.py",
        ZERO_LENGTH,
        options=("--sync",),
        stdout="rank 1 batch 1: backward done",
        stdout_without="rank 1 batch 2: backward done",
    ),
    Scenario(
        "activation's gradient, --guard-optimizer",
        "zero_length.py",
        ZERO_LENGTH,
        options=("--guard-optimizer",),
        stdout="rank 1 batch 1: weights finite",
        stdout_without="weights bad",
    ),
    Scenario(
        "activation's gradient, nobody looked",
        "zero_length.py",
        # the weight was bad after the step of batch 2, and at the start of batch 3; whose gradient it was, nobody saw
        _overflow(rank=None, certainty="unknown", module="embed", phase="weight", batch={2, 3}),
        options=("--watch", "forward,weights"),
    ),
    Scenario(
        "activation's gradient in float16",
        "gradient_scale.py",
        _backward(0, "scale", "GradientScale", value="+inf", dtype="float16", batch=2),
    ),
    Scenario(
        "weight's gradient in float16",
        "outer_product.py",
        _backward(1, "fc", "Linear", role="grad weight", value="+inf", dtype="float16", batch=2),
    ),
    Scenario(
        "the script's own loss",
        "loss_at_zero.py",
        _overflow(phase="backward", rank=1, module="", cls="Net", value="+inf", batch=2),
        witness="rank=1 phase=gradient module=head class=Linear batch=2",
    ),
    Scenario(
        "a term of the script's loss without a gradient",
        "loss_term.py",
        _overflow(phase="loss", rank=1, module=None, value="-inf", batch=2, certainty="established"),
        witness="",
    ),
    Scenario(
        "between two children, backward",
        "where_trap.py",
        _found("backward", 0, "block", "Block", between=(ANY, "block.enter"), value="nan", batch=1),
    ),
    Scenario(
        "sum of two consumers' gradients",
        "fan_out.py",
        _found(
            "backward", 1, "block", "Block", between=(ANY, "block.enter"), certainty="supported", value="+inf", batch=2
        ),
        witness="rank=1 phase=gradient module=block.enter class=Linear batch=2",
    ),
    *(
        Scenario(
            f"{name}{f', {how}' if how != 'plain' else ''}",
            "shared_input.py",
            # autograd's graph shows the tensor's users; those that only pass gradients on, or are bounded, are excluded
            _backward(1, "block.scale", "Scale", batch=2, certainty="established"),
            args=("--block", block, "--how", how),
            witness="rank=1 phase=backward module=block.scale class=Scale batch=2",
        )
        for block, name in (
            ("prenorm", "residual, pre-norm, and the root's own loss"),
            ("postnorm", "residual, post-norm"),
            ("gated", "gated feed-forward"),
            ("attention", "attention whose q, k and v share their input"),
        )
        for how in ("plain", "checkpointed", "reentrant")
    ),
    Scenario(
        "a product of a tensor and what a module made of it",
        "shared_input.py",
        _backward(1, "block.scale", "Scale", batch=2, certainty="established"),
        args=("--block", "product"),
    ),
    *(
        Scenario(
            name,
            "shared_input.py",
            # nobody has seen the gradient between the module and the block's own code
            _overflow(phase="backward", rank=1, module="block", batch=2, certainty="supported"),
            args=("--block", block),
            statement=said,
            witness=witness,
        )
        for block, name, said, witness in (
            ("exponential", "a product with what own code has computed", "`block.scale` or its own code", _SCALE),
            ("doubled", "own code multiplies what the module is handed", "`block.scale` or its own code", _SCALE),
            ("pair", "two modules of one kind on one tensor", "`block.(scale|other)` or `block.(scale|other)`", _SCALE),
            ("heads", "the module behind attention's own code", "`block.scale` or its own code", _SCALE),
            ("recurrent", "a module that is called twice", "`block.scale` or its own code", None),
        )
    ),
    *(
        Scenario(
            f"{block}, recompiled in that batch",
            "shared_input.py",
            # dynamo compiles again, because an attribute has changed; only frames show the tensor's users
            _overflow(phase="backward", rank=1, module=module, batch=2, certainty="supported"),
            args=("--block", block, "--how", "compiled"),
            statement="`block.scale`",
            witness="",
        )
        for block, module in (
            ("prenorm", "block.scale"),
            ("postnorm", "block"),
            ("gated", "block.scale"),
            ("attention", "block"),
        )
    ),
    Scenario(
        "a nan that was left in .grad",
        "left_gradient.py",
        # no backward of this run has made it
        _found("backward", 1, "head", "Linear", role="grad weight", value="nan", batch=0, certainty="established"),
        statement="had nan in the grad weight of `head` .* before the backward of batch 0 began",
        witness="rank=1 phase=weight module=head class=Linear batch=1",  # it sees what a backward makes, not the sum
    ),
    Scenario("no_sync", "accumulation_no_sync.py", _backward(1, "length", "Length", batch=4)),
    Scenario(
        "sum of accumulated gradients",
        "accumulation_sum.py",
        _backward(1, "fc", "Linear", role="grad weight", value="+inf", batch=5),
        witness="rank=1 phase=weight module=fc class=Linear batch=6",
    ),
    *(
        Scenario(
            f"checkpointing, {'reentrant' if reentrant else 'not reentrant'}, {fault}",
            "checkpointing.py",
            _forward(1, "blocks.0.enter", batch=2)
            if fault == "forward"
            else _backward(1, "blocks.1.root", "Root", value="+inf", batch=2),
            args=("--fault", fault, "--reentrant", str(reentrant)),
        )
        for reentrant in (0, 1)
        for fault in ("forward", "backward")
    ),
]

STEP = [
    Scenario(
        "optimizer step",
        "step_overflow.py",
        _found("optimizer", 1, "head", "Linear", role="weight", value="-inf", batch=2),
    ),
    Scenario(
        "optimizer step, on all ranks",
        "step_overflow.py",
        _overflow(phase="optimizer", role="weight", value="-inf", batch=2),
        args=("--where", "all"),
        together={0: "head", 1: "head"},
        weaker=(_overflow(rank=None, module="head", phase="optimizer"),),
    ),
    Scenario(
        "Adam without eps",
        "adam_no_eps.py",
        _found("optimizer", 1, "gate", "Linear", role="weight", value="nan", batch=0),
        evidence="exp_avg",
    ),
    *(
        Scenario(
            f"a weight changed between the backward and the step of {name}{', foreach' if foreach == '1' else ''}",
            "before_step.py",
            _found(
                "weight", 1, "body.up", "Linear", role="weight", value={"+inf", "nan"}, batch=2, certainty="established"
            ),
            args=("--optimizer", name, "--foreach", foreach),
            statement="changed outside of forward, backward and step",
            witness="rank=1 phase=weight module=body.up class=Linear batch=3",
        )
        for name, foreach in (
            ("SGD", "-1"),
            ("Adam", "0"),
            ("AdamW", "1"),
            ("Adagrad", "-1"),
            ("RMSprop", "-1"),
            ("Adafactor", "-1"),
        )
    ),
    Scenario(
        "a weight changed between the backward and the step of an unknown optimizer",
        "before_step.py",
        _found("optimizer", 1, "body.up", "Linear", role="weight", value="+inf", batch=2, certainty="supported"),
        args=("--optimizer", "own"),
        statement="the step made it, or something else changed the weight",
        witness="rank=1 phase=weight module=body.up class=Linear batch=3",
    ),
    Scenario(
        "the script's own clipping",
        "own_clipping.py",
        _found("optimizer", 1, "fc", "Linear", role="grad weight", batch=2),
    ),
    *(
        Scenario(
            name,
            "own_clipping.py",
            # all ranks get it, and no sum of these gradients gives it; which rank's code made it no frame shows, but
            # what goes into the reduction does, if that rank's numbers come before its end
            _found(
                "collective", rank, module, "Linear", role="grad weight", value=value, batch=2, certainty="supported"
            ),
            args=("--fault", fault),
            statement="(?s)no sum of them gives that value.*normalisation",
        )
        for name, fault, rank, module, value in (
            ("the script's own clipping, on all ranks", "all", None, "fc", "nan"),
            ("normalised by 0 tokens before the all-reduce", "tokens", {1, None}, {"fc", "head"}, {"+inf", "nan"}),
        )
    ),
    Scenario(
        "all-reduce in float16",
        "half_all_reduce.py",
        _found(
            "collective",
            None,
            "fc",
            "Linear",
            role="grad weight",
            value="+inf",
            dtype="float16",
            batch=2,
            certainty="established",
        ),
        evidence="abs max of each rank's own gradient: 4.00e.04 on rank 0, 4.00e.04 on rank 1",
    ),
    Scenario(
        "one element of an all-reduce in float16, under --explain",
        "half_all_reduce.py",
        _found("collective", None, "fc", "Linear", role="grad weight", batch=2, certainty="established"),
        args=("--fault", "element"),
        options=("--explain", "2"),
        evidence=r"element \[3, 5\].* 4.10e\+04 on rank 0, 3.90e\+04 on rank 1; their sum is beyond 65504 \(float16\)",
    ),
    *(
        Scenario(
            f"DDP's all-reduce in float16{'' if explain == 'auto' else ', under --explain'}",
            "half_comm_hook.py",
            # handed on in float32, in which the sum is finite: that it is reduced in float16 no frame shows
            _found(
                "collective", None, "fc", "Linear", role="grad weight", value="+inf", batch=2, certainty="supported"
            ),
            options=("--explain", explain),
            statement="reduced in float16",
            evidence=evidence,
        )
        for explain, evidence in (
            ("auto", "abs max of each rank's own gradient: 4.00e.04 on rank 0, 4.00e.04 on rank 1"),
            ("2", "(?s)made it: 4.00e.04 on rank 0, 4.00e.04 on rank 1; their sum is beyond 65504 .float16."),
        )
    ),
]

PARALLEL = [
    Scenario("FSDP2, forward", "fsdp.py", _forward(1, "blocks.0.up", batch=2)),
    Scenario(
        "FSDP2, backward",
        "fsdp.py",
        _backward(1, "blocks.1.root", "Root", value="+inf", batch=2),
        args=("--fault", "backward"),
    ),
    Scenario(
        "FSDP2, backward, across a wrapped block's border",
        "fsdp.py",
        _backward(1, "blocks.1.root", "Root", value="+inf", batch=2),
        args=("--fault", "boundary"),
        weaker=(_overflow(phase="backward", rank=1, module="", between=(ANY, ANY), batch=2),),
    ),
    Scenario(
        "FSDP2, one rank's shard of a weight",
        "fsdp.py",
        # both ranks gather the nan; whose it is, only their shards tell
        _found("weight", 1, "head", "Linear", role="weight", value="nan", batch=2, certainty="established"),
        args=("--fault", "shard"),
        evidence="own shard of weight was nan",
        witness="rank=1 phase=weight module=head class=Linear batch=2",
    ),
    Scenario(
        "FSDP2, the step of one rank's shard",
        "fsdp.py",
        # to look at that shard may not become a collective, which the other rank does not issue
        _found("optimizer", 1, "embed", "Linear", role="weight", batch=2),
        args=("--fault", "step"),
        evidence=r"there: .* of this rank's shard\n.*the step for its first bad element: gradient .*, lr 3e\+38",
        witness="rank=1 phase=weight module=embed class=Linear batch=3",
    ),
    Scenario(
        "tensor parallel, column shard", "tensor_parallel.py", _forward(1, "mlp.up", batch=2), args=("--fault", "up")
    ),
    Scenario(
        "tensor parallel, a shard's weight",
        "tensor_parallel.py",
        _found("weight", 1, "mlp.down", "Linear", role="weight", value="nan", batch=2),
        args=("--fault", "weight"),
    ),
    Scenario(
        "tensor parallel, row shard before its all-reduce",
        "tensor_parallel.py",
        _forward(1, "mlp.down", batch=2),
        args=("--fault", "partial"),
        weaker=(_overflow(rank=None, module="mlp.down", certainty="unknown"),),
    ),
    Scenario("pipeline, forward", "pipeline.py", _forward(0, "up", root="First", batch=5)),
    Scenario(
        "pipeline, backward",
        "pipeline.py",
        _backward(1, "length", "Length", root="Second", batch=4),
        args=("--fault", "backward"),
        witness="rank=1 phase=backward module=length class=Length batch=5",  # it counts the forwards begun by then
    ),
    Scenario(
        "pipeline, torch's own try on empty memory",
        "pipeline.py",
        CLEAN,
        args=("--fault", "none"),
        witness="rank=1 phase=backward module=length class=Length batch=0",
    ),
    *(
        Scenario(
            f"pipeline of the script's own, whose code makes it between two ranks, {fault}",
            "hand_made_pipeline.py",
            # no module made it: the script of the rank that sent it did
            _overflow(rank=rank, module=None, cls=None, phase="collective", batch=2, certainty="supported"),
            args=("--fault", fault),
            weaker=(_overflow(rank=None, certainty="unknown"),),
            evidence=f"rank {rank} put .inf into message",
        )
        for fault, rank in (("forward", 0), ("backward", 1))
    ),
    Scenario(
        "a bad batch where the loss is summed over the ranks in between",
        "hand_made_pipeline.py",
        _found("input", 1, "", "First", role="input[0]", value="nan", batch=2, certainty="established"),
        args=("--fault", "logged"),
        evidence="finite numbers came out: none has brought it",
    ),
    Scenario("torch.compile, forward", "compiled.py", _forward(1, "body.up", batch=3)),
    Scenario(
        "torch.compile, backward",
        "compiled.py",
        _backward(1, "length", "Length", batch=3),
        args=("--fault", "backward"),
        weaker=(_overflow(phase="backward", rank=1, between=(ANY, ANY), batch=3),),
    ),
    *(
        Scenario(
            f"blocks compiled one by one, {around}, forward",
            "compiled_blocks.py",
            _forward(1, "blocks.2.body.up", batch=3),
            args=("--around", around),
            witness="",
        )
        for around in ("ddp", "fsdp")
    ),
    *(
        Scenario(
            f"blocks compiled one by one, {around}, backward",
            "compiled_blocks.py",
            _backward(1, "blocks.2.length", "Length", batch=3),
            args=("--around", around, "--fault", "backward"),
            weaker=(_overflow(phase="backward", rank=1, between=(ANY, ANY), batch=3),),
            witness="",
        )
        for around in ("ddp", "fsdp")
    ),
]

EXPECTED = [
    Scenario("masks of -inf", "attention.py", CLEAN),
    Scenario(
        "rows masked whole, taken away again",
        "masked_rows.py",
        CLEAN,
        witness="rank=0 phase=forward module=attend.softmax class=Softmax batch=0",
        counts={0: {"absorbed": 3}, 1: {"absorbed": 3}},
        statement="6 tensors of nan from masks, which the model discarded",
    ),
    Scenario(
        "rows masked whole, kept",
        "masked_rows.py",
        _forward(1, "attend.softmax", "Softmax", value="nan", batch=2),
        args=("--fault", "kept"),
        witness="rank=1 phase=forward module=attend.softmax class=Softmax batch=2",
    ),
    Scenario(
        "a fault behind rows masked whole",
        "masked_rows.py",
        _found("weight", 1, "up", "Linear", role="weight", batch=2),
        args=("--fault", "behind"),
        witness="rank=1 phase=forward module=attend.softmax class=Softmax batch=2",
    ),
    Scenario(
        "nan out of finite numbers, taken away again",
        "masked_rows.py",
        CLEAN,
        args=("--fault", "log"),
        witness="rank=1 phase=forward module=attend.log class=Log batch=2",
        statement=r"that had no effect \(first: nan in output of `attend.log`",
    ),
    Scenario(
        "mask handed in with a closed row",
        "attention.py",
        # a mask of -inf comes in with every batch: only in this one attention makes nan of it
        _forward(1, "attend", "Attend", value="nan", batch=2, certainty="established"),
        args=("--fault", "given"),
        statement=r"a row of input\[2\] is -inf throughout",
    ),
    Scenario(
        "mask handed in and added to another one",
        "attention.py",
        _forward(1, "attend", "Attend", value="nan", batch=2, certainty="established"),
        args=("--fault", "added"),
        statement=r"a row of input\[2\] is -inf throughout",
    ),
    Scenario(
        "mask with a closed row, in the first batch that has a mask",
        "attention.py",
        _found("input", 1, "", "Net", role="kwargs.mask", value="-inf", batch=2),
        args=("--fault", "first"),
        statement="`attend` .*turned it into nan",
        witness="rank=1 phase=backward module=attend class=Attend batch=2",
    ),
    Scenario(
        "mask made inside with a closed row",
        "attention.py",
        _forward(1, "attend", "Attend", value="nan", batch=2, certainty="established"),
        args=("--fault", "made"),
        evidence="the -inf in .* came from output of `padding`",
    ),
    Scenario(
        "GradScaler finds its scale",
        "scaler.py",
        CLEAN,
        stdout="rank 1 skipped 4",
        counts={0: {"scaler_skips": 4}, 1: {"scaler_skips": 4}},
        witness="rank=0 phase=gradient module=upper class=Linear batch=0",
    ),
    Scenario(
        "GradScaler's scale collapses",
        "scaler.py",
        _overflow(phase="backward", rank=1, module="scale", cls="GradientScale", role="grad input[0]", value="+inf"),
        args=("--fault", "always"),
        options=("--scaler-skips", "5"),
    ),
    Scenario(
        "a GradScaler that scales, and an optimizer that is stepped without it",
        "scaler.py",
        # 2**19 is inf in float16: the scale alone has made it, and nobody has skipped the step
        _overflow(phase="backward", value="+inf", batch=0),
        args=("--fault", "bypassed"),
        together={0: "", 1: ""},
        evidence="GradScaler had scaled the loss; its scale was 524288",
        witness="rank=0 phase=gradient module=upper class=Linear batch=0",
    ),
    Scenario("uninitialised buffers", "uninitialised.py", CLEAN),
    Scenario("nan inside one module", "nan_inside.py", CLEAN),
    Scenario(
        "--ignore",
        "ignored.py",
        CLEAN,
        options=("--ignore", "probe*"),
        counts={0: {"ignored": 0}, 1: {"ignored": -1}},
        witness="rank=1 phase=forward module=probe class=Probe batch=0",
    ),
    Scenario("tensors of every kind", "exotic.py", CLEAN),
    Scenario(
        "underflow",
        "underflow.py",
        CLEAN,
        warnings=((0, "underflow", "head", "grad weight"), (1, "underflow", "head", "grad weight")),
    ),
    Scenario("LoRA's zeros", "quiet.py", CLEAN, counts={0: {"warned": 0}, 1: {"warned": 0}}),
    Scenario(
        "gradients that a GradScaler scales",
        "quiet.py",
        CLEAN,
        args=("--kind", "scaled"),
        counts={0: {"warned": 0}, 1: {"warned": 0}},
    ),
    Scenario("near overflow", "near_overflow.py", CLEAN, warnings=((1, "near overflow", "up", "output"),)),
]

LESS_WATCHED = [
    Scenario(
        "leaf, in a batch that is skipped",
        "forward_leaf.py",
        _overflow(rank=1, module={None, "body.up"}, batch=2, certainty="supported"),
        options=("--every", "3"),
        statement="in a second run of that forward `body.up` .Linear. made it|the module is unknown",
        witness="rank=1 phase=forward module=body.up class=Linear batch=2",
    ),
    Scenario(
        "activation's gradient, in a batch that is skipped",
        "zero_length.py",
        _overflow(
            rank=1,
            module={None, "length"},
            phase="backward",
            role="grad weight",
            batch=2,
            certainty="supported",
        ),
        options=("--every", "3"),
        statement="that forward and its backward `length` .Length. made it|the module is unknown",
        witness="rank=1 phase=backward module=length class=Length batch=2",
    ),
    *(
        Scenario(
            f"{name}, of a module that is not watched",
            script,
            _overflow(rank=1, module="head", batch=batch, certainty="supported"),
            args=args,
            options=("--modules", "head*"),
            statement=_NOT_SEEN,
            witness=witness,
        )
        for name, script, args, batch, witness in (
            ("leaf", "forward_leaf.py", (), 2, "rank=1 phase=forward module=body.up class=Linear batch=2"),
            ("bad buffer", "places.py", ("--fault", "buffer"), 2, None),
            ("residual sum", "residual_add.py", (), 2, None),
            ("bad batch", "bad_batch.py", (), 3, None),
        )
    ),
    Scenario(
        "activation's gradient, of a module that is not watched",
        "zero_length.py",
        _overflow(rank=1, phase="backward", module="", batch=2, certainty="supported"),
        options=("--modules", "head*", "--modules", "embed*"),
        witness="rank=1 phase=backward module=length class=Length batch=2",
    ),
    Scenario(
        "activation's gradient, where neither gradients nor weights are watched",
        "zero_length.py",
        # a device is asked after the next step: the weight may be bad because of it
        _overflow(rank=None, phase={"weight", "forward"}, module="embed", batch=3, certainty="unknown"),
        options=("--watch", "forward"),
        evidence="weights are not watched",
    ),
    Scenario(
        "no module is watched",
        "zero_length.py",
        # the loss is read all the same, but not the gradients that made the weights nan
        _overflow(rank=None, module="(loss)", phase="collective", batch=3, certainty="unknown"),
        options=("--modules", "length.*"),
        statement="met nan in batch 3 in the loss; collectives ran there, so it may have come from any rank",
        witness="rank=1 phase=backward module=length class=Length batch=2",
    ),
    Scenario(
        "a weight changed by the script, where weights are not watched",
        "places.py",
        _found("weight", 1, "head", "Linear", role="weight", value="nan", batch=2, certainty="established"),
        args=("--fault", "data"),
        options=("--watch", "forward,grads"),
        evidence="weights are not watched",
        witness="rank=1 phase=weight module=head class=Linear batch=2",
    ),
]

COMMUNICATION = [
    *(
        Scenario(
            f"four stages, forward of stage {stage}",
            "stages.py",
            _forward(stage, "up", batch=9),
            args=("--fault", "forward", "--stage", str(stage)),
            nproc=4,
            witness=f"rank={stage} phase=forward module=up class=Linear",
        )
        for stage in range(3)
    ),
    *(
        Scenario(
            f"four stages, backward of stage {stage}",
            "stages.py",
            _backward(stage, "length", "Length", batch=9),
            args=("--fault", "backward", "--stage", str(stage)),
            nproc=4,
            # it counts the forwards begun by then
            witness=f"rank={stage} phase=backward module=length class=Length batch={min(11, 12 - stage)}",
        )
        for stage in range(4)
    ),
    Scenario(
        "a broadcast of nan from rank 0",
        "passed.py",
        _found("input", 0, "", "Net", role="input[0]", value="nan", batch=2),
        args=("--way", "broadcast"),
        evidence="rank 0 put nan into broadcast",
        witness="",
    ),
    *(
        Scenario(
            f"what one rank's own code passes on, {way}",
            "passed.py",
            _overflow(phase="collective", rank=rank, module=None, cls=None, root=None),
            args=("--way", way),
            nproc=nproc,
            weaker=(_overflow(rank=None, certainty="unknown"),),
            evidence=f"rank {rank} put .inf into {evidence}",
        )
        for way, rank, nproc, evidence in (
            ("send", 0, 2, "message 3 from rank 0 to rank 1"),
            ("all_to_all", 1, 2, "all_to_all"),
            ("partial", 1, 4, "all_reduce"),
            ("ring", 2, 4, "message 7 from rank 2 to rank 3"),
        )
    ),
    *(
        Scenario(
            f"a sum of finite numbers over the ranks{'' if explain == 'auto' else ', under --explain'}",
            "passed.py",
            _overflow(phase="collective", rank=None, module=None, cls=None, certainty="established"),
            args=("--way", "sum"),
            options=("--explain", explain),
            statement="what every rank put in was finite, but their sum was not",
            evidence=evidence,
        )
        for explain, evidence in (
            ("auto", "rank 0: .inf came out of all_reduce 3 .*, 32 elements of float32"),
            ("2", r"element \[0, 0\] of all_reduce 3 .*: 2.40e.38 on rank 0, 2.40e.38 on rank 1; their sum is beyond"),
        )
    ),
    *(
        Scenario(
            f"interleaved stages, two on each of two ranks, forward of stage {stage}",
            "interleaved.py",
            _forward(stage % 2, "up", root=root, batch=9),
            args=("--fault", "forward", "--stage", str(stage)),
            witness=f"rank={stage % 2} phase=forward module=up class=Linear",
        )
        for stage, root in ((1, "First"), (2, "Second"))
    ),
    Scenario(
        "interleaved stages, two on each of two ranks, backward of stage 2",
        "interleaved.py",
        _backward(0, "length", "Length", root="Second", batch=9),
        args=("--fault", "backward", "--stage", "2"),
        witness="rank=0 phase=backward module=length class=Length batch=11",  # it counts the forwards begun by then
    ),
    Scenario(
        "experts with all_to_all, forward of one rank's expert", "exchanges.py", _forward(1, "expert.up", batch=2)
    ),
    Scenario(
        "experts with all_to_all, backward of one rank's expert, with another rank's token",
        "exchanges.py",
        _backward(1, "expert.length", "Length", batch=2),
        args=("--fault", "backward"),
    ),
    Scenario(
        "context parallel, a module's block of keys that goes around",
        "exchanges.py",
        _forward(1, "up", batch=2),
        args=("--way", "context"),
        nproc=3,
    ),
    Scenario(
        "sequence parallel, a module's part that is reduced and scattered",
        "exchanges.py",
        _forward(1, "up", batch=2),
        args=("--way", "sequence"),
    ),
    Scenario(
        "ZeRO-1, the step of one rank's shard",
        "sharded.py",
        _found("optimizer", 1, "body.up", "Linear", role="weight", batch=2),
        args=("--fault", "zero"),
        witness="rank=1 phase=weight module=body.up class=Linear batch=3",
    ),
    Scenario(
        "DDP's hook divides by 0 tokens on one rank",
        "sharded.py",
        _found("collective", 1, "body.down", "Linear", role="grad weight", batch=2, certainty="supported"),
        args=("--fault", "hook"),
        statement="made by rank 1 between its backward and all_reduce",
        witness="rank=1 phase=weight module=body.down class=Linear batch=3",
    ),
    Scenario(
        "FSDP2 that computes in float16",
        "sharded.py",
        _forward(1, "blocks.0.up", dtype="float16", batch=2),
        args=("--fault", "fp16"),
    ),
    Scenario(
        "FSDP2 that reduces in float16",
        "sharded.py",
        # its gradient is finite in bfloat16, and inf in the float16 that it puts in: no module has made that
        _overflow(phase="collective", rank=1, module=None, batch=2, certainty="supported"),
        args=("--fault", "reduced"),
        evidence="rank 1 put .inf into reduce_scatter",
        witness="rank=1 phase=weight module=blocks.0.down class=Linear batch=3",
    ),
    *(
        Scenario(
            f"a policy and its frozen reference: {what}", "policy.py", truth, args=("--fault", fault), witness=witness
        )
        for what, fault, truth, witness in (
            ("the reference overflows", "reference", _forward(1, "body.up", root="Reference", batch=2), None),
            (
                "the script's ratio",
                "ratio",
                _overflow(phase="loss", rank=1, module=None, value="+inf", batch=2),
                "rank=1 phase=gradient module=head class=Linear batch=2",
            ),
            ("the policy overflows as it generates", "policy", _forward(1, "body.up", root="Policy"), None),
        )
    ),
    Scenario("a group that counts no collectives", "fake_group.py", _forward(1, "body.up", batch=2)),
]
KINDS = {
    "forward": FORWARD,
    "inputs and weights": INPUTS_AND_WEIGHTS,
    "places": PLACES,
    "backward": BACKWARD,
    "step": STEP,
    "parallel": PARALLEL,
    "communication": COMMUNICATION,
    "expected": EXPECTED,
    "less watched": LESS_WATCHED,
}
SCENARIOS = [scenario for kind in KINDS.values() for scenario in kind]
