"""What of a sentence the page shows as code, and what it can copy."""

from __future__ import annotations

import pytest
from gpuwatch.collector.report.html.page import code_of


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("To see whole batches: gpuwatch launch --trace-batches N,N; to go on: --on-overflow continue.",
         ["gpuwatch launch --trace-batches N,N"]),
        ("test the links: gpuwatch check.", ["gpuwatch check"]),
        ("to make one: gpuwatch report --again 2026-slurm-17", ["gpuwatch report --again 2026-slurm-17"]),
        ("All of them: gpuwatch runs --like 20261126-000449-0ffc", ["gpuwatch runs --like 20261126-000449-0ffc"]),
        ("gpuwatch report sees more, gpuwatch reports nothing", ["gpuwatch report"]),
        ("gpuwatch check with the same options", ["gpuwatch check"]),
        ("gpuwatch launch --explain 7 --rank 3 train.py again", ["gpuwatch launch --explain 7 --rank 3 train.py"]),
        ("Drain it:\n  scontrol update nodename=gpu-7 state=drain", ["scontrol update nodename=gpu-7 state=drain"]),
        ("`gpuwatch check` is code", []),
        ("nothing of the kind", []),
    ],
)  # fmt: skip
def test_commands_of_a_sentence(text, commands):
    shown = str(code_of(text))
    assert [part.partition("</code>")[0] for part in shown.split('<code class="command">')[1:]] == commands


def test_a_traceback_is_shown_as_it_is():
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    main()\nValueError: <none>'
    shown = str(code_of(text))
    assert "command" not in shown and shown.startswith("Traceback (most recent call last):<pre>  File &#34;a.py&#34;")
    assert "\n    main()\nValueError: &lt;none&gt;</pre>" in shown


def test_an_option_alone_is_not_broken_and_all_text_is_escaped():
    assert str(code_of("<b> with --on-overflow continue")) == (
        '&lt;b&gt; with <span class="option">--on-overflow</span> continue'
    )
    assert str(code_of("a`<i>`b")) == "a<code>&lt;i&gt;</code>b"
    assert "<script" not in str(code_of("gpuwatch check --x=<script>alert(1)</script>"))
