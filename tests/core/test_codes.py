"""Codes: the published ones stay, each has a text, and each message has a code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpuwatch.core.codes import Code, VerdictKind, code_texts
from gpuwatch.core.preflight import PreflightFinding
from msgspec.structs import fields

from ..parsed import nodes_of
from .test_imports import ROOT
from .test_names import all_modules

PUBLISHED = """
GW101 clean
GW102 crash
GW103 preflight
GW104 overflow
GW105 hang
GW106 lost
GW107 interrupted
GW108 unknown
GW201 replica_odd
GW202 replica_drift
GW203 scaler_collapsing
GW204 growth
GW205 near_overflow
GW206 rank_unlike
GW207 no_scaler
GW208 dead_module
GW209 scaler_too_small
GW210 underflow
GW211 gradients_zeroed
GW212 weights_unmoved
GW213 dead_activation
GW214 gradient_stopped
GW215 parts_unmoved
GW221 straggler
GW222 node_figure
GW231 scaler_skips
GW232 values_waived
GW233 values_absorbed
GW234 batches_skipped
GW235 traces_thinned
GW236 groups_not_shown
GW237 clock_off
GW301 not_arrived
GW302 rank_silent
GW303 store_lost
GW304 foreign_entry
GW305 preflight_fault
GW306 preflight_skipped
GW311 rank_test_failed
GW312 gpu_not_inspected
GW313 gpu_missing
GW314 gpu_shared
GW321 versions_differ
GW322 setting_differs
GW323 interface_missing
GW324 no_common_network
GW325 limit_low
GW331 gpu_unhealthy
GW332 health_unknown
GW333 memory_scarce
GW334 wrong_numbers
GW335 slow_device
GW341 rank_failed_group
GW342 group_undecided
GW343 node_unreachable
GW344 link_broken
GW345 no_pair_works
GW346 only_all_fail
GW347 bandwidth_low
GW348 link_slow
GW401 no_such_command
GW402 no_such_option
GW403 wrong_value
GW404 wrong_together
GW405 argument_missing
GW406 argument_too_many
GW407 no_script
GW408 nested_run
GW411 no_such_run
GW412 not_in_run
GW413 no_store
GW414 unreadable
GW415 not_running
GW416 no_capture
GW421 not_writable
GW422 address_in_use
GW423 no_meeting_point
GW424 node_unclear
GW425 secret_wrong
GW426 settings_file
GW427 not_installed
GW428 submission_refused
GW429 versions_apart
GW430 no_such_code
GW501 node_unheard
GW502 rank_unheard
GW503 end_unreported
GW504 other_program
GW505 no_recorder
GW506 hooks_failed
GW507 no_module_called
GW508 nothing_selected
GW509 child_unwatched
GW510 records_lost
GW511 compiled_unseen
GW512 parameters_unread
GW513 thread_unseen
GW514 hooks_cleared
GW515 torch_unseen
GW516 tensor_unmeasured
GW601 own_fault
GW602 collector_ended
GW603 agent_ended
GW604 store_unwritten
GW605 clients_rejected
GW606 no_c_part
GW607 slow_folder
GW608 not_notified
GW609 left_behind
GW610 no_rendezvous
GW611 scheduler_silent
GW612 verdict_late
GW613 keys_guessable
GW614 reader_off
"""


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """Those of the package, by the last part of the called name, with the file and the line."""
    for path in all_modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_a_published_code_never_changes():
    """Add a new code at the end of its block here, too; a line of this list is never changed or removed."""
    assert [f"{code} {code.kind}" for code in Code] == PUBLISHED.split("\n")[1:-1]


def test_each_code_has_one_text_in_plain_sentences():
    texts = code_texts()
    assert list(texts) == list(Code)
    for code, (title, text) in texts.items():
        assert title.endswith(".") and len(title) < 100, code
        assert len(re.findall(r"[.:?](?= |$)", text)) >= 2 and len(text) < 800, code
    assert len({title for title, _ in texts.values()}) == len(texts)


def test_each_code_is_given_somewhere():
    used = {
        node.attr
        for path in all_modules()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code"
    }
    assert {code.name for code in Code} - used == set()


def test_each_kind_of_verdict_has_the_code_of_its_name():
    assert [kind.code.kind for kind in VerdictKind] == [str(kind) for kind in VerdictKind]


def test_each_finding_of_the_preflight_has_a_code():
    assert fields(PreflightFinding)[-1].name == "code"
    made = list(calls("PreflightFinding"))
    assert len(made) > 10
    assert [place for place, call in made if "code" not in {word.arg for word in call.keywords}] == []


TO_ANOTHER_PROCESS = ("core/gpu/", "worker/preflight/b", "worker/preflight/co", "worker/preflight/g")
"""What these say is read by the process that started them."""
NO_TROUBLE = (
    *("leaving out ", "submitted job ", "job ", "checking ", "preflight ", "running under torchrun: ", "got "),
    *("stopping the ", "the command has ended, but ", "the report will be in ", "Prometheus metrics are at "),
    *(
        "The others no longer wait ",
        "the run's store can be written again: ",
        "the collector at ",
        "milliseconds",
        ": ",
    ),
    *(
        "gpuwatch: rank ",
        ": can't open file ",
        ", ",
        "the snapshot for viewers ",
        "the batch script has a token",
        "the collector has been starting for ",
        "the run continues without metrics: ",
        " watched already: ",
    ),
)
"""How lines begin that tell what happens, that are Python's own or another error's, or for the collector's log."""


def test_each_line_for_the_user_that_tells_of_trouble_has_a_code():
    without, coded = [], 0
    for place, call in calls("say", "_say", "tell", "_tell", "UserNotice"):
        nodes = list(ast.walk(call))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        first = next((text for text in texts if text.strip() not in ("", "gpuwatch:")), "")
        if {"Code", "coded"} & {getattr(node, "id", "") for node in nodes}:
            coded += 1
        elif first and not first.startswith(NO_TROUBLE) and not place.startswith(TO_ANOTHER_PROCESS):
            without.append(f"{place}: {first}")
    assert without == [] and coded > 40
