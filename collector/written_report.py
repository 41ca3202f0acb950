"""The report of a run: as it was written, or made from its store where it was not."""

from __future__ import annotations

import msgspec

from ..core.codes import Code
from ..core.errors import GpuwatchError
from ..core.guest.own_files import read_regular
from ..core.text import command_for, shown_name
from .report.model import RunReport
from .run_files import MOST_REPORT_BYTES, RunPaths


def read_report(paths: RunPaths) -> RunReport:
    """report.json, or the report made from the store if it is missing. Raises GpuwatchError when there is neither."""
    try:
        return msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=RunReport)
    except FileNotFoundError:
        from .finish import report_from_store

        return report_from_store(paths)
    except OSError as error:
        raise GpuwatchError(
            Code.UNREADABLE, f"expected a report in {paths.report_json}, it cannot be read: {error.strerror}"
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        found = f"found something else in {paths.report_json}: {shown_name(str(error))}"
        again = f"to make it again from the store: {command_for(paths.folder, does='report --again')}"
        raise GpuwatchError(Code.UNREADABLE, f"expected a report of schema 1, {found}; {again}") from error
