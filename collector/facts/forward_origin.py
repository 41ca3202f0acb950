"""Where a non-finite value of a forward came from, from one rank's page. Pure.

A frame that was handed a non-finite value is a carrier. The origin is a frame whose inputs and weights were finite and
whose output was not. A bad input is followed back to the call that returned it. If no call did, the code between two
calls made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from ...core.frames import Frame, FramePhase, Row, RowKind, RowMark, module_text
from ...core.judge import NAMED_BY_SCRIPT
from ...core.roles import role_of_parameter
from ...core.values import NonFinite, name_of
from .calls import FrameCalls, begun, returns
from .diagnosis import AlarmPage, LocalDiagnosis, Source, from_event
from .diagnosis_parts import MaskEvidence, WeightEvidence
from .followed_rows import EarlierRow, bad_input_of, neginf_before, worst
from .weight_history import UNSEEN, WeightHistory, history_of

_UNSEEN = {RowKind.NOT_MEASURABLE, RowKind.LOST, RowKind.PENDING}
"""Rows of tensors whose numbers are not known."""
_FLAGS = {"nan": NonFinite.NAN, "+inf": NonFinite.POSINF, "-inf": NonFinite.NEGINF, "inf": NonFinite.INF}


def explain_forward(alarm: AlarmPage, first: Frame) -> LocalDiagnosis:
    """The diagnosis of a call of a module that returned a non-finite value."""
    return _ForwardTrail(alarm, first).explain(first)


class _ForwardTrail:
    """Follows a bad value back through the calls of one forward."""

    def __init__(self, alarm: AlarmPage, first: Frame) -> None:
        self._alarm = alarm
        self._anomaly = alarm.anomaly
        self._again = alarm.again
        self._calls = FrameCalls.around(alarm.frames, first)
        self._turned: tuple[str, str] | None = None
        self._seen: set[tuple[int, int]] = set()

    def explain(self, frame: Frame, output: Row | None = None) -> LocalDiagnosis:
        """Why this call returned a non-finite value. `output` is the row to explain; without it, the worst is."""
        bad_weight = next((row for row in frame.weights if not row.finite), None)
        if bad_weight is not None:
            return self._of_weight(frame, bad_weight)
        changed = self._changed_weight(frame)
        if changed is not None:
            note, since = "weights are not watched (--watch): it was read when the alarm was raised", ""
            if frame.weights:
                note = f"{changed.role} was finite when it was read after the last step"
                since = f"it was finite when it was last read, and {UNSEEN}"
            found = self._of_weight(frame, changed)
            weight = replace(found.weight, changed_since=bool(frame.weights), history=since)
            return replace(found, notes=(note,), weight=weight)
        output = output or worst(frame.outputs)
        bad_input = bad_input_of(frame, output)
        if bad_input is not None:
            if bad_input.only_neginf and output is not None and output.nan:
                before = neginf_before(self._alarm.earlier, frame, bad_input.role)
                if before is None or before.seen:
                    return self._out_of_mask(frame, output, bad_input, before)
            if output is not None:
                self._turns(bad_input, output, frame.module, frame.cls)
            return self._trace_input(frame, bad_input)
        if output is None:  # the frame's own rows were lost
            return from_event(self._anomaly)
        neginf = worst(frame.inputs)
        return self._made_in(frame, output) if neginf is None else self._beside_neginf(frame, output, neginf)

    def _out_of_mask(self, frame: Frame, output: Row, mask: Row, before: EarlierRow | None) -> LocalDiagnosis:
        """The call made nan of an -inf that is nothing new, or that is known to be the whole of a row."""
        given = self._trace_input(frame, mask)  # before the nan has a place of its own
        self._turned = (frame.module, frame.cls)
        told = frame.module == self._anomaly.module and mask.role in self._again.closed
        closed = told or bool(mask.mark & RowMark.CLOSED)
        notes = [f"no earlier batch was received, so it is unknown whether {mask.role} always holds -inf"]
        if before is not None:
            notes = [f"{mask.role} held -inf in batch {before.batch} as well, and caused no nan"]
        source = given.row
        if (source.module, source.cls, source.role) != (frame.module, frame.cls, mask.role):
            notes.insert(0, f"the -inf in {mask.role} came from {source.role} of {source.place}")
        text = f"a row of {mask.role} is -inf throughout" if closed else f"{mask.role} held -inf"
        return self._diagnosis(frame, output, "made", sure=before is not None or closed, notes=notes, minus_inf=text)

    def _beside_neginf(self, frame: Frame, output: Row, given: Row) -> LocalDiagnosis:
        """The call was handed -inf and returned +inf. A mask makes no +inf; a Linear does, of a logarithm of 0."""
        if not self._is_new(frame, given):
            return self._made_in(frame, output)
        if frame.weights and len(frame.inputs) == 1 and not self._calls.children(frame):
            return self._trace_input(frame, given)
        found, place = self._made_in(frame, output), module_text(frame.module, frame.cls)
        note = f"{given.role} of {place} held -inf: the value may have been made from that"
        mask = replace(found.mask, text=found.mask.text or f"{given.role} held -inf")
        return replace(found, sure=False, mask=mask, notes=(*found.notes, note))

    def _of_weight(self, frame: Frame, bad: Row) -> LocalDiagnosis:
        """A weight is bad. Where FSDP gathers it from all ranks, this rank's own shard may be finite."""
        mine, name = self._anomaly.module == frame.module, bad.parsed_role.name
        shard = self._again.shards.get(name, "") if mine else ""
        if shard == "finite":
            note = f"this rank's own shard of {bad.role} was finite: the whole weight is gathered from all ranks"
            return self._diagnosis(frame, bad, "received", notes=(note,))
        notes = [f"this rank's own shard of {bad.role} was {shard}"] if shard else []
        computed, sure = mine and name in self._again.computed, True
        history = WeightHistory()
        if computed:
            notes.append(f"the script computed {bad.role} from other tensors: look at what it was computed from")
        elif bad.shape is not None:  # without a shape: no row of a page
            history = history_of(self._alarm.page, frame, bad, self._alarm.earlier)
            sure = bool(shard) or not history.text
        return self._diagnosis(
            frame,
            bad,
            "weight",
            FramePhase.WEIGHT,
            sure=sure and not computed,
            notes=[*([history.note] if history.note else []), *notes],
            weight=WeightEvidence(changed_since=history.changed, computed=computed, history=history.text),
        )

    def _changed_weight(self, frame: Frame) -> Row | None:
        """A weight that was finite when it was last read, and not in the second look that the alarm led to."""
        if frame.index != self._anomaly.frame or not self._again.same_step:
            return None
        bad = {name: found for name, found in self._again.weights.items() if found != "finite"}
        for row in frame.weights:
            if row.finite and row.parsed_role.name in bad:
                return msgspec.structs.replace(row, flags=int(_FLAGS[bad[row.parsed_role.name]]), abs_max=None)
        if not frame.weights and bad and frame.module == self._anomaly.module:  # weights are not watched
            name, found = next(iter(bad.items()))
            return _weight_row(role_of_parameter(name), found, self._anomaly.dtype)
        return None

    def _bad_weight_inside(self, frame: Frame) -> LocalDiagnosis | None:
        """A weight of a module inside of a call of which no inner call was seen, as in compiled code.

        It was finite when it was last read, and not when the alarm was raised.
        """
        bad = self._again.bad_weight if frame.index == self._anomaly.frame else None
        if bad is None or not bad.module.startswith(f"{frame.module}." if frame.module else "") or not bad.module:
            return None
        note = f"{bad.role} of {module_text(bad.module, bad.cls)} was finite when it was read after the last step"
        row, place = _weight_row(bad.role, bad.value, bad.dtype), (bad.module, bad.cls)
        changed = WeightEvidence(changed_since=True)
        found = self._diagnosis(
            frame, row, "weight", FramePhase.WEIGHT, place=place, sure=False, notes=(note,), weight=changed
        )
        return replace(found, row=replace(found.row, module=bad.module, cls=bad.cls))

    def _made_in(self, frame: Frame, output: Row) -> LocalDiagnosis:
        children = self._calls.children(frame)
        earlier = self._followable(children[::-1], output)
        if earlier is not None:
            self._turns(earlier[1], output, frame.module, frame.cls)
            return self.explain(*earlier)
        inside = self._bad_weight_inside(frame) if not children else None
        if inside is not None:
            return inside
        received = frame.seq > children[-1].seq >= 0 if children else frame.collectives > 0
        unread = () if received else self._unread_weights(frame)
        unseen = _unseen_object(frame)
        if not unseen and self._again.without_graph and frame.module == self._anomaly.module:
            # code of the script's own: it may have taken a value from a list or an object
            graph = "autograd's graph does not show whether it took a value from anywhere but its arguments"
            unseen = (f"{module_text(frame.module, frame.cls)} ran without gradients: {graph}",)
        return self._diagnosis(
            frame,
            output,
            "received" if received else "unread" if unread else "made",
            between=(children[-1].module, None) if children else None,
            sure=not unseen,
            notes=(*(unread if frame.cls != NAMED_BY_SCRIPT else ()), *unseen, *self._removed(frame, output)),
            weight=WeightEvidence(was_read=self._looked_again(frame)),
        )

    def _unread_weights(self, frame: Frame) -> tuple[str, ...]:
        """Notes on a call's weights if they were not read when it ran; empty if they were."""
        calls = self._calls
        if self._anomaly.again is None and not calls.children(frame) and not any(f.weights for f in calls.frames):
            return ("no weight was read in this batch, and no later reading of one is known",)
        if frame.weights or frame.module != self._anomaly.module or self._again.same_step:
            return ()
        late = ", ".join(f"{name} was {found}" for name, found in self._again.weights.items())
        return (f"weights are not watched (--watch): after a later step, {late}",) if late else ()

    def _looked_again(self, frame: Frame) -> bool:
        """Whether the weights of a call were read again when the alarm was raised, and were finite."""
        names = {row.parsed_role.name for row in frame.weights}
        weights = self._again.weights
        if not names:
            return frame.module != self._anomaly.module or all(found == "finite" for found in weights.values())
        return frame.module == self._anomaly.module and all(weights.get(name) == "finite" for name in names)

    def _removed(self, frame: Frame, output: Row) -> tuple[str, ...]:
        """Where the value was taken away again, if a call around this one has returned something finite.

        An output without numbers, such as one that a collective still writes, may hold the value: nothing is said.
        """
        around = self._calls.parent(frame)
        while around is not None and around.outputs:
            if any(row.kind in _UNSEEN for row in around.outputs):
                break
            if all(row.finite for row in around.outputs):
                value = name_of(NonFinite(output.flags))
                return (f"{module_text(around.module, around.cls)} removed it: it returned no {value}",)
            around = self._calls.parent(around)
        return ()

    def _trace_input(self, frame: Frame, bad: Row) -> LocalDiagnosis:
        """Follow a bad input back to the call that returned it, the model's input, or the code between two calls."""
        calls = self._calls
        again = (frame.index, bad.value) in self._seen
        self._seen.add((frame.index, bad.value))
        producer = calls.producer(bad.value, frame.index)
        if producer is not None and not again:
            return self.explain(*producer)
        holder = calls.outermost_with_input(frame, bad)
        if holder.parent is None and holder.phase == FramePhase.FORWARD:
            row = next((row for row in holder.inputs if row.value == bad.value), bad)
            return self._diagnosis(holder, row, "outside", FramePhase.INPUT)
        parent, before = calls.parent(holder), next(calls.older_siblings(holder), None)
        if parent is None and before is None:  # the module around it is not watched, or was not recomputed
            return self._diagnosis(holder, bad, "carried")
        if parent is not None and not again:
            given = worst([row for row in parent.inputs if row.only_neginf == bad.only_neginf])
            if given is not None:
                return self._trace_input(parent, given)
        earlier = self._followable(calls.older_siblings(holder), bad)
        if earlier is not None and not again:
            self._turns(earlier[1], bad, holder.parent or "", self._class_of(holder, parent))
            return self.explain(*earlier)
        return self._made_between(holder, parent, before, bad)

    def _made_between(self, holder: Frame, parent: Frame | None, before: Frame | None, bad: Row) -> LocalDiagnosis:
        """The code of `parent` made it, after `before` returned and before `holder` was called."""
        now = min((seq for seq in (begun(holder), self._anomaly.where.seq) if seq >= 0), default=-1)
        since = before.seq if before is not None else begun(parent) if parent is not None else -1
        itself, notes = "if it writes into it, it made the value itself", []
        if returns(holder, bad.value):
            name = module_text(holder.module, holder.cls)
            notes.append(f"{name} returned the same tensor that it received: {itself}")
        for other in self._calls.older_siblings(holder):
            if any(row.value == bad.value and not row.finite for row in other.inputs):
                before_it = "received the same tensor before, and it was non-finite when that call returned"
                notes.append(f"{module_text(other.module, other.cls)} {before_it}: {itself}")
        notes += _unseen_object(parent) if parent is not None else ()
        sure = parent is not None and not notes
        if parent is not None and not bad.only_neginf:
            masks = [row for row in parent.inputs if row.only_neginf]
            notes += [f"{module_text(parent.module, parent.cls)} had received -inf in {mask.role}" for mask in masks]
        return self._diagnosis(
            holder,
            bad,
            "received" if 0 <= since < now else "made",
            place=(holder.parent or "", self._class_of(holder, parent)),
            between=(before.module if before is not None else "", holder.module or holder.cls),
            sure=sure,
            notes=notes,
        )

    def _followable(self, earlier: Iterable[Frame], bad: Row) -> tuple[Frame, Row] | None:
        """A call in `earlier` (latest first) whose non-finite output raised no alarm and explains `bad`.

        A waived output explains everything but a -inf. An output of -inf explains a -inf, and the latest one a nan,
        unless that call returned -inf in an earlier batch as well.
        """
        for position, frame in enumerate(earlier):
            for row in frame.outputs:
                if row.finite:
                    continue
                if row.only_neginf:
                    if bad.only_neginf or (bad.nan and position == 0 and self._is_new(frame, row)):
                        return frame, row
                elif row.mark & RowMark.IGNORED and not bad.only_neginf:
                    return frame, row
        return None

    def _is_new(self, frame: Frame, row: Row) -> bool:
        before = neginf_before(self._alarm.earlier, frame, row.role)
        return before is None or not before.seen

    def _class_of(self, holder: Frame, parent: Frame | None) -> str:
        if parent is not None:
            return parent.cls
        return "?" if holder.parent else self._alarm.root_class

    def _turns(self, found: Row, into: Row, module: str, cls: str) -> None:
        if found.only_neginf and not into.only_neginf:
            self._turned = self._turned or (module, cls)

    def _diagnosis(
        self,
        frame: Frame,
        row: Row,
        source: Source,
        phase: FramePhase = FramePhase.FORWARD,
        *,
        place: tuple[str, str] | None = None,
        between: tuple[str, str | None] | None = None,
        sure: bool = True,
        notes: Iterable[str] = (),
        weight: WeightEvidence | None = None,
        minus_inf: str = "",
    ) -> LocalDiagnosis:
        mask = MaskEvidence(minus_inf, self._turned)
        found = self._alarm.diagnosis(
            frame, row, source, phase, place=place, between=between, sure=sure, notes=notes, weight=weight, mask=mask
        )
        if row.mark & RowMark.IGNORED:
            found = replace(found, notes=(*found.notes, "a rule of --ignore waives this row"))
        return found


def _weight_row(role: str, value: str, dtype: str) -> Row:
    """A row for a weight of which the page has none."""
    flags = _FLAGS.get(value, NonFinite.NAN)
    nan, posinf, neginf = (bool(flags & kind) for kind in (NonFinite.NAN, NonFinite.POSINF, NonFinite.NEGINF))
    return Row(role, None, None, nan, posinf, neginf, dtype, None, flags=int(flags))


def _unseen_object(frame: Frame) -> tuple[str, ...]:
    """A call that was handed no tensor, and an object: a generator or a class of the script's own may hold some."""
    kinds = {row.kind for row in frame.inputs}
    if RowKind.NOT_A_TENSOR not in kinds or RowKind.MEASURED in kinds:
        return ()
    came = "received an object that is not inspected: the value may have come in it"
    return (f"{module_text(frame.module, frame.cls)} {came}",)
